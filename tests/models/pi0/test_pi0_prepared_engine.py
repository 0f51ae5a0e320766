"""The engine with prepared shapes: what it answers, when it does without them, and what it says then."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lora import EXPERT_ATTENTION, random_factors, write_peft
from numpy.typing import NDArray
from tiny import image, tiny_model
from torch import Tensor

from relay.demo.vocabulary import write_tokenizer
from relay.engine.adapter_folders import AdapterChoice
from relay.engine.base import Chunk, Progress, Work
from relay.models import registry
from relay.models.pi0 import engine as engine_module
from relay.models.pi0.config import CAMERAS
from relay.models.pi0.engine import Pi0Engine
from relay.models.pi0.fixed_shapes import FixedShapes
from relay.models.pi0.model import Pi0
from relay.models.pi0.tokenizer import PromptTokenizer, load_vocabulary
from relay.models.pi0.weights import CheckpointError
from relay.protocol.images import Codec, encode_frame
from relay.protocol.messages import Options


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    write_tokenizer(path)
    return PromptTokenizer(load_vocabulary(path), 40, state_in_prompt=False)


def network(family: str) -> Pi0:
    """The golden network with a state that the test vocabulary's prompts leave room for."""
    model = copy.copy(tiny_model(family))
    model.config = dataclasses.replace(model.config, state_in_prompt=False, max_token_len=40)
    return model


def warm(family: str, tokenizer: PromptTokenizer, **options: object) -> Pi0Engine:
    engine = Pi0Engine(family, network(family), tokenizer, max_batch=3, **options)  # pyright: ignore
    engine.warm_up(lambda phase, share: None)
    return engine


def request(row: int, *, encoded: bool = False, cameras: int = 2, prompt: int = 9) -> dict[str, object]:
    frames = {camera: image(row, i) for i, camera in enumerate(CAMERAS[:cameras])}
    return {
        "image": {k: encode_frame(f, Codec.JPEG_Q90) for k, f in frames.items()} if encoded else frames,
        "state": np.full(32, 0.1 * row, np.float32),
        "tokenized_prompt": np.arange(1, 1 + prompt),
        "tokenized_prompt_mask": np.ones(prompt, bool),
    }


def infer(engine: Pi0Engine, *requests: dict[str, object], steps: int | None = None) -> NDArray[np.float32]:
    options = [Options(seed=seed, num_steps=steps) for seed, _ in enumerate(requests)]
    chunks = engine.infer([Work(engine.prepare(r, o), o) for r, o in zip(requests, options, strict=True)])
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    return np.stack([np.asarray(chunk.actions) for chunk in chunks if isinstance(chunk, Chunk)])


def test_prepared_shapes_answer_as_the_plain_path(family: str, tokenizer: PromptTokenizer) -> None:
    fast, plain = warm(family, tokenizer, graphs=True), warm(family, tokenizer)
    requests = [request(0), request(1, cameras=1, prompt=30), request(2, cameras=3, prompt=17)]
    expected = infer(plain, *requests)
    assert np.abs(infer(fast, *requests) - expected).max() / expected.std() <= 1e-5
    assert fast.remarks == []
    assert fast.unprepared == 0


def test_an_observation_sent_again_gives_the_same_bytes_without_its_images(
    family: str, tokenizer: PromptTokenizer
) -> None:
    engine = warm(family, tokenizer, graphs=True)
    first = infer(engine, request(1, encoded=True))
    infer(engine, request(2, encoded=True))
    assert infer(engine, request(1, encoded=True)).tobytes() == first.tobytes()
    assert engine.fixed is not None
    assert engine.fixed.reused_images == 2


def test_freed_memory_costs_nothing_but_time(family: str, tokenizer: PromptTokenizer) -> None:
    engine = warm(family, tokenizer, graphs=True)
    first = infer(engine, request(1, encoded=True))
    engine.free_memory()
    assert infer(engine, request(1, encoded=True)).tobytes() == first.tobytes()
    assert engine.fixed is not None
    assert engine.fixed.reused_images == engine.fixed.reused_prefixes == 0


def test_frames_sent_as_arrays_are_computed_anew(family: str, tokenizer: PromptTokenizer) -> None:
    engine = warm(family, tokenizer, graphs=True)
    first = infer(engine, request(1))
    assert infer(engine, request(1)).tobytes() == first.tobytes()
    assert engine.fixed is not None
    assert engine.fixed.reused_images == engine.fixed.reused_prefixes == 0


def test_other_frames_with_the_same_prompt_and_state_are_told_apart(family: str, tokenizer: PromptTokenizer) -> None:
    engine, plain = warm(family, tokenizer, graphs=True), warm(family, tokenizer)
    infer(engine, request(1, encoded=True))
    other = request(2, encoded=True) | {"state": request(1)["state"]}
    assert np.abs(infer(engine, other) - infer(plain, other)).max() <= 1e-4


def test_without_reuse_everything_is_computed_anew(family: str, tokenizer: PromptTokenizer) -> None:
    engine = warm(family, tokenizer, graphs=True, reuse_bytes=0)
    for _ in range(2):
        infer(engine, request(1, encoded=True))
    assert engine.fixed is not None
    assert engine.fixed.reused_images == engine.fixed.reused_prefixes == 0


def test_nothing_is_prepared_after_warm_up(family: str, tokenizer: PromptTokenizer) -> None:
    engine = warm(family, tokenizer, graphs=True)
    assert engine.fixed is not None
    prepared = len(engine.fixed.graphs)
    for length in range(1, 41):
        infer(engine, request(1, prompt=length, cameras=1 + length % 3), steps=1 + length % 5)
    assert len(engine.fixed.graphs) == prepared
    assert engine.unprepared == 0


def test_batches_without_a_prepared_shape_run_plain_and_are_counted(
    family: str, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "graph_budget", lambda device: 0)
    engine, plain = warm(family, tokenizer, graphs=True), warm(family, tokenizer)
    expected = infer(plain, request(1))
    assert np.abs(infer(engine, request(1)) - expected).max() / expected.std() <= 1e-5
    assert engine.unprepared == 1
    assert "found no memory for a graph" in engine.remarks[0]


def test_prepared_shapes_that_answer_otherwise_are_not_used(
    family: str, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = FixedShapes.sample

    def wrong(self: FixedShapes, rows: list[object], noise: Tensor) -> Tensor | None:
        actions = sample(self, rows, noise)  # pyright: ignore
        return None if actions is None else actions + 1e-3 * actions.std()

    monkeypatch.setattr(FixedShapes, "sample", wrong)
    engine = warm(family, tokenizer, graphs=True)
    assert engine.fixed is None
    assert "prepared shapes are off: their actions differ from the plain ones by 1.0e-03" in engine.remarks[0]
    assert infer(engine, request(1)).tobytes() == infer(warm(family, tokenizer), request(1)).tobytes()


@pytest.mark.parametrize("fault", ["of full batches", "after other batches", "not a number"])
def test_prepared_shapes_that_answer_otherwise_at_times_are_not_used_either(
    fault: str, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, batches = FixedShapes.sample, list[int]()

    def wrong(self: FixedShapes, rows: list[object], noise: Tensor) -> Tensor | None:
        batches.append(len(rows))
        actions = sample(self, rows, noise)  # pyright: ignore
        assert actions is not None
        actions = actions.clone()
        if fault == "not a number":
            actions[0, 0, 0] = float("nan")
        elif len(rows) == 3 if fault == "of full batches" else len(batches) == 3:
            actions += 1e-3 * actions.std()
        return actions

    monkeypatch.setattr(FixedShapes, "sample", wrong)
    engine = warm("pi05", tokenizer, graphs=True)
    assert engine.fixed is None
    assert "prepared shapes are off: their actions differ from the plain ones by" in engine.remarks[0]


def test_shapes_that_cannot_be_captured_are_done_without(
    family: str, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: FixedShapes, progress: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(FixedShapes, "prepare", fails)
    engine = warm(family, tokenizer, graphs=True)
    assert engine.remarks == ["prepared shapes are off: RuntimeError while capturing"]
    assert np.isfinite(infer(engine, request(1))).all()


def test_without_a_compiler_shapes_are_prepared_uncompiled(
    family: str, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = Pi0Engine._captured

    def fails(self: Pi0Engine, progress: Progress, *, compile: bool) -> FixedShapes:
        if compile:
            raise RuntimeError("Cannot find a working triton installation")
        return captured(self, progress, compile=compile)

    monkeypatch.setattr(Pi0Engine, "_captured", fails)
    engine = warm(family, tokenizer, graphs=True, compile=True)
    assert engine.remarks == ["compiled functions are off: RuntimeError while capturing"]
    assert engine.fixed is not None


def test_a_device_lost_while_capturing_is_not_hidden(
    family: str, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: FixedShapes, progress: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(FixedShapes, "prepare", fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        warm(family, tokenizer, graphs=True)


def test_damaged_weights_are_noticed_with_prepared_shapes_too(tokenizer: PromptTokenizer) -> None:
    damaged = copy.deepcopy(network("pi05"))
    damaged.action_out.weight.data[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="not finite"):
        Pi0Engine("broken", damaged, tokenizer, max_batch=1, graphs=True).warm_up(lambda phase, share: None)


def test_shapes_are_not_prepared_once_more_for_a_merged_adapter(
    family: str, tokenizer: PromptTokenizer, tmp_path: Path
) -> None:
    folder = write_peft(tmp_path / "fold", random_factors(family, EXPERT_ATTENTION))
    plain = warm(family, tokenizer, graphs=True)
    merged = warm(family, tokenizer, graphs=True, adapters=AdapterChoice(named={"fold": folder}, merged=True))
    assert plain.fixed is not None
    assert merged.fixed is not None
    assert len(merged.fixed.graphs) == len(plain.fixed.graphs)
    assert np.abs(infer(merged, request(1)) - infer(plain, request(1))).max() > 1e-3


def test_bfloat16_shapes_pass_their_own_check(family: str, tokenizer: PromptTokenizer) -> None:
    model = copy.copy(tiny_model(family, torch.bfloat16))
    model.config = network(family).config
    engine = Pi0Engine(family, model, tokenizer, max_batch=2, graphs=True)
    engine.warm_up(lambda phase, share: None)
    assert engine.remarks == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compile": True}, "--compile goes with CUDA graphs: it needs a GPU and --graphs auto"),
        ({"graphs": "on"}, "--graphs must be auto or off, got 'on'"),
        ({"decode": "tpu"}, "--decode must be auto or cpu or gpu, got 'tpu'"),
        ({"decode": "gpu"}, "--decode gpu needs a CUDA device"),
    ],
)
def test_options_that_this_machine_cannot_honour_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        registry.load("demo", checkpoint=None, device="cpu", **options).warm_up(lambda phase, share: None)
