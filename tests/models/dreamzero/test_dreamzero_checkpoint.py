"""Checkpoint folders: what is known about one before it is loaded, and the network that comes out of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dreamzero_folders import NEGATIVE, SMALL_IMAGE, tokenizer, write_checkpoint
from dreamzero_recipes import droid, droid_observation

from relay.engine.weights import CheckpointError, SafetensorsSource
from relay.models.dreamzero import checkpoint as checkpoints
from relay.models.dreamzero.checkpoint import Checkpoint, load_checkpoint
from relay.models.dreamzero.inspection import inspect_checkpoint, is_dreamzero
from relay.models.dreamzero.memory import SessionMemory
from relay.models.dreamzero.model import Seen
from relay.models.dreamzero.schedule import FixedSteps
from relay.models.dreamzero.tokenizer import clean
from relay.models.dreamzero.transforms import prepare
from relay.models.dreamzero.units import to_robot
from relay.protocol.messages import Options

pytestmark = pytest.mark.dreamzero

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two embodiments."""
    return write_checkpoint(tmp_path_factory.mktemp("both") / "checkpoint", ("oxe_droid", "agibot"))


@pytest.fixture
def folder(both: Path, tmp_path: Path) -> Path:
    """The same folder to be damaged; its weights are links."""
    for file in both.iterdir():
        if file.suffix == ".safetensors":
            (tmp_path / file.name).symlink_to(file)
        elif file.is_dir():
            shutil.copytree(file, tmp_path / file.name)
        else:
            shutil.copy(file, tmp_path)
    return tmp_path


def load(folder: Path, **options: Any) -> Checkpoint:
    defaults: dict[str, Any] = {"embodiment": "oxe_droid", "device": CPU, "dtype": torch.float32}
    return load_checkpoint(folder, **{**defaults, "progress": lambda phase, share: None, **options})


def edit(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_folder_is_known_by_the_class_of_its_action_head(both: Path, tmp_path: Path) -> None:
    assert is_dreamzero(both)
    for content in ("{}", '{"action_head_cfg": 3}', '{"action_head_cfg": {"_target_": "x.GR00TPolicyHead"}}', "["):
        (tmp_path / "config.json").write_text(content)
        assert not is_dreamzero(tmp_path)
    assert not is_dreamzero(tmp_path / "nowhere")


def test_everything_about_a_folder_is_found_without_reading_a_tensor(
    both: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(SafetensorsSource, "read")
    found = inspect_checkpoint(both, embodiment="oxe_droid")
    assert found.problems == ()
    assert found.tags == ("oxe_droid", "agibot")
    assert found.recipe is not None
    assert found.recipe.cameras == droid().cameras
    assert found.camera_set == "roboarena"
    assert found.tokenizer == both / "tokenizer.json"
    assert found.config is not None
    assert found.config.image.width == SMALL_IMAGE["width"]


def test_a_loaded_checkpoint_answers_an_observation_with_a_chunk_in_robot_units(both: Path) -> None:
    loaded = load(both)
    prepared = prepare(droid_observation(), Options(), loaded.recipe, loaded.tokenizer)
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 16, 2, 6, 8, generator=random), torch.randn(1, 24, 32, generator=random)
    seen = Seen(torch.from_numpy(prepared.pictures), torch.from_numpy(prepared.state), prepared.prompt)
    imagined = loaded.model.infer(SessionMemory(), seen, noise, FixedSteps(5))
    chunk = to_robot(imagined.actions.numpy(), prepared.robot_state, loaded.recipe)
    assert chunk.shape == (24, 8)
    assert np.isfinite(chunk).all()


def test_the_negative_prompt_is_cleaned_like_every_other(both: Path) -> None:
    expected = tokenizer().encode(clean(NEGATIVE)).ids
    assert clean(NEGATIVE) == "blurry & dull"
    assert load(both).model._negative_prompt == tuple(expected)  # pyright: ignore[reportPrivateUsage]


def test_nothing_is_read_for_a_device_that_is_too_small(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "load_network", None)
    with pytest.raises(CheckpointError, match=r"dreamzero needs 0.0 GB on cpu, of which 0.0 GB are free"):
        load(both, free=lambda device: 1_000_000)


def test_memory_that_is_asked_for_is_what_the_tensors_take(both: Path) -> None:
    loaded = load(both)
    held = sum(parameter.nbytes for parameter in loaded.model.network.parameters())
    assert loaded.footprint.network == held


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "prompts.json").unlink(), "no prompts.json in "),
    (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer in "),
    (lambda folder: (folder / "experiment_cfg/conf.yaml").unlink(), "no experiment_cfg/conf.yaml in "),
    (lambda folder: (folder / "experiment_cfg/metadata.json").unlink(), "no experiment_cfg/metadata.json in "),
    (
        lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
        "lacks model-00002-of-00002.safetensors, of which model.safetensors.index.json speaks",
    ),
    (
        lambda folder: edit(folder / "relay.json", lambda content: content["prompts"].pop("oxe_droid")),
        "the text for oxe_droid is not the one the model was trained with",
    ),
    (
        lambda folder: edit(folder / "relay.json", lambda content: content.update(camera="droid")),
        "relay.json: unknown key 'camera', did you mean 'cameras'?; of a dreamzero folder it takes",
    ),
    (
        lambda folder: edit(folder / "relay.json", lambda content: content.update(cameras="libero")),
        "relay.json: cameras is 'libero', expected roboarena or droid",
    ),
    (
        lambda folder: edit(folder / "relay.json", lambda content: content.update(embodiment=3)),
        "relay.json: embodiment is 3, expected text",
    ),
    (
        lambda folder: edit(folder / "relay.json", lambda content: content["prompts"].update(yam="abc")),
        "relay.json: prompts.yam is 'abc', expected a SHA-256 in hex",
    ),
    (
        lambda folder: edit(
            folder / "config.json",
            lambda content: content["action_head_cfg"]["config"]["diffusion_model_cfg"].update(frame_seqlen=880),
        ),
        "conf.yaml: pictures of 48x64 make 12 tokens, but config.json says frame_seqlen 880",
    ),
    (
        lambda folder: edit(folder / "experiment_cfg/metadata.json", lambda content: content.clear()),
        "embodiment 'oxe_droid' is not one of this checkpoint's; it has none",
    ),
]


@pytest.mark.parametrize(("damage", "told"), DAMAGES)
def test_what_keeps_a_folder_from_starting_is_told(damage: Callable[[Path], object], told: str, folder: Path) -> None:
    damage(folder)
    assert any(told in problem for problem in inspect_checkpoint(folder, embodiment="oxe_droid").problems)
    with pytest.raises(CheckpointError):
        load(folder)


def test_all_problems_are_told_at_once(folder: Path) -> None:
    for name in ("prompts.json", "tokenizer.json"):
        (folder / name).unlink()
    assert len(inspect_checkpoint(folder, embodiment="oxe_droid").problems) == 2


def test_a_folder_of_several_embodiments_wants_one_named(folder: Path) -> None:
    (problem,) = inspect_checkpoint(folder).problems
    assert problem == "--embodiment is needed, since this checkpoint knows several: oxe_droid, agibot"
    edit(folder / "relay.json", lambda content: content.update(embodiment="agibot"))
    found = inspect_checkpoint(folder)
    assert found.problems == ()
    assert found.recipe is not None
    assert found.recipe.embodiment == "agibot"


def test_the_camera_set_is_an_option_or_a_setting_and_only_droids(folder: Path) -> None:
    assert inspect_checkpoint(folder, embodiment="oxe_droid", cameras="droid").camera_set == "droid"
    (problem,) = inspect_checkpoint(folder, embodiment="agibot", cameras="droid").problems
    assert problem.startswith("--cameras droid: only clients of oxe_droid number their cameras in two ways")
    (problem,) = inspect_checkpoint(folder, embodiment="oxe_droid", cameras="libero").problems
    assert problem == "--cameras is 'libero', expected roboarena or droid"
    edit(folder / "relay.json", lambda content: content.update(cameras="droid"))
    assert inspect_checkpoint(folder, embodiment="oxe_droid").camera_set == "droid"


def test_a_tokenizer_may_stand_elsewhere(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "tokenizer.json"
    (folder / "tokenizer.json").rename(elsewhere)
    found = inspect_checkpoint(folder, embodiment="oxe_droid", tokenizer=elsewhere)
    assert found.problems == ()
    assert found.tokenizer == elsewhere


def test_the_folder_that_was_probably_meant_is_named(both: Path) -> None:
    (problem,) = inspect_checkpoint(both.parent).problems
    assert problem == f"{both.parent} is not a checkpoint; did you mean {both}?"


def test_a_prompt_that_leaves_no_room_is_told_at_the_start(folder: Path) -> None:
    from hashlib import sha256

    long = "x" * 600 + " {p}"
    edit(folder / "prompts.json", lambda content: content["templates"].update(oxe_droid=long))
    digest = sha256(long.encode()).hexdigest()
    edit(folder / "relay.json", lambda content: content["prompts"].update(oxe_droid=digest))
    with pytest.raises(CheckpointError, match=r"does not fit the texts of prompts\.json"):
        load(folder)
