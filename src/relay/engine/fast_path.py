"""A prepared path beside the plain one: taken when it gives what the plain one gives, else left with a remark why.

Knows no model: what is prepared, and how far its actions are from the plain ones, is told by functions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from relay.engine.worker import loses_device

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference of actions in units of their standard deviation. Other kernels and other padding round otherwise:
a tiny random network's actions in bfloat16 are up to 3e-2 from those in float32. A wrong buffer gives about 1."""

logger = logging.getLogger(__name__)


class Prepared(Protocol):
    """A network prepared for some shapes."""

    @property
    def left_out(self) -> Sequence[object]:
        """Shapes that should have been prepared and are not, for want of memory."""
        ...


P = TypeVar("P", bound=Prepared)


def checked(
    what: str, prepare: Callable[[], P], distance: Callable[[P], float], tolerance: float
) -> tuple[P | None, list[str]]:
    """The prepared path, if it can be had and gives what the plain one gives; and remarks for the health check.

    Args:
        what: its name in remarks.
        distance: the largest difference of its actions from the plain ones, in units of their deviation.

    Raises:
        RuntimeError: the device was lost on the way.
    """
    try:
        prepared = prepare()
        found = distance(prepared)
    except Exception as error:
        if loses_device(error):
            raise
        logger.warning("capturing failed", exc_info=error)
        return None, [f"{what} are off: {type(error).__name__} while capturing"]
    if not found <= tolerance:  # so for NaN
        return None, [
            f"{what} are off: their actions differ from the plain ones by {found:.1e} of their deviation, more than "
            f"{tolerance:g}"
        ]
    if not prepared.left_out:
        return prepared, []
    return prepared, [
        f"{len(prepared.left_out)} shapes found no memory for a graph and run without, the first is "
        f"{prepared.left_out[0]}"
    ]


def largest_difference(batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Of actions and plain actions, in units of the latter's deviation; NaN if any of them is."""
    distances = [float((actions - plain).abs().max() / plain.std()) for actions, plain in batches]
    return max(distances, default=0.0) if all(d == d for d in distances) else float("nan")
