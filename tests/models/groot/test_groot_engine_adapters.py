"""The GR00T engine with adapters: by name, by default, beside each other, and merged at the start."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
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
from relay.models.groot.model import Groot, GrootInputs
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


def write_whole(folder: Path) -> Path:
    """An adapter that also holds a whole tensor."""
    torch.manual_seed(9)
    module, saved = MODULE.format(4), "action_head.action_decoder.layer2.b"
    tensors = {f"{module}.lora_A.weight": torch.randn(4, 32), f"{module}.lora_B.weight": torch.randn(32, 4)}
    tensors[saved] = torch.randn(32, 20)
    config = {"modules_to_save": [saved.rpartition(".")[0]]}
    return write_peft(folder, tensors, prefix="base_model.model.", config=config)


@pytest.fixture(scope="module")
def engine(folder: Path, root: Path) -> Any:
    return load(folder, AdapterChoice(root=root))


def answer(engine: Any, adapter: str | None = None) -> NDArray[np.float32]:
    """All action groups of one request side by side."""
    return answers(engine, [adapter])[0]


def answers(engine: Any, adapters: Sequence[str | None]) -> list[NDArray[np.float32]]:
    """The same of requests in one batch, which differ in nothing but their adapters."""
    chunks = engine.infer([work(engine, adapter) for adapter in adapters])
    return [np.concatenate(list(chunk.actions.values()), -1) for chunk in chunks]


def work(engine: Any, adapter: str | None) -> Work:
    options = Options(seed=1, adapter=adapter)
    return Work(engine.prepare(observation(LIBERO), options), options)


def distance(ours: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    return float(np.abs(ours - reference).max() / reference.std())


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
    assert distance(answer(merged), answer(engine, "fold")) <= 1e-5
    with pytest.raises(ObservationError, match="has merged 'fold' into the weights"):
        answer(merged, "base")
    with pytest.raises(ValueError, match="start the server without --merge-adapter"):
        merged.load_adapter("pour", root / "pour")


def test_the_default_adapter_answers_requests_that_name_none(engine: Any, folder: Path, root: Path) -> None:
    other = load(folder, AdapterChoice(root=root, default="pour"))
    assert np.array_equal(answer(other), answer(engine, "pour"))
    assert np.array_equal(answer(other, "base"), answer(engine))


def test_rows_with_different_adapters_and_none_share_a_batch(engine: Any, folder: Path, root: Path) -> None:
    names = ["fold", None, "pour", "fold", "idle", None, "pour", "idle"]
    assert len({engine.batch_key(work(engine, name).prepared) for name in names}) == 1
    alone = {name: answer(load(folder, merged_only(root, name))) for name in ("fold", "pour", None)}
    alone["idle"] = alone[None]
    for name, ours in zip(names, answers(engine, names), strict=True):
        assert distance(ours, alone[name]) <= 1e-5


def merged_only(root: Path, name: str | None) -> AdapterChoice:
    return AdapterChoice(named={name: root / name}, merged=True) if name else AdapterChoice()


def test_rows_of_an_adapter_with_whole_tensors_have_batches_of_their_own(
    folder: Path, root: Path, tmp_path: Path
) -> None:
    whole = {"whole": write_whole(tmp_path / "whole"), "other": write_whole(tmp_path / "other")}
    engine = load(folder, AdapterChoice(root=root, named=whole))
    keys = [engine.batch_key(work(engine, name).prepared) for name in (None, "fold", "whole", "other", "whole")]
    assert keys[0] == keys[1]
    assert keys[2] == keys[4]
    assert len(set(keys)) == 3
    bare, ours = answer(engine), answer(engine, "whole")
    assert np.array_equal(ours, answer(load(folder, AdapterChoice(named={"whole": whole["whole"]}, merged=True))))
    assert distance(ours, bare) > 1e-4


def test_adapters_come_change_and_go_while_a_batch_runs(
    folder: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(root / "fold", tmp_path / "first")
    shutil.copytree(root / "pour", tmp_path / "second")
    engine = load(folder, AdapterChoice(root=tmp_path))
    fold, pour, bare = (answer(engine, name) for name in ("first", "second", None))
    batch = [work(engine, name) for name in ("first", "second", None)]
    shutil.rmtree(tmp_path / "first")
    shutil.copytree(tmp_path / "second", tmp_path / "first")  # another content under the name
    shutil.rmtree(tmp_path / "second")
    shutil.copytree(root / "fold", tmp_path / "third")
    sample, rescanned = Groot.sample_actions, list[Sequence[str]]()

    def rescanning(model: Groot, inputs: GrootInputs) -> torch.Tensor:
        if not rescanned:
            engine.rescan_adapters()
            rescanned.append(engine.adapters)
        return sample(model, inputs)

    monkeypatch.setattr(Groot, "sample_actions", rescanning)
    ours = [np.concatenate(list(chunk.actions.values()), -1) for chunk in engine.infer(batch)]
    assert rescanned == [("first", "third")]
    for row, before in zip(ours, (fold, pour, bare), strict=True):
        assert distance(row, before) <= 1e-5
    assert np.array_equal(answer(engine, "first"), pour)
    assert np.array_equal(answer(engine, "third"), fold)
    again = [np.concatenate(list(chunk.actions.values()), -1) for chunk in engine.infer(batch)]  # as they were prepared
    assert distance(again[1], pour) <= 1e-5


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


def test_warming_up_notices_an_adapter_whose_changes_overflow(folder: Path, tmp_path: Path) -> None:
    module = MODULE.format(0).replace("to_q", "to_out.0")
    large = 1e30
    bad = {f"{module}.lora_A.weight": torch.full((4, 32), large), f"{module}.lora_B.weight": torch.full((32, 4), large)}
    write_peft(tmp_path / "bad", bad, prefix="base_model.model.")
    engine = load(folder, AdapterChoice(root=tmp_path))
    with pytest.raises(ValueError, match="adapter bad gives actions that are not finite"):
        engine.warm_up(lambda phase, share: None)


def prepared(folder: Path, choice: AdapterChoice) -> Any:
    """An engine with prepared steps, over buffers on the CPU."""
    engine = load(folder, choice)
    engine._graphs = True
    engine.warm_up(lambda phase, share: None)
    assert engine.remarks == []
    return engine


def test_rows_with_adapters_and_none_run_on_prepared_steps(engine: Any, folder: Path, root: Path) -> None:
    fast, names = prepared(folder, AdapterChoice(root=root)), ["fold", None, "pour", "idle"]
    for name, ours in zip(names, answers(fast, names[:2]) + answers(fast, names[2:]), strict=True):
        assert distance(ours, answer(engine, name)) <= 1e-5
    assert fast.unprepared == 0


def test_rows_of_an_adapter_with_whole_tensors_run_plain(folder: Path, root: Path, tmp_path: Path) -> None:
    choice = AdapterChoice(root=root, named={"whole": write_whole(tmp_path / "whole")})
    fast, plain = prepared(folder, choice), load(folder, choice)
    before = fast.unprepared  # it was warmed up, too
    assert np.array_equal(answer(fast, "whole"), answer(plain, "whole"))
    assert fast.unprepared == before + 1


def test_shapes_are_prepared_once_more_for_adapters_unless_one_is_merged(folder: Path, root: Path) -> None:
    fixed = prepared(folder, AdapterChoice()).fixed
    shapes = len(list(fixed.plan))
    assert len(fixed.graphs) == 2 * shapes
    assert len(prepared(folder, AdapterChoice(root=root)).fixed.graphs) == 4 * shapes
    merged = prepared(folder, AdapterChoice(named={"fold": root / "fold"}, merged=True))
    assert len(merged.fixed.graphs) == 2 * shapes
    expected = answer(load(folder, merged_only(root, "fold")))
    assert distance(answer(merged), expected) <= 1e-5
