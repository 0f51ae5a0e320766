"""Checkpoint tensors to the network: every form that is written loads alike, and nothing is loaded by halves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny import Tensors, golden, golden_inputs, load_tiny, tiny_model, tiny_tensors

from relay.engine.weights import CheckpointError, SafetensorsSource
from relay.models.pi0.model import Pi0
from relay.models.pi0.weights import find_problems, load_weights

FAMILIES = ("pi0", "pi05")
PALIGEMMA = "paligemma_with_expert.paligemma."
EMBEDDING = PALIGEMMA + "model.language_model.embed_tokens.weight"
HEAD = PALIGEMMA + "lm_head.weight"
EXPERT_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"
PREFIX_NORM = PALIGEMMA + "model.language_model.norm.weight"


def openpi(tensors: Tensors) -> Tensors:
    """As openpi's converter leaves them: the tied embedding as head only, and a head of the expert that is noise."""
    tensors[HEAD] = tensors.pop(EMBEDDING)
    tensors[EXPERT_HEAD] = torch.randn(tensors[HEAD].shape[0], 32).bfloat16()
    return tensors


def lerobot(tensors: Tensors) -> Tensors:
    """As lerobot saves them: `model.` before every name, and a head that is an untied copy."""
    tensors[HEAD] = torch.randn_like(tensors[EMBEDDING])
    tensors[EXPERT_HEAD] = torch.randn(tensors[HEAD].shape[0], 32).bfloat16()
    return Tensors({f"model.{name}": tensor for name, tensor in tensors.items()})


def hub_base(tensors: Tensors) -> Tensors:
    """As lerobot's published bases have them: openpi's names, the head only."""
    tensors[HEAD] = tensors.pop(EMBEDDING)
    return tensors


def without_prefix_norm(tensors: Tensors) -> Tensors:
    del tensors[PREFIX_NORM]
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", [openpi, lerobot, hub_base, without_prefix_norm])
def test_files_of_every_form_give_the_golden_actions(
    form: Callable[[Tensors], Tensors], family: str, tmp_path: Path
) -> None:
    save_file(form(tiny_tensors(family)), tmp_path / "model.safetensors")
    actions = load_tiny(SafetensorsSource(tmp_path)).sample_actions(golden_inputs(family, (0, 1), 10)).numpy()
    reference = golden(family)["actions_f32_10"]
    assert np.abs(actions - reference).max() / reference.std() <= 1e-4


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_matrices_take_the_wanted_dtype_and_the_rest_stays_float32(
    stored: torch.dtype, dtype: torch.dtype
) -> None:
    tensors = Tensors({name: tensor.to(stored) for name, tensor in tiny_tensors("pi0").items()})
    loaded = load_tiny(tensors, dtype)
    by_hand = load_tiny(tensors).to_compute_dtype(dtype)
    for name, parameter in by_hand.named_parameters():
        assert loaded.get_parameter(name).dtype == parameter.dtype
        assert torch.equal(loaded.get_parameter(name), parameter)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_owns_its_memory_and_no_more(family: str) -> None:
    for name, parameter in tiny_model(family).named_parameters():
        assert parameter.is_contiguous(), name
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size(), name


class Unreadable(Tensors):
    """Tensors that must not be read."""

    def read(self, name: str) -> torch.Tensor:
        raise AssertionError(name)


def test_what_does_not_fit_is_found_before_anything_is_read() -> None:
    tensors = Unreadable(tiny_tensors("pi05"))
    del tensors["action_in_proj.bias"]
    with pytest.raises(CheckpointError, match=r"missing: action_in_proj\.bias"):
        load_tiny(tensors)


def test_the_other_familys_tensors_are_all_listed() -> None:
    config = tiny_model("pi0").config
    problems = find_problems(config, tiny_tensors("pi05").shapes, {})
    assert "missing: state_proj.weight" in problems
    assert "unknown: time_mlp_in.weight" in problems


@pytest.mark.parametrize(
    "name",
    [
        "PaliGemma/llm/layers/attn/q_einsum/lora_a",
        "model.paligemma_with_expert.gemma_expert.model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.action_in_proj.lora_B.weight",
    ],
)
def test_lora_tensors_are_refused_by_name_with_the_remedy(name: str) -> None:
    tensors = tiny_tensors("pi05")
    tensors[name] = torch.zeros(1, 2)
    with pytest.raises(CheckpointError, match=rf"adapter: {name.removeprefix('model.')} .*merged into the weights"):
        load_tiny(tensors)


def test_a_tensor_under_both_names_is_refused() -> None:
    tensors = tiny_tensors("pi05")
    tensors["model.action_in_proj.bias"] = tensors["action_in_proj.bias"]
    with pytest.raises(CheckpointError, match=r"holds action_in_proj\.bias twice"):
        load_tiny(tensors)


def test_whole_numbers_are_refused_by_name() -> None:
    tensors = tiny_tensors("pi05")
    tensors["action_in_proj.bias"] = tensors["action_in_proj.bias"].to(torch.int8)
    with pytest.raises(CheckpointError, match=r"action_in_proj\.bias holds torch\.int8, expected floating-point"):
        load_tiny(tensors)


def test_progress_grows_to_one() -> None:
    tensors, shares = tiny_tensors("pi05"), list[float]()
    load_weights(
        tiny_model("pi05").config,
        tensors,
        torch.device("cpu"),
        torch.float32,
        lambda phase, share: shares.append(share),
    )
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_network_is_built_without_memory_for_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Pi0] = []
    original = Pi0.to_compute_dtype

    def spy(model: Pi0, dtype: torch.dtype) -> Pi0:
        built.append(model)
        assert all(parameter.is_meta for parameter in model.parameters())
        return original(model, dtype)

    monkeypatch.setattr(Pi0, "to_compute_dtype", spy)
    load_tiny(tiny_tensors("pi05"))
    assert built
