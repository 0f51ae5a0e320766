"""Prepared functions and their replays, where there are no CUDA graphs."""

from __future__ import annotations

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
