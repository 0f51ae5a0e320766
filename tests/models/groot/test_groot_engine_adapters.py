"""The GR00T engine with adapters: by name, by default, beside each other, and merged at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from groot_folders import LIBERO, observation, write_isaac
from lora import write_peft
from numpy.typing import NDArray

from relay.engine.adapter_folders import AdapterChoice
from relay.engine.base import Work
from relay.models import registry
from relay.protocol.errors import ObservationError
from relay.protocol.messages import Options

pytestmark = pytest.mark.vocab

MODULE = "action_head.model.transformer_blocks.{}.attn1.to_q"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_isaac(tmp_path_factory.mktemp("groot"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters, and one that changes nothing."""
    root = tmp_path_factory.mktemp("adapters")
    for block, (name, size) in enumerate({"fold": 1.0, "pour": 1.0, "idle": 0.0}.items()):
        generator = torch.Generator().manual_seed(block)
        a, b = (size * torch.randn(shape, generator=generator) for shape in ((4, 32), (32, 4)))
        module = MODULE.format(2 * block)
        write_peft(
            root / name, {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}, prefix="base_model.model."
        )
    return root


def load(folder: Path, choice: AdapterChoice) -> Any:
    return registry.load("groot", checkpoint=folder, embodiment=LIBERO, device="cpu", max_batch=2, adapters=choice)


@pytest.fixture(scope="module")
def engine(folder: Path, root: Path) -> Any:
    return load(folder, AdapterChoice(root=root))


def answer(engine: Any, adapter: str | None = None) -> NDArray[np.float32]:
    """All action groups of one request side by side."""
    options = Options(seed=1, adapter=adapter)
    (chunk,) = engine.infer([Work(engine.prepare(observation(LIBERO), options), options)])
    return np.concatenate(list(chunk.actions.values()), -1)


def test_each_adapter_answers_in_its_own_way_and_the_base_as_before(engine: Any, folder: Path) -> None:
    bare = answer(load(folder, AdapterChoice()))
    fold, pour = answer(engine, "fold"), answer(engine, "pour")
    assert np.array_equal(answer(engine), bare)
    assert np.array_equal(answer(engine, "base"), bare)
    assert np.array_equal(answer(engine, "fold"), fold)
    for one, other in ((fold, bare), (pour, bare), (fold, pour)):
        assert np.abs(one - other).max() / bare.std() > 1e-4


def test_a_merged_adapter_answers_as_when_it_is_asked_for(engine: Any, folder: Path, root: Path) -> None:
    merged = load(folder, AdapterChoice(named={"fold": root / "fold"}, merged=True))
    assert np.array_equal(answer(merged), answer(engine, "fold"))
    with pytest.raises(ObservationError, match="has merged 'fold' into the weights"):
        answer(merged, "base")
    with pytest.raises(ValueError, match="start the server without --merge-adapter"):
        merged.load_adapter("pour", root / "pour")


def test_the_default_adapter_answers_requests_that_name_none(engine: Any, folder: Path, root: Path) -> None:
    other = load(folder, AdapterChoice(root=root, default="pour"))
    assert np.array_equal(answer(other), answer(engine, "pour"))
    assert np.array_equal(answer(other, "base"), answer(engine))


def test_rows_of_different_adapters_do_not_share_a_batch(engine: Any) -> None:
    rows = [engine.prepare(observation(LIBERO), Options(adapter=name)) for name in (None, "fold", "pour", "fold")]
    keys = [engine.batch_key(row) for row in rows]
    assert len(set(keys)) == 3
    assert keys[1] == keys[3]


def test_an_adapter_that_was_unloaded_is_named(folder: Path, root: Path) -> None:
    engine = load(folder, AdapterChoice(root=root))
    assert engine.adapters == ("fold", "idle", "pour")
    engine.unload_adapter("fold")
    with pytest.raises(ObservationError, match="adapter 'fold' is not loaded"):
        answer(engine, "fold")
    engine.load_adapter("fold", root / "fold")
    assert answer(engine, "fold").size


def test_an_adapter_without_effect_says_so_in_a_note(engine: Any) -> None:
    notes = engine.prepare(observation(LIBERO), Options(adapter="idle")).notes
    assert "adapter idle has no effect: all its changes are zero" in [note.text for note in notes]


def test_warming_up_notices_an_adapter_of_nan(folder: Path, tmp_path: Path) -> None:
    module = MODULE.format(0).replace("to_q", "to_out.0")
    bad = {f"{module}.lora_A.weight": torch.full((4, 32), torch.nan), f"{module}.lora_B.weight": torch.ones(32, 4)}
    write_peft(tmp_path / "bad", bad, prefix="base_model.model.")
    engine = load(folder, AdapterChoice(root=tmp_path))
    with pytest.raises(ValueError, match="adapter bad gives actions that are not finite"):
        engine.warm_up(lambda phase, share: None)
