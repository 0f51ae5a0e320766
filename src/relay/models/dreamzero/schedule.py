"""How noise becomes video and actions: sixteen steps of flow-matching UniPC, and which of them run the network.

UniPC (arXiv 2302.04867) of order 2 in its "bh2" form, predicting the clean sample, with corrector, as
dreamzero: groot/vla/model/dreamzero/modules/flow_unipc_multistep_scheduler.py sets it up. The grid of noise levels is
known beforehand, so each step is a fixed linear combination of a few tensors; its factors are worked out once, in
float64. It knows no network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from torch import Tensor
from torch.nn.functional import cosine_similarity

STEPS = 16
SHIFT = 5.0
FIRST_SIGMA = 0.999

COMPUTED = {
    5: (0, 1, 2, 7, 12),
    6: (0, 1, 5, 10, 14, 15),
    7: (0, 1, 2, 6, 10, 14, 15),
    8: (0, 1, 2, 6, 10, 13, 14, 15),
    16: tuple(range(16)),
}
"""Steps at which the network runs, by how many they are; at the others its last flows are used again."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Noise levels of one sampling.

    Attributes:
        sigmas: before each step, and after the last; 1 is noise alone.
        timesteps: what the network is told before each step.
    """

    sigmas: tuple[float, ...]
    timesteps: tuple[int, ...]


@cache
def grid(final_noise: float | None = None) -> Grid:
    """The reference's grid; with `final_noise`, squeezed so that it ends there, as decoupled video does."""
    levels = np.linspace(FIRST_SIGMA, 0.0, STEPS + 1)[:-1]
    sigmas = np.append(SHIFT * levels / (1 + (SHIFT - 1) * levels), 0.0)
    if final_noise is not None:
        sigmas = sigmas * (sigmas[0] - final_noise) / sigmas[0] + final_noise
    return Grid(tuple(sigmas.tolist()), tuple(int(sigma * 1000) for sigma in sigmas[:-1]))


class UniPC:
    """One sampling under way: give it the flow at each step, get the sample for the next.

    The clean sample that a flow predicts is `sample - sigma * flow`. A corrector redoes the last step with it, then a
    predictor takes the next.
    """

    def __init__(self, steps: Grid) -> None:
        self._factors = factors(steps.sigmas)
        self._before: Tensor | None = None  # the sample that the last predictor started from
        self._clean: list[Tensor] = []  # predictions of the last two steps, newest last

    def step(self, number: int, flow: Tensor, sample: Tensor) -> Tensor:
        """The sample at the next noise level."""
        at = self._factors[number]
        clean = sample - at.sigma * flow
        if self._before is not None:
            sample = _combined(at.corrector, (self._before, clean, *reversed(self._clean)))
        self._before = sample
        self._clean = [*self._clean[-1:], clean]
        return _combined(at.predictor, (sample, *reversed(self._clean)))


@dataclass(frozen=True, slots=True)
class Factors:
    """What one step multiplies.

    Attributes:
        corrector: of the sample before the last step, this step's clean sample, the last one's, and the one before.
        predictor: of the sample, this step's clean sample, and the last one's.
    """

    sigma: float
    corrector: tuple[float, ...]
    predictor: tuple[float, ...]


@cache
def factors(sigmas: tuple[float, ...]) -> tuple[Factors, ...]:
    """The linear combinations of all steps."""
    last = len(sigmas) - 2
    result: list[Factors] = []
    order = 0  # of the predictor that brought us here
    for number in range(last + 1):
        corrector = _correct(sigmas, number, order) if number else ()
        order = min(2, order + 1, last + 1 - number)
        result.append(Factors(sigmas[number], corrector, _predict(sigmas, number, order)))
    return tuple(result)


def _predict(sigmas: Sequence[float], number: int, order: int) -> tuple[float, ...]:
    here, there = sigmas[number], sigmas[number + 1]
    if there == 0:
        return (0.0, 1.0)
    step = _log_snr(there) - _log_snr(here)
    growth = (1 - there) * math.expm1(-step)
    if order == 1:
        return (there / here, -growth)
    ratio = (_log_snr(sigmas[number - 1]) - _log_snr(here)) / step
    slope = 0.5 * growth / ratio  # of (last clean - this clean)
    return (there / here, -growth + slope, -slope)


def _correct(sigmas: Sequence[float], number: int, order: int) -> tuple[float, ...]:
    before, here = sigmas[number - 1], sigmas[number]
    step = _log_snr(here) - _log_snr(before)
    grown = math.expm1(-step)
    growth = (1 - here) * grown
    if order == 1:
        return (here / before, -0.5 * growth, -0.5 * growth)
    ratio = (_log_snr(sigmas[number - 2]) - _log_snr(before)) / step
    first = (-grown / step - 1) / grown
    second = 2 * ((-grown / step - 1) / -step - 0.5) / grown
    of_last, of_this = np.linalg.solve(np.array([[1.0, 1.0], [ratio, 1.0]]), np.array([first, second])).tolist()
    older = growth * of_last / ratio
    return (here / before, -growth * of_this, -growth + older + growth * of_this, -older)


def _log_snr(sigma: float) -> float:
    return math.log1p(-sigma) - math.log(sigma)


def _combined(weights: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    """The weighted sum; a weight of zero leaves its tensor out, whatever that holds."""
    terms = [weight * tensor for weight, tensor in zip(weights, tensors, strict=False) if weight]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


class FixedSteps:
    """The network runs at the steps of one row of `COMPUTED`.

    Attributes:
        last: the last of them, if known beforehand: its video flow is of no use to the actions.
    """

    def __init__(self, evaluations: int) -> None:
        self._steps = frozenset(COMPUTED[evaluations])
        self.last: int | None = max(self._steps)

    def runs(self, number: int, flows: Sequence[Tensor]) -> bool:
        """Whether step `number` runs the network, after these video flows."""
        return number in self._steps


class DynamicSteps:
    """The network rests for some steps whenever its last two video flows were alike.

    Not exact, and of another length for every observation (dreamzero: DYNAMIC_CACHE_SCHEDULE).
    """

    last: int | None = STEPS - 1

    def __init__(self) -> None:
        self._rests = 0

    def runs(self, number: int, flows: Sequence[Tensor]) -> bool:
        """Whether step `number` runs the network, after these video flows."""
        if self._rests:
            self._rests -= 1
            return self._rests == 0
        if len(flows) >= 2:
            last, before = (flow.flatten(1).float() for flow in flows[-2:])
            alike = float(cosine_similarity(last, before, dim=1).mean())
            self._rests = next((rests for least, rests in ALIKE if alike > least), 0)
        return self._rests == 0


ALIKE = ((0.95, 4), (0.93, 2))
"""Cosine similarities above which the network rests, and for how many steps."""
