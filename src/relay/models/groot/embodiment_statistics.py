"""What a checkpoint's `statistics.json` says of one embodiment: the numbers that its values are scaled with.

As in Isaac-GR00T: gr00t/data/state_action/state_action_processor.py. Knows no scaling; it gives out what is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from relay.engine.json_entries import entry
from relay.engine.statistics import damage, numbers
from relay.engine.weights import CheckpointError
from relay.models.groot.formats import STATISTICS_FILE

_NAMES = ("min", "max", "mean", "std", "q01", "q99")


@dataclass(frozen=True, slots=True)
class EmbodimentStatistics:
    """An embodiment's entry of `statistics.json`, by modality (`state`, `action`, `relative_action`) and key.

    Attributes:
        told: the entry as it was read.
        tag: the embodiment's, for errors.
    """

    told: Mapping[str, Any]
    tag: str

    def width(self, modality: str, key: str) -> int:
        """How many values the key has.

        Raises:
            CheckpointError: the key has no statistics, or they are no numbers.
        """
        values = self._of(modality, key)
        for name in _NAMES:
            if values.get(name) is not None:
                return self._vector(modality, key, name).shape[-1]
        raise CheckpointError(f"{self._place(modality, key)} has none of {', '.join(_NAMES)}")

    def pair(self, modality: str, key: str, first: str, second: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Two statistics of a key, either its ends or its mean and deviation; the unused ones must be right too.

        Returns:
            float64, (width,) each; of `relative_action` perhaps one row per step, (steps, width).

        Raises:
            CheckpointError: one of them is missing, they do not fit each other, or a value of any is damaged.
        """
        place, told = self._place(modality, key), self._of(modality, key)
        low, high = self._vector(modality, key, first), self._vector(modality, key, second)
        if low.shape != high.shape:
            raise CheckpointError(f"{place}: {first} has shape {low.shape}, but {second} {high.shape}")
        given = {name: self._vector(modality, key, name) for name in _NAMES if told.get(name) is not None}
        if wrong := damage(given, key):
            raise CheckpointError(f"{place}: {wrong}; take the file of the training run, or compute it anew")
        return low, high

    def _vector(self, modality: str, key: str, name: str) -> NDArray[np.float64]:
        place = self._place(modality, key)
        value = self._of(modality, key).get(name)
        if value is None:
            raise CheckpointError(f"{place} has no {name}")
        vector = numbers(value)
        if vector is None:
            raise CheckpointError(f"{place}: {name} is not a list of numbers")
        most = 2 if modality == "relative_action" else 1
        if not 1 <= vector.ndim <= most or vector.size == 0:
            raise CheckpointError(f"{place}: {name} has shape {vector.shape}, expected one entry per value")
        return vector

    def _of(self, modality: str, key: str) -> Mapping[str, Any]:
        place = f"{STATISTICS_FILE}, {self.tag}"
        keys: dict[str, Any] = entry(self.told, modality, dict, place)
        return cast("dict[str, Any]", entry(keys, key, dict, f"{place}, {modality}"))

    def _place(self, modality: str, key: str) -> str:
        return f"{STATISTICS_FILE}: {modality} of {key!r} of {self.tag}"
