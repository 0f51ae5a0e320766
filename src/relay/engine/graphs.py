"""Functions over fixed buffers, captured once as CUDA graphs and replayed; elsewhere they are called as they are.

A graph starts hundreds of kernels with one call, so a small step no longer waits for the CPU that launches it. What is
captured must read and write buffers that outlive it, must not depend on values on the CPU and must not wait for the
device. All graphs share one memory pool, so only one may run at a time. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


class Graphs:
    """Functions by key, ready to be replayed.

    Args:
        capture: make CUDA graphs of them; without it a replay is a plain call, with the same buffers.
        budget_bytes: most device memory that all graphs together may take; None for no limit.
    """

    def __init__(self, device: torch.device, *, capture: bool, budget_bytes: int | None = None) -> None:
        self.capture = capture
        self.memory_bytes = 0
        self._device, self._budget = device, budget_bytes
        self._replays: dict[Hashable, Callable[[], None]] = {}
        if capture:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._replays

    def __len__(self) -> int:
        return len(self._replays)

    @property
    def full(self) -> bool:
        """Whether the memory is spent; what is ready stays ready."""
        return self._budget is not None and self.memory_bytes >= self._budget

    def prepare(self, key: Hashable, run: Callable[[], object]) -> None:
        """Run the function once, which chooses kernels and makes their workspaces, then capture it."""
        run()
        self._replays[key] = self._captured(run) if self.capture else lambda: _call(run)

    def replay(self, key: Hashable) -> None:
        """Do again what was captured under this key, on what the buffers hold now; does not wait for the device."""
        self._replays[key]()

    def _captured(self, run: Callable[[], object]) -> Callable[[], None]:
        torch.cuda.synchronize(self._device)
        before = torch.cuda.mem_get_info(self._device)[0]
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device: several policies can be loaded in one process.
        capturing = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
        with torch.cuda.device(self._device), capturing:
            run()
        graph.replay()  # the first replay uploads it
        torch.cuda.synchronize(self._device)
        self.memory_bytes += max(0, before - torch.cuda.mem_get_info(self._device)[0])
        return graph.replay


def graph_budget(device: torch.device) -> int | None:
    """Device memory that graphs may take: a quarter of what is free now; None where there are no graphs."""
    return torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else None


def _call(run: Callable[[], object]) -> None:
    run()
