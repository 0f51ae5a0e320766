"""Prepared functions and their replays, where there are no CUDA graphs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from relay.engine.graphs import Graphs, graph_budget

CPU = torch.device("cpu")


def test_a_replay_works_on_what_the_buffers_hold_then() -> None:
    source, target = torch.zeros(3), torch.zeros(3)
    graphs = Graphs(CPU, capture=False)
    graphs.prepare("double", lambda: target.copy_(2 * source))
    source.fill_(4)
    graphs.replay("double")
    assert target.tolist() == [8, 8, 8]


def test_what_was_not_prepared_cannot_be_replayed() -> None:
    graphs = Graphs(CPU, capture=False)
    assert "anything" not in graphs
    with pytest.raises(KeyError):
        graphs.replay("anything")


def test_preparing_reports_an_error_of_the_function() -> None:
    graphs = Graphs(CPU, capture=False)
    with pytest.raises(ZeroDivisionError):
        graphs.prepare("broken", lambda: 1 // 0)
    assert len(graphs) == 0


def test_only_a_gpu_has_a_budget() -> None:
    assert graph_budget(CPU) is None


@pytest.mark.gpu
def test_a_captured_graph_works_on_what_the_buffers_hold_then() -> None:
    device = torch.device("cuda")
    source, target = torch.zeros(3, device=device), torch.zeros(3, device=device)
    graphs = Graphs(device, capture=True)
    graphs.prepare("double", lambda: target.copy_(2 * source))
    source.fill_(4)
    graphs.replay("double")
    assert target.tolist() == [8, 8, 8]


def test_capturing_counts_memory_and_replays_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for CUDA: one run to warm up, one captured on a stream of our own, replays after that."""
    said: list[str] = []
    free = iter([1000, 700])

    class Graph:
        def replay(self) -> None:
            said.append("replay")

    capture = inspect.signature(torch.cuda.graph.__init__)

    @contextmanager
    def graph(*args: object, **options: object) -> Iterator[None]:
        capture.bind(None, *args, **options)
        assert args[2] == "stream"
        said.append("begin")
        yield
        said.append("end")

    for name, stand_in in {
        "graph_pool_handle": lambda: (0, 1),
        "Stream": lambda device: "stream",
        "CUDAGraph": Graph,
        "graph": graph,
        "device": lambda device: nullcontext(),
        "synchronize": lambda device: None,
        "mem_get_info": lambda device: (next(free), 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    graphs = Graphs(torch.device("cuda"), capture=True, budget_bytes=300)
    graphs.prepare("work", lambda: said.append("run"))
    graphs.replay("work")
    assert said == ["run", "begin", "run", "end", "replay", "replay"]
    assert graphs.memory_bytes == 300
    assert graphs.full
