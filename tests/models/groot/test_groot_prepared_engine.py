"""The engine with prepared steps: what it answers, when it does without them, and what it says then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from groot_folders import DROID, LANGUAGE, LIBERO, observation, write_isaac
from numpy.typing import NDArray
from torch import Tensor

from relay.engine.base import Progress, Work
from relay.engine.weights import CheckpointError
from relay.models import registry
from relay.models.groot import engine as engine_module
from relay.models.groot.engine import GrootEngine
from relay.models.groot.fixed_shapes import FixedShapes
from relay.models.groot.transforms import GrootPrepared
from relay.protocol.messages import Options

pytestmark = pytest.mark.vocab


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_isaac(tmp_path_factory.mktemp("groot"), tags=[DROID, LIBERO])


@pytest.fixture(scope="module", params=[LIBERO, DROID])
def loaded(request: pytest.FixtureRequest, folder: Path) -> Any:
    return registry.load("groot", checkpoint=folder, embodiment=request.param, device="cpu")


@pytest.fixture(scope="module")
def libero(folder: Path) -> Any:
    return registry.load("groot", checkpoint=folder, embodiment=LIBERO, device="cpu")


def warm(loaded: Any, *, graphs: bool = True, max_batch: int = 3) -> GrootEngine:
    engine = GrootEngine("groot", loaded.model, loaded._tokenizer, loaded._recipe, max_batch=max_batch, graphs=graphs)
    engine.warm_up(lambda phase, share: None)
    return engine


def request(engine: GrootEngine, seed: int = 0, *, size: tuple[int, int] = (64, 80), words: int = 6) -> dict[str, Any]:
    tag = engine.spec.metadata["embodiment_tag"]
    text = " ".join(["bowl", "cup", "plate"][i % 3] for i in range(words))
    return {**observation(tag, seed, size), "language": {LANGUAGE[tag]: text}}


def infer(engine: GrootEngine, *requests: dict[str, Any], steps: int | None = None) -> NDArray[np.float32]:
    """All groups of all rows side by side."""
    options = [Options(seed=seed, num_steps=steps) for seed, _ in enumerate(requests)]
    chunks: Sequence[Any] = engine.infer(
        [Work(engine.prepare(r, o), o) for r, o in zip(requests, options, strict=True)]
    )
    return np.stack([np.concatenate(list(chunk.actions.values()), -1)[0] for chunk in chunks])


def distance(actions: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    return float(np.abs(actions - reference).max() / reference.std())


def test_prepared_steps_answer_as_the_plain_path(loaded: Any) -> None:
    fast, plain = warm(loaded), warm(loaded, graphs=False)
    for size in ((64, 80), (224, 224), (180, 320)):
        requests = [request(plain, 0, size=size), request(plain, 1, size=size, words=30), request(plain, 2, size=size)]
        assert distance(infer(fast, *requests), infer(plain, *requests)) <= 1e-5
    assert fast.remarks == []
    assert fast.unprepared == 0


def test_nothing_is_prepared_after_warm_up(libero: Any) -> None:
    engine = warm(libero)
    assert engine.fixed is not None
    prepared = len(engine.fixed.graphs)
    assert prepared == 2 * 27  # three lengths of prompts, three kinds of frames, up to three rows
    for words in range(1, 100, 9):
        infer(engine, *[request(engine, words=words)] * (1 + words % 3), steps=1 + words % 5)
    assert len(engine.fixed.graphs) == prepared
    assert engine.unprepared == 0


def test_usual_frames_are_replayed_from_the_start_and_mixed_ones_in_the_steps(loaded: Any) -> None:
    engine = warm(loaded, max_batch=1)
    assert engine.fixed is not None
    replayed = Counter[str]()
    replay = engine.fixed.graphs.replay
    engine.fixed.graphs.replay = lambda key: (replayed.update([key[0]]), replay(key))  # pyright: ignore
    for size in ((120, 160), (200, 200), (90, 160)):  # as square as the usual ones
        infer(engine, request(engine, size=size))
    assert replayed == {"look": 3, "step": 12}
    mixed = request(engine)
    camera = next(iter(mixed["video"]))
    mixed["video"][camera] = mixed["video"][camera][:, :, :, :64]  # one camera's frames are squares
    plain = warm(loaded, graphs=False, max_batch=1)
    assert distance(infer(engine, mixed), infer(plain, mixed)) <= 1e-5
    assert replayed == {"look": 3, "step": 16}
    assert engine.unprepared == 0


@pytest.mark.parametrize("sent", [{"size": (64, 200)}, {"words": 150}], ids=["a strip", "a long instruction"])
def test_what_no_shape_holds_runs_plain_and_is_counted(sent: dict[str, Any], libero: Any) -> None:
    engine, plain = warm(libero), warm(libero, graphs=False)
    assert np.array_equal(infer(engine, request(engine, **sent)), infer(plain, request(plain, **sent)))
    assert engine.unprepared == 1
    assert engine.remarks == []


def test_without_memory_for_graphs_batches_run_plain_and_that_is_remarked(
    libero: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "graph_budget", lambda device: 0)
    engine = warm(libero, max_batch=1)
    assert engine.remarks == [
        "9 shapes found no memory for a graph and run without, the first is 144 text and 224 image tokens × batch 1"
    ]
    before = engine.unprepared
    infer(engine, request(engine))
    assert engine.unprepared == before + 1


def test_warm_up_says_what_it_captures_and_then_runs_every_batch_size(
    libero: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    sizes: list[int] = []
    sample = FixedShapes.sample
    engine = GrootEngine("groot", libero.model, libero._tokenizer, libero._recipe, max_batch=3, graphs=True)

    def watched(self: FixedShapes, batch: Sequence[GrootPrepared], noise: Tensor, num_steps: int) -> Tensor | None:
        sizes.append(len(batch))
        return sample(self, batch, noise, num_steps)

    monkeypatch.setattr(FixedShapes, "sample", watched)
    engine.warm_up(lambda phase, share: said.append(phase))
    assert said[0] == "capturing 144 text and 224 image tokens × batch 3"
    assert said[26:] == ["capturing 32 text and 128 image tokens × batch 1", *["warming up"] * 3]
    assert sizes[-3:] == [1, 2, 3]


@pytest.mark.parametrize("fault", ["always", "of full batches", "of single rows", "of buffers that were spoilt", "NaN"])
def test_prepared_steps_that_answer_otherwise_are_not_used(
    fault: str, libero: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, spoil, spoilt = FixedShapes.sample, FixedShapes.spoil, list[bool]()

    def wrong(self: FixedShapes, batch: Sequence[GrootPrepared], noise: Tensor, num_steps: int) -> Tensor | None:
        actions = sample(self, batch, noise, num_steps)
        assert actions is not None
        if fault == "NaN":
            return actions * float("nan")
        full, single, late = (len(batch) == 3, len(batch) == 1, bool(spoilt))
        faulty = {"always": True, "of full batches": full, "of single rows": single}.get(fault, late)
        return actions + 1e-3 * actions.std() if faulty else actions

    monkeypatch.setattr(FixedShapes, "sample", wrong)
    monkeypatch.setattr(FixedShapes, "spoil", lambda self: (spoilt.append(True), spoil(self)))
    engine = warm(libero)
    assert engine.fixed is None
    (remark,) = engine.remarks
    assert remark.startswith("prepared shapes are off: their actions differ from the plain ones by ")
    assert ("by nan" if fault == "NaN" else "by 1.0e-03 of their deviation, more than 0.0001") in remark
    plain = warm(libero, graphs=False)
    assert np.array_equal(infer(engine, request(engine)), infer(plain, request(plain)))


def test_steps_that_cannot_be_captured_are_done_without(libero: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: FixedShapes, progress: Progress) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(FixedShapes, "prepare", fails)
    engine = warm(libero)
    assert engine.remarks == ["prepared shapes are off: RuntimeError while capturing"]
    assert np.isfinite(infer(engine, request(engine))).all()


def test_a_device_lost_while_capturing_is_not_hidden(libero: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: FixedShapes, progress: Progress) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(FixedShapes, "prepare", fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        warm(libero)


def test_damaged_weights_are_noticed_with_prepared_steps_too(folder: Path) -> None:
    damaged = registry.load("groot", checkpoint=folder, embodiment=LIBERO, device="cpu")
    with torch.no_grad():
        damaged.model.dit.out.bias[0] = torch.nan  # pyright: ignore
    with pytest.raises(CheckpointError, match="not finite"):
        warm(damaged)


def test_bfloat16_steps_pass_their_own_check(folder: Path) -> None:
    halved = registry.load("groot", checkpoint=folder, embodiment=LIBERO, device="cpu", dtype="bfloat16")
    assert warm(halved, max_batch=2).remarks == []


def test_freed_memory_changes_nothing(libero: Any) -> None:
    engine = warm(libero)
    first = infer(engine, request(engine))
    engine.free_memory()
    assert np.array_equal(infer(engine, request(engine)), first)
    assert engine.unprepared == 0


def test_off_a_gpu_nothing_is_prepared(folder: Path) -> None:
    engine: Any = registry.load("groot", checkpoint=folder, embodiment=LIBERO, device="cpu", graphs="auto")
    engine.warm_up(lambda phase, share: None)
    assert engine.fixed is None
