"""Checkpoint folders: loaded whole or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import ORBAX_PYTHON, TINY, write_lerobot, write_openpi, write_openpi_jax, write_tokenizer
from safetensors.torch import save_file
from tiny import Tensors, golden, golden_inputs, load_tiny, tiny_model, tiny_tensors

from relay.demo import vocabulary as demo_vocabulary
from relay.models.pi0.checkpoint import Checkpoint, load_checkpoint
from relay.models.pi0.settings import read_settings
from relay.models.pi0.weights import CheckpointError, save_weights

SETTINGS = {
    "action_horizon": 10,
    "state_dim": 32,
    "vision_heads": 2,
    "state_in_prompt": True,
    "max_token_len": 200,
    "num_steps": 10,
}
EXPERT = "paligemma_with_expert.gemma_expert.model."
EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
HEAD = "paligemma_with_expert.paligemma.lm_head.weight"


def load(folder: Path, config: str | None = None) -> Checkpoint:
    return load_checkpoint(
        folder,
        config=config,
        tokenizer=None,
        device=torch.device("cpu"),
        dtype=torch.float32,
        progress=lambda phase, share: None,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(tiny_tensors("pi05"), tmp_path / "model.safetensors")
    (tmp_path / "relay.json").write_text(json.dumps(SETTINGS))
    write_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path


def test_a_folder_loads_and_gives_the_golden_actions(folder: Path) -> None:
    actions = load(folder).model.sample_actions(golden_inputs("pi05", (0, 1), 10)).numpy()
    reference = golden("pi05")["actions_f32_10"]
    assert np.abs(actions - reference).max() / reference.std() <= 1e-4


def openpi(folder: Path, family: str) -> Checkpoint:
    configuration, horizon = ("pi05_droid", 15) if family == "pi05" else ("pi0_droid", 10)
    write_openpi(folder, family, action_horizon=horizon, settings={**TINY, "action_horizon": 10})
    return load(folder, config=configuration)


def openpi_jax(folder: Path, family: str) -> Checkpoint:
    pytest.importorskip("tensorstore", reason="tensorstore is not here: pip install 'relay-robotics[jax]'")
    if not ORBAX_PYTHON.exists():
        pytest.skip("Orbax and JAX are not here; `make references` installs them")
    write_openpi_jax(folder, family, settings={**TINY, "action_horizon": 10})
    return load(folder, config=f"{family}_droid")


def lerobot(folder: Path, family: str) -> Checkpoint:
    return load(write_lerobot(folder, family))


@pytest.mark.parametrize("family", ["pi0", "pi05"])
@pytest.mark.parametrize("form", [openpi, openpi_jax, lerobot])
def test_every_format_gives_the_golden_actions_and_brings_statistics_and_robot(
    form: Callable[[Path, str], Checkpoint], family: str, tmp_path: Path
) -> None:
    checkpoint = form(tmp_path, family)
    assert checkpoint.profile is not None
    assert checkpoint.normalization is not None
    assert checkpoint.model.config.state_dim == checkpoint.profile.state_dim
    actions = checkpoint.model.sample_actions(golden_inputs(family, (0, 1), 10)).numpy()
    reference = golden(family)["actions_f32_10"]
    assert np.abs(actions - reference).max() / reference.std() <= 1e-4


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_saving_and_loading_give_back_every_tensor(family: str) -> None:
    saved = save_weights(tiny_model(family), torch.bfloat16)
    original = tiny_tensors(family)
    unused = "paligemma_with_expert.paligemma.model.language_model.norm.weight"
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in original.items() if name != unused)


def lerobot_prefix(tensors: Tensors) -> Tensors:
    return Tensors({f"model.{name}": tensor for name, tensor in tensors.items()})


def tied_head_only(tensors: Tensors) -> Tensors:
    return Tensors({HEAD if name == EMBEDDING else name: tensor for name, tensor in tensors.items()})


def with_untied_heads(tensors: Tensors) -> Tensors:
    noise = torch.zeros(3, 3)
    return Tensors({**tensors, HEAD: noise, "paligemma_with_expert.gemma_expert.lm_head.weight": noise})


@pytest.mark.parametrize("form", [lerobot_prefix, tied_head_only, with_untied_heads])
def test_the_forms_that_openpi_and_lerobot_write_load_alike(form: Callable[[Tensors], Tensors]) -> None:
    loaded, expected = load_tiny(form(tiny_tensors("pi05"))), tiny_model("pi05").state_dict()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in loaded.named_parameters())


def test_missing_unknown_and_misshapen_tensors_are_all_listed() -> None:
    tensors = tiny_tensors("pi05")
    del tensors[EXPERT + "norm.dense.bias"]
    tensors["surprise.weight"] = torch.zeros(2)
    tensors["action_in_proj.bias"] = torch.zeros(7)
    with pytest.raises(CheckpointError) as error:
        load_tiny(tensors)
    text = str(error.value)
    assert f"missing: {EXPERT}norm.dense.bias" in text
    assert "unknown: surprise.weight" in text
    assert "wrong shape: action_in_proj.bias is (7,), expected (32,)" in text


@pytest.mark.parametrize("missing", ["model.safetensors", "relay.json", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(CheckpointError, match=missing):
        load(folder)


def test_all_problems_are_told_at_once(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "relay.json").write_text(json.dumps({**SETTINGS, "num_steps": 0}))
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert "num_steps must be between 1 and 50" in str(error.value)
    assert "no tokenizer in" in str(error.value)


def test_another_networks_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    demo_vocabulary.write_tokenizer(folder / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"gives the id \d+, but this network has 64 tokens"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_horizn": 10}, "unknown key 'action_horizn', did you mean 'action_horizon'"),
        ({"num_steps": "10"}, "num_steps is '10', expected an int"),
        ({"num_steps": True}, "num_steps is True, expected an int"),
        ({"model": "pi0"}, "says model 'pi0', but the tensors say 'pi05'"),
        ({"heads": 4}, "says heads 4, but the tensors say 8"),
        ({"num_steps": 0}, "num_steps must be between 1 and 50, got 0"),
        ({"state_dim": 33}, "state_dim must be between 1 and 32, got 33"),
        ({"action_horizon": -1}, "action_horizon must be between 1 and 512"),
        ({"vision_heads": 7}, "vision_heads 7 does not divide the width 32"),
        ({"normalization": "quantiles"}, "normalization is 'quantiles', expected z_score, quantile, none"),
        ({"metadata": [1]}, "metadata is a list of 1 items, expected a dict"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    (folder / "relay.json").write_text(json.dumps({**SETTINGS, **changes}))
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize("key", sorted(SETTINGS))
def test_what_the_tensors_do_not_tell_must_be_said(folder: Path, key: str) -> None:
    (folder / "relay.json").write_text(json.dumps({k: v for k, v in SETTINGS.items() if k != key}))
    with pytest.raises(CheckpointError, match=f"nothing says '{key}'"):
        load(folder)


def test_settings_that_are_no_object_are_refused(tmp_path: Path) -> None:
    (tmp_path / "relay.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="holds a list"):
        read_settings(tmp_path / "relay.json")
