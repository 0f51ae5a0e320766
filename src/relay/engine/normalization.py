"""A robot's state into a model's range and a model's actions out of it, by the statistics of the training data.

Two conventions exist, and a checkpoint trained with one gives wrong actions under the other: openpi's (float64, a
constant added to every divisor; openpi: src/openpi/transforms.py) and lerobot's (float32, a constant for divisors of
zero only, none on the way out; lerobot: src/lerobot/processor/normalize_processor.py). Nothing is ever clipped. Knows
no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["z_score", "quantile", "min_max", "none"]
"""`min_max` is `quantile` with the extremes in place of the percentiles; `none` leaves the values as they are."""

Style = Literal["openpi", "lerobot"]

_OPENPI_EPSILON = 1e-6
_LEROBOT_EPSILON = 1e-8
FAR_DEVIATIONS = 6.0
FAR_RANGES = 2.25
"""A value normalized to [-1, 1] is far outside when it lies more than 0.625 widths of the range beyond an end.

One percent of the training data lies beyond each percentile, so the percentiles themselves would raise false alarms;
for a normal distribution this bound is 5.2 standard deviations, one false alarm in six million values."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """One vector's statistics over the training data, each `(n,)` float64; None where the file has none."""

    mean: NDArray[np.float64] | None = None
    std: NDArray[np.float64] | None = None
    q01: NDArray[np.float64] | None = None
    q99: NDArray[np.float64] | None = None
    min: NDArray[np.float64] | None = None
    max: NDArray[np.float64] | None = None

    def pair(self, kind: Kind) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The two vectors that `kind` needs: mean and deviation, or the two ends of the range.

        Raises:
            KeyError: naming the one that is missing.
        """
        names = PAIRS[kind]
        for name in names:
            if getattr(self, name) is None:
                raise KeyError(name)
        first, second = (getattr(self, name) for name in names)
        return first, second

    def cut(self, width: int) -> Statistics:
        """The first `width` dimensions."""
        values = {name: getattr(self, name) for name in ("mean", "std", "q01", "q99", "min", "max")}
        return Statistics(**{name: None if value is None else value[:width] for name, value in values.items()})


PAIRS: dict[Kind, tuple[str, ...]] = {
    "z_score": ("mean", "std"),
    "quantile": ("q01", "q99"),
    "min_max": ("min", "max"),
    "none": (),
}
"""The statistics that each kind reads."""


@dataclass(frozen=True, slots=True)
class Normalization:
    """How a checkpoint's state and actions are scaled.

    Attributes:
        kind: of the state, and of the actions unless `actions_kind` says otherwise.
        style: whose arithmetic.
        state, actions: statistics at the robot's real widths.
        actions_kind: where it differs from the state's, which lerobot allows.
    """

    kind: Kind
    style: Style
    state: Statistics
    actions: Statistics
    actions_kind: Kind | None = None

    def normalize_state(self, state: NDArray[Any]) -> NDArray[np.float64]:
        """A state `(n,)` in the robot's units as the model was trained on it; never clipped."""
        return self._normalize(state, self.state, self.kind)

    def normalize_actions(self, actions: NDArray[Any]) -> NDArray[np.float64]:
        """Actions `(n, real width)` in the robot's units as the model would give them; never clipped."""
        return self._normalize(actions, self.actions, self.actions_kind or self.kind)

    def _normalize(self, values: NDArray[Any], statistics: Statistics, kind: Kind) -> NDArray[np.float64]:
        if kind == "none":
            return np.asarray(values, np.float64)
        first, second = statistics.pair(kind)
        if self.style == "openpi":
            x = np.asarray(values, np.float64)
            if kind == "z_score":
                return (x - first) / (second + _OPENPI_EPSILON)
            return (x - first) / (second - first + _OPENPI_EPSILON) * 2.0 - 1.0
        x, first, second = (np.asarray(value, np.float32) for value in (values, first, second))
        if kind == "z_score":
            return ((x - first) / (second + np.float32(_LEROBOT_EPSILON))).astype(np.float64)
        return (np.float32(2) * (x - first) / _lerobot_width(first, second) - np.float32(1)).astype(np.float64)

    def unnormalize_actions(self, actions: NDArray[Any]) -> NDArray[np.float64]:
        """Actions `(horizon, m)` of the model in the robot's units.

        Dimensions beyond the statistics are the model's padding: openpi keeps them (z-scored as if their mean were 0
        and their deviation 1, otherwise untouched), lerobot cuts them off.
        """
        kind = self.actions_kind or self.kind
        if kind == "none":
            return np.asarray(actions, np.float64)
        first, second = self.actions.pair(kind)
        width = min(len(first), actions.shape[-1])
        first, second = first[:width], second[:width]
        if self.style == "openpi":
            x = np.asarray(actions, np.float64)
            real, padding = x[..., :width], x[..., width:]
            if kind == "z_score":
                real = real * (second + _OPENPI_EPSILON) + first
                padding = padding * (1.0 + _OPENPI_EPSILON)
            else:
                real = (real + 1.0) / 2.0 * (second - first + _OPENPI_EPSILON) + first
            return np.concatenate([real, padding], axis=-1)
        x, first, second = (np.asarray(value, np.float32) for value in (actions[..., :width], first, second))
        if kind == "z_score":
            return (x * second + first).astype(np.float64)
        return ((x + np.float32(1)) * _lerobot_width(first, second) / np.float32(2) + first).astype(np.float64)

    def outside(self, state: NDArray[Any], names: Sequence[str] = ()) -> str | None:
        """A remark if `state` is nowhere near the training data, which wrong units are the usual cause of.

        That is more than six standard deviations from the mean, or more than 0.625 widths of the range beyond its
        ends. The remark tells the worst dimension, by its name where `names` has one.
        """
        if self.kind == "none":
            return None
        scaled = self.normalize_state(state)
        far = np.abs(scaled) / (FAR_DEVIATIONS if self.kind == "z_score" else FAR_RANGES)
        worst = int(np.argmax(far))
        if not far[worst] > 1:
            return None
        first, second = (vector[worst] for vector in self.state.pair(self.kind))
        name = f" ({names[worst]})" if worst < len(names) else ""
        where = f"state[{worst}]{name} is {float(state[worst]):.4g}"
        if self.kind == "z_score":
            off = f"{abs(scaled[worst]):.0f} standard deviations from the mean {first:.4g}"
            return f"{where}, {off} of the training data; units?"
        ends = "1st to 99th percentile" if self.kind == "quantile" else "smallest to largest"
        return f"{where}, far outside {first:.4g} to {second:.4g} ({ends} of the training data); units?"


def _lerobot_width(low: NDArray[np.float32], high: NDArray[np.float32]) -> NDArray[np.float32]:
    width = high - low
    return np.where(width == 0, np.float32(_LEROBOT_EPSILON), width)
