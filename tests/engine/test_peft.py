"""Folders of PEFT: names, scales and settings, and a refusal for everything that would change the result unseen."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from relay.engine.adapters import Adapter
from relay.engine.peft import read_peft
from relay.engine.weights import CheckpointError

LINEARS = ["layers.0.q.weight", "layers.1.q.weight", "layers.0.k.weight", "head.weight"]


def factors(module: str, rank: int = 2) -> dict[str, Tensor]:
    return {f"{module}.lora_A.weight": torch.ones(rank, 3), f"{module}.lora_B.weight": torch.ones(4, rank)}


def write(folder: Path, tensors: Mapping[str, Tensor], prefix: str = "base_model.model.model.", **config: Any) -> Path:
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "bias": "none", **config}))
    return folder


def read(folder: Path) -> Adapter:
    return read_peft(folder, LINEARS, {"unused.weight"})


@pytest.mark.parametrize("prefix", ["base_model.model.model.", "base_model.model."])
def test_names_lose_their_prefixes(prefix: str, tmp_path: Path) -> None:
    adapter = read(write(tmp_path, factors("head"), prefix))
    assert set(adapter.pairs) == {"head.weight"}
    assert adapter.pairs["head.weight"].delta.shape == (4, 3)


SCALES = {
    "alpha left out is 8": ({}, 8 / 2),
    "alpha": ({"lora_alpha": 3}, 3 / 2),
    "rslora": ({"lora_alpha": 3, "use_rslora": True}, 3 / math.sqrt(2)),
    "alpha by pattern": ({"alpha_pattern": {"head": 5}}, 5 / 2),
    "alpha by the pattern of another": ({"alpha_pattern": {"ahead": 5, "lay": 3}}, 8 / 2),
    "rank by pattern": ({"r": 7, "rank_pattern": {"h.*d": 2}, "lora_alpha": 3}, 3 / 2),
    "how the base stores weights": ({"fan_in_fan_out": True}, 8 / 2),
}


@pytest.mark.parametrize(("config", "scale"), SCALES.values(), ids=SCALES)
def test_the_scale_is_folded_in(config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    adapter = read(write(tmp_path, factors("head"), **config))
    assert torch.allclose(adapter.pairs["head.weight"].delta, torch.full((4, 3), 2 * scale))  # of rank 2, all ones


@pytest.mark.parametrize("infix", ["", "modules_to_save."])
def test_modules_that_are_saved_in_full_replace_the_bases(infix: str, tmp_path: Path) -> None:
    saved = {f"head.{infix}weight": torch.ones(4, 3), f"head.{infix}bias": torch.ones(4)}
    adapter = read(write(tmp_path, {**factors("layers.0.q"), **saved}, modules_to_save=["head"]))
    assert set(adapter.replaced) == {"head.weight", "head.bias"}


@pytest.mark.parametrize("name", ["head.bias", "head.base_layer.bias"])
@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases_replace_the_bases(bias: str, name: str, tmp_path: Path) -> None:
    adapter = read(write(tmp_path, {**factors("head"), name: torch.ones(4)}, bias=bias))
    assert set(adapter.replaced) == {"head.bias"}


REFUSED_SETTINGS = {
    "another method": ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only 'LORA' can be served"),
    "no method": ({"peft_type": None}, "peft_type is None"),
    "DoRA": ({"use_dora": True}, "use_dora is True, which is not supported"),
    "biases of lora_B": ({"lora_bias": True}, "lora_bias is True"),
    "QALoRA": ({"use_qalora": True}, "use_qalora is True"),
    "aLoRA": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
    "repeated layers": ({"layer_replication": [[0, 2]]}, "layer_replication is"),
    "trained tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices is"),
    "parameters": ({"target_parameters": ["head.weight"]}, "target_parameters is"),
    "a setting from the future": ({"use_new_thing": 3}, "use_new_thing is 3"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the base"),
    "a bias of another kind": ({"bias": "some"}, "bias is 'some'"),
    "a rank of zero": ({"r": 0}, "r is 0; expected a positive number"),
    "an alpha that is text": ({"lora_alpha": "8"}, "lora_alpha is '8'"),
    "an alpha without end": ({"lora_alpha": math.inf}, "lora_alpha is inf"),
    "patterns in a list": ({"alpha_pattern": [3]}, "alpha_pattern is"),
    "a pattern's value that is text": (
        {"alpha_pattern": {"head": "3"}},
        "alpha_pattern is {'head': '3'}; expected a map",
    ),
    "a pattern that is none": ({"rank_pattern": {"(": 3}}, "rank_pattern is {'(': 3}; expected a map"),
    "targets that are no pattern": ({"target_modules": "("}, "target_modules is '('; expected names of modules"),
    "targets that are no names": ({"target_modules": 5}, "target_modules is 5; expected names of modules"),
    "a saved module that is not there": (
        {"modules_to_save": ["layers.0.k"]},
        "missing: layers.0.k.weight, which modules_to",
    ),
    "a saved module that is nowhere": (
        {"modules_to_save": ["nowhere"]},
        "missing: nowhere, which modules_to_save names",
    ),
    "another rank": ({"r": 3}, "wrong rank: lora_A of model.head has 2, adapter_config.json says 3"),
    "targets without LoRA": ({"target_modules": ["q", "head"]}, "missing: layers.0.q, which target_modules names"),
    "targets by pattern": ({"target_modules": r"model\.(head|layers.*)"}, "missing: layers.0.k, which target_modules"),
}


@pytest.mark.parametrize(("config", "text"), REFUSED_SETTINGS.values(), ids=REFUSED_SETTINGS)
def test_a_setting_that_cannot_be_honoured_is_refused_by_name(
    config: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read(write(tmp_path, factors("head"), **config))
    assert text in str(refusal.value)


TARGETS = {
    "ends of names": {"target_modules": ["head"]},
    "a pattern": {"target_modules": r".*\.head"},
    "some layers": {"target_modules": ["q", "head"], "layers_to_transform": [5]},
    "excluded ones": {"target_modules": ["q", "head"], "exclude_modules": ["q"]},
    "all": {"target_modules": "all-linear"},
}


@pytest.mark.parametrize("config", TARGETS.values(), ids=TARGETS)
def test_targets_that_are_all_there_are_taken(config: dict[str, Any], tmp_path: Path) -> None:
    assert set(read(write(tmp_path, factors("head"), **config)).pairs) == {"head.weight"}


REFUSED_TENSORS = {
    "half a pair": ({"head.lora_A.weight": torch.ones(2, 3)}, "missing: lora_B of model.head"),
    "two ranks": (
        {"head.lora_A.weight": torch.ones(2, 3), "head.lora_B.weight": torch.ones(4, 1)},
        "wrong shape: lora_A of model.head has rank 2, its lora_B 1",
    ),
    "DoRA's vector": ({"head.lora_magnitude_vector": torch.ones(4)}, "head.lora_magnitude_vector belongs to DoRA"),
    "an embedding's": ({"head.lora_embedding_A": torch.ones(2, 3)}, "only lora_A and lora_B of linear layers"),
    "a convolution's": ({"head.lora_A.weight": torch.ones(2, 3, 1, 1)}, "only lora_A and lora_B of linear layers"),
    "a full tensor": ({"head.weight": torch.ones(4, 3)}, "head.weight is neither LoRA nor in modules_to_save"),
    "a bias": ({"head.bias": torch.ones(4)}, "head.bias is neither LoRA nor in modules_to_save"),
}


@pytest.mark.parametrize(("tensors", "text"), REFUSED_TENSORS.values(), ids=REFUSED_TENSORS)
def test_a_tensor_that_cannot_be_accounted_for_is_named(tensors: dict[str, Tensor], text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read(write(tmp_path, tensors))
    assert text in str(refusal.value)


def test_every_problem_is_listed_at_once(tmp_path: Path) -> None:
    tensors = {**factors("head"), "a.weight": torch.ones(1), "b.lora_A.weight": torch.ones(2, 3)}
    with pytest.raises(CheckpointError, match=r"(?s)a\.weight.*lora_B of model\.b"):
        read(write(tmp_path, tensors))


def test_changes_without_effect_are_left_out_with_a_note(tmp_path: Path) -> None:
    adapter = read(write(tmp_path, {**factors("head"), **factors("unused")}))
    assert set(adapter.pairs) == {"head.weight"}
    assert adapter.notes == ("changes unused.weight, which actions do not depend on",)


@pytest.mark.parametrize("name", ["head.lora_A.weight", "head.lora_B.weight", "layers.0.q.weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused_by_name(name: str, value: float, tmp_path: Path) -> None:
    tensors = {**factors("head"), "layers.0.q.weight": torch.ones(4, 3)}
    tensors[name][1, 1] = value
    folder = write(tmp_path, tensors, modules_to_save=["layers.0.q"])
    with pytest.raises(CheckpointError, match=rf"{name} in .*adapter_model\.safetensors: 1 of \d+ values are NaN"):
        read(folder)


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    write(tmp_path, factors("head"))
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin is a pickle"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_damaged_config_is_named(text: str, tmp_path: Path) -> None:
    write(tmp_path, factors("head"))
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is damaged"):
        read(tmp_path)
