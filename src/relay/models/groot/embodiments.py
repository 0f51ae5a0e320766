"""The embodiments that GR00T N1.7 knows by name, and which of the network's slots each one has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Embodiment:
    """A robot as the checkpoint calls it.

    Attributes:
        tag: as in the checkpoint's files, such as `libero_sim`.
        slot: which of the per-embodiment maps are its.
    """

    tag: str
    slot: int
