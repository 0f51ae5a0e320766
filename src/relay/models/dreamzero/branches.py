"""Guidance on one device or on two: who computes the flow of the prompt, who that of the negative prompt.

One device runs both as rows of a batch. Two share them: each has the whole network and the keys and values of its own
branch, both take every step of the sampler themselves, and after each pass they give each other their flows, two small
tensors (dreamzero: groot/vla/model/dreamzero/action_head/wan_flow_matching_action_tf.py does so between two ranks).
It knows no network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

_Result = TypeVar("_Result")


class Flows(NamedTuple):
    """What one pass gives, in float32.

    Attributes:
        video: (branches, channels, frames, height, width).
        actions: (branches, horizon, action_dim); nothing but the prompt's is ever used.
    """

    video: Tensor
    actions: Tensor


Exchange: TypeAlias = Callable[[Flows | None, torch.device], Flows]
"""Gives this worker's flows, None where it ran no pass, and returns those of all that did on its device, the prompt's
first."""


@dataclass(frozen=True, slots=True)
class BranchPlan:
    """What a worker computes.

    Attributes:
        prompt, negative: which branches are its own.
        exchange: how it gets the other's flows; None if both are its own.
    """

    prompt: bool = True
    negative: bool = True
    exchange: Exchange | None = None

    @property
    def count(self) -> int:
        """Branches that it keeps keys and values of."""
        return self.prompt + self.negative

    def rows(self, *, guided: bool) -> int:
        """Branches of a pass, the first of its own; without guidance only the prompt's is needed."""
        return self.count if guided else int(self.prompt)

    def together(self, flows: Flows | None, device: torch.device) -> Flows:
        """The flows of both branches, or of the prompt's alone where there was no guidance; on this worker's device."""
        if self.exchange is not None:
            return self.exchange(flows, device)
        assert flows is not None
        return flows


class Pair:
    """Two workers in threads of one process, the prompt's and the negative prompt's.

    Args:
        patience: seconds that one of them waits for the other before it gives up.
    """

    def __init__(self, patience: float = 60.0) -> None:
        self._meeting = threading.Barrier(2, timeout=patience)
        self._brought: list[Flows | None] = [None, None]
        self.plans = (
            BranchPlan(negative=False, exchange=lambda flows, device: self._exchange(0, flows, device)),
            BranchPlan(prompt=False, exchange=lambda flows, device: self._exchange(1, flows, device)),
        )

    def run(self, work: Callable[[int], _Result]) -> tuple[_Result, _Result]:
        """Both workers' results, `work` being called with 0 and 1; the error of the one that failed first."""
        first_error: list[BaseException] = []

        def watched(place: int) -> _Result:
            try:
                return work(place)
            except BaseException as error:
                first_error.append(error)
                self._meeting.abort()  # the other must not wait for it
                raise

        self._meeting.reset()
        with ThreadPoolExecutor(2) as threads:
            pending = [threads.submit(watched, place) for place in (0, 1)]
        if first_error:
            raise first_error[0]
        first, second = (one.result() for one in pending)
        return first, second

    def _exchange(self, place: int, flows: Flows | None, device: torch.device) -> Flows:
        self._brought[place] = flows
        self._meeting.wait()
        brought = [each for each in self._brought if each is not None]
        self._meeting.wait()  # before either brings its next
        return Flows(*(torch.cat([each[part].to(device) for each in brought]) for part in (0, 1)))
