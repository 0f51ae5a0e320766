"""A look at a damaged folder and a start from it say the same, and neither ends in an error of another kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from damaged_folders import MISSING, NOT_FINITE, Damage, copy_of, entry, file_damages, tensor
from groot_folders import LIBERO, write_isaac, write_lerobot
from safetensors.torch import load_file, save_file

from relay.engine.weights import CheckpointError, SafetensorsSource
from relay.models.groot.checkpoint import load_checkpoint
from relay.models.groot.report import inspect
from relay.models.report import Sample

pytestmark = pytest.mark.vocab

CONFIG, PROCESSOR, STATISTICS = "config.json", "processor_config.json", "statistics.json"
BEFORE, AFTER = "policy_preprocessor.json", "policy_postprocessor.json"
KWARGS = ("processor_kwargs",)
ROBOT = (*KWARGS, "modality_configs", LIBERO)
PACK = ("steps", 2, "config")


POSITIONS = "action_head.position_embedding.weight"
MOVED = "policy_preprocessor_step_2_groot_n1_7_pack_inputs_v1.safetensors"


def statistic_of_nan(folder: Path) -> None:
    tensors = load_file(folder / MOVED)
    tensors["observation.state.std"][0] = torch.nan
    save_file(tensors, folder / MOVED)


def under_both_names(folder: Path) -> None:
    bias = "action_head.vlln.bias"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file({**tensors, f"_groot_model.{bias}": tensors[bias].clone()}, folder / "model.safetensors")


REFUSED: Mapping[str, Damage] = {
    **file_damages(CONFIG, PROCESSOR, STATISTICS, "tokenizer.json", "model.safetensors"),
    **dict(
        [
            *(
                entry(CONFIG, (key,), value)
                for key in ("select_layer", "hidden_size", "max_state_dim", "action_horizon", "num_inference_timesteps")
                for value in (MISSING, 0, -1, 7.5, True, "4", None, 10**9)
            ),
            *(entry(CONFIG, ("diffusion_model_cfg", key), 7) for key in ("num_attention_heads", "output_dim")),
            entry(CONFIG, ("diffusion_model_cfg",), []),
            entry(CONFIG, ("use_vlln",), False),
            entry(CONFIG, ("use_albumentations_transforms",), False),
            *(entry("relay.json", ("backbone", "vision_config", "depth"), value) for value in (MISSING, 0, "2")),
            entry("relay.json", ("backbone", "text_config", "num_key_value_heads"), 3),
            entry("relay.json", ("backbone", "mrope_section"), [1]),
            entry("relay.json", ("backbone", "spare"), 1),
            entry("relay.json", ("embodiment",), "libero"),
            entry("embodiment_id.json", (LIBERO,), 99),
            entry("embodiment_id.json", (LIBERO,), "2"),
            *(entry(PROCESSOR, ROBOT, value) for value in (MISSING, [])),
            *(entry(PROCESSOR, (*ROBOT, "video", "modality_keys"), value) for value in (MISSING, [], [3], "image")),
            *(entry(PROCESSOR, (*ROBOT, "action", "delta_indices"), value) for value in ([], ["0"], [*range(50)])),
            *(entry(PROCESSOR, (*ROBOT, "action", "action_configs", 0, "rep"), value) for value in (MISSING, "FAR", 1)),
            entry(PROCESSOR, (*KWARGS, "use_percentiles"), "yes"),
            entry(PROCESSOR, (*KWARGS, "clip_outliers"), 1),
            entry(PROCESSOR, (*KWARGS, "crop_fraction"), 0),
            entry(PROCESSOR, (*KWARGS, "shortest_image_edge"), -256),
            entry(PROCESSOR, (*KWARGS, "max_state_dim"), 64),
            *(
                entry(STATISTICS, (LIBERO, "state", "x", "q01"), value)
                for value in (MISSING, [], [0.0, 0.0], [9.0], ["0"], [None], [float("nan")], [10**400])
            ),
            entry(STATISTICS, (LIBERO, "action", "x", "std"), [-1.0]),
            ("a tensor under both of its names", under_both_names),
            *(tensor(POSITIONS, way) for way in ("missing", "in one axis", "of integers")),
        ]
    ),
}

LEROBOT_REFUSED: Mapping[str, Damage] = {
    **file_damages(CONFIG, BEFORE, AFTER, MOVED),
    "a statistic of NaN": statistic_of_nan,
    **dict(
        [
            *(entry(BEFORE, (*PACK, "embodiment_tag"), value) for value in (MISSING, 3, "elsewhere")),
            *(entry(BEFORE, (*PACK, "valid_action_horizon"), value) for value in (MISSING, 0, -1, 50, "16")),
            *(entry(BEFORE, (*PACK, "video_modality_keys"), value) for value in ("image", [3], {})),
            *(entry(BEFORE, (*PACK, "video_horizon"), value) for value in (0, "1")),
            *(entry(BEFORE, (*PACK, "embodiment_mapping"), value) for value in ([], {LIBERO: 99}, "2")),
            entry(BEFORE, (*PACK, "normalize_min_max"), False),
            entry(BEFORE, (*PACK, "clip_outliers"), "yes"),
            entry(BEFORE, ("steps",), {}),
            entry(BEFORE, ("steps", 2), "pack"),
            entry(CONFIG, ("num_inference_timesteps",), "4"),
            entry(CONFIG, ("max_state_dim",), 64),
            entry("relay.json", ("config", "hidden_size"), 7),
        ]
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_isaac(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lerobot(tmp_path_factory.mktemp("flat"), flat=True)


def look(folder: Path) -> list[str]:
    return list(inspect("groot", folder, embodiment=None, tokenizer=None, sample=Sample()).problems)


def start(folder: Path) -> None:
    device, dtype = torch.device("cpu"), torch.float32
    load_checkpoint(
        folder, embodiment=None, tokenizer=None, device=device, dtype=dtype, progress=lambda phase, share: None
    )


def see_that_both_refuse(folder: Path, patch: pytest.MonkeyPatch) -> None:
    statistics = SafetensorsSource.read
    patch.setattr(SafetensorsSource, "read", lambda source, name: _only_statistics(statistics, source, name))
    told = look(folder)
    with pytest.raises(CheckpointError) as error:
        start(folder)
    assert str(error.value) in "\n".join(told)


def _only_statistics(read: object, source: SafetensorsSource, name: str) -> torch.Tensor:
    assert name.rpartition(".")[0] in ("observation.state", "action"), f"{name} was read"
    assert callable(read)
    return read(source, name)


@pytest.mark.parametrize("damage", REFUSED.values(), ids=REFUSED.keys())
def test_what_keeps_a_folder_from_starting_is_told_alike_without_reading_a_tensor(
    damage: Damage, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(copy_of(whole, tmp_path))
    see_that_both_refuse(tmp_path, monkeypatch)


@pytest.mark.parametrize("damage", LEROBOT_REFUSED.values(), ids=LEROBOT_REFUSED.keys())
def test_what_keeps_a_lerobot_folder_from_starting_is_told_alike(
    damage: Damage, flat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(copy_of(flat, tmp_path))
    see_that_both_refuse(tmp_path, monkeypatch)


@pytest.mark.parametrize("way", NOT_FINITE)
def test_weights_that_are_not_finite_end_the_start_by_name(way: str, whole: Path, tmp_path: Path) -> None:
    tensor(POSITIONS, way)[1](copy_of(whole, tmp_path))
    assert look(tmp_path) == []
    with pytest.raises(
        CheckpointError, match=rf"^{re.escape(POSITIONS)} in .*: 1 of [\d,]+ values are NaN or infinite"
    ):
        start(tmp_path)


HARMLESS: Mapping[str, Damage] = {
    "the other shape of a range": entry(STATISTICS, (LIBERO, "state", "x", "max"), MISSING)[1],
    "no numbers of embodiments": lambda folder: (folder / "embodiment_id.json").unlink(),
}


@pytest.mark.parametrize("damage", HARMLESS.values(), ids=HARMLESS.keys())
def test_what_does_no_harm_is_no_problem(damage: Damage, whole: Path, tmp_path: Path) -> None:
    damage(copy_of(whole, tmp_path))
    assert look(tmp_path) == []
    start(tmp_path)
