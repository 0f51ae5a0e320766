"""`config.json` to sizes: nothing is assumed, and what the network cannot do is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tiny_groot import described, tiny_config, tiny_json

from relay.engine.weights import CheckpointError
from relay.models.groot.config import RELEASED, read_config


def test_the_released_values_make_the_released_sizes() -> None:
    config = read_config(RELEASED)
    assert (config.dit.width, config.vl.width, config.vision.head_dim) == (1536, 2048, 64)
    assert (config.select_layer, config.num_steps, config.action_horizon, config.state_width) == (16, 4, 40, 132)


def test_the_tiny_backbone_is_read_from_its_own_description() -> None:
    config = tiny_config()
    assert config.vision.deepstack == (0, 1, 2)
    assert config.text.rope_sections == (4, 2, 2)


@pytest.mark.parametrize("key", list(RELEASED))
def test_a_missing_entry_is_named_and_not_assumed(key: str) -> None:
    config = {name: value for name, value in RELEASED.items() if name != key}
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} is missing, expected .*; no default is assumed"):
        read_config(config)


@pytest.mark.parametrize("key", ["num_layers", "num_attention_heads", "attention_head_dim", "output_dim", "norm_type"])
def test_a_missing_entry_of_a_section_is_named_with_its_section(key: str) -> None:
    config = copy.deepcopy(dict(RELEASED))
    del config["diffusion_model_cfg"][key]
    with pytest.raises(CheckpointError, match=rf"config\.json: diffusion_model_cfg: {key} is missing, expected .*; no"):
        read_config(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_vlln": False}, "use_vlln is False, expected True"),
        ({"use_alternate_vl_dit": False}, "use_alternate_vl_dit is False, expected True"),
        ({"select_layer": "16"}, "select_layer is '16', expected an integer from 1 to 1,024"),
        ({"action_horizon": 0}, "action_horizon is 0, expected an integer from 1 to 1,048,576"),
        ({"action_horizon": 2000}, "action_horizon is 2000, expected at most max_seq_len, 1024"),
        ({"hidden_size": 512}, "diffusion_model_cfg.output_dim is 1024, expected hidden_size, which is 512"),
        ({"input_embedding_dim": 768}, "attention_head_dim is 1536, expected input_embedding_dim, which is 768"),
        ({"backbone_embedding_dim": 1024}, "is 2048, expected backbone_embedding_dim, which is 1024"),
        ({"hidden_size": None}, "hidden_size is null, expected an integer from 1 to 1,048,576$"),
        ({"diffusion_model_cfg": 3}, "diffusion_model_cfg is 3, expected an object"),
    ],
)
def test_what_does_not_fit_is_named_with_what_was_expected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config({**RELEASED, **change})


def test_positions_inside_the_transformer_are_refused() -> None:
    config = copy.deepcopy(dict(RELEASED))
    config["vl_self_attention_cfg"]["positional_embeddings"] = "sinusoidal"
    with pytest.raises(CheckpointError, match=r"vl_self_attention_cfg: positional_embeddings is 'sinusoidal'"):
        read_config(config)


def test_a_misspelt_entry_is_answered_with_the_one_that_was_meant() -> None:
    config = {**RELEASED, "hiden_size": 1024}
    del config["hidden_size"]
    with pytest.raises(CheckpointError, match=r"hidden_size is missing \(there is 'hiden_size'\), .*; no default"):
        read_config(config)


def test_another_activation_is_refused() -> None:
    config = copy.deepcopy(dict(RELEASED))
    config["diffusion_model_cfg"]["activation_fn"] = "gelu"
    with pytest.raises(CheckpointError, match=r"activation_fn is 'gelu', expected 'gelu-approximate'"):
        read_config(config)


@pytest.mark.parametrize(
    ("section", "key", "value", "told"),
    [
        ("text_config", "num_heads", 4, ".text_config: unknown key 'num_heads', did you mean 'num_key_value_heads'?"),
        ("text_config", "rms_norm_eps", 0, ".text_config: rms_norm_eps is 0, expected a number from 1e-12 to 0.1"),
        (
            "vision_config",
            "num_position_embeddings",
            15,
            ".vision_config: num_position_embeddings is 15, expected a square number",
        ),
        (
            "vision_config",
            "deepstack_visual_indexes",
            [0, 99],
            ".vision_config: deepstack_visual_indexes holds 99, expected integers from 0 to",
        ),
        (None, "mrope_section", [4, "2", 2], ": mrope_section holds '2', expected integers from 0 to 16"),
        (None, "mrope_section", [4, 4], ": mrope_section is [4, 4], expected three numbers whose sum is half of"),
    ],
)
def test_what_cannot_be_of_a_backbone_is_refused(section: str | None, key: str, value: Any, told: str) -> None:
    backbone = copy.deepcopy(described()["backbone"])
    (backbone if section is None else backbone[section])[key] = value
    with pytest.raises(CheckpointError) as error:
        read_config(tiny_json(), backbone)
    assert str(error.value).startswith(f"relay.json: backbone{told}")
