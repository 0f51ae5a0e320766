"""A look at a damaged folder and a start from it say the same, and neither ends in an error of another kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_folders import MISSING, NOT_FINITE, TENSOR_WAYS, Damage, copy_of, entry, file_damages, tensor
from dreamzero_folders import write_checkpoint

from relay.engine.weights import CheckpointError, SafetensorsSource
from relay.models.dreamzero.checkpoint import load_checkpoint
from relay.models.dreamzero.report import inspect
from relay.models.report import Sample

pytestmark = pytest.mark.dreamzero

HEAD = ("action_head_cfg", "config")
DIT = (*HEAD, "diffusion_model_cfg")
CONFIG, CONF, META = "config.json", "experiment_cfg/conf.yaml", "experiment_cfg/metadata.json"
ROBOT = ("modality_configs", "oxe_droid")
STEPS = ("transforms", "oxe_droid", "transforms")
CROP, RESIZE, SCALED, JOINED, LANGUAGE = 1, 2, 6, 8, 9
STATE = ("oxe_droid", "statistics", "state", "joint_position")
VIDEO = ("oxe_droid", "modalities", "video", "wrist_image_left")

QUERY = "action_head.model.blocks.1.self_attn.q.weight"
CLS = "action_head.image_encoder.model.visual.cls_embedding"

REFUSED: Mapping[str, Damage] = {
    **file_damages(
        CONFIG,
        CONF,
        META,
        "prompts.json",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
    ),
    **dict(
        [
            *(
                entry(CONFIG, (*HEAD, key), value)
                for key in ("num_frames", "action_dim")
                for value in (MISSING, 0, "1")
            ),
            *(
                entry(CONFIG, (*DIT, key), value)
                for key in ("dim", "num_layers", "num_heads", "freq_dim", "frame_seqlen", "max_chunk_size")
                for value in (MISSING, -1, 7.5, True, 10**9)
            ),
            entry(CONFIG, (*DIT, "num_heads"), 7),
            entry(CONFIG, (*DIT, "num_heads"), 96),
            entry(CONFIG, (*DIT, "in_dim"), 35),
            entry(CONFIG, (*DIT, "out_dim"), 48),
            entry(CONFIG, (*DIT, "num_frame_per_block"), 1),
            entry(CONFIG, (*DIT, "num_action_per_block"), 12),
            entry(CONFIG, (*DIT, "num_state_per_block"), 2),
            *(entry(CONFIG, (*DIT, "eps"), value) for value in (MISSING, -1, 0, "1e-6", float("nan"))),
            entry(CONFIG, (*DIT, "model_type"), "t2v"),
            entry(CONFIG, (*DIT, "concat_first_frame_latent"), False),
            entry(CONFIG, (*DIT, "concat_first_frame_latent"), "true"),
            entry(CONFIG, (*HEAD, "num_frames"), 32),
            entry(CONFIG, (*HEAD, "video_inference_final_noise"), 2),
            entry(CONFIG, (*HEAD, "target_video_height"), 64),
            entry(CONFIG, (*HEAD, "vae_cfg", "_target_"), "x.WanVideoVAE39"),
            entry(CONFIG, (*HEAD, "vae_cfg"), MISSING),
            *(entry("relay.json", (key,), 3) for key in ("encoders", "prompts", "embodiment", "cameras")),
            *(entry("relay.json", ("encoders", "text", "heads"), value) for value in (-4, 4.0, None)),
            entry("relay.json", ("encoders", "image", "heads"), 7),
            entry("relay.json", ("encoders", "image", "image_size"), 8),
            entry("relay.json", ("encoders", "txt"), {}),
            entry("relay.json", ("prompts", "oxe_droid"), "0" * 64),
            entry("prompts.json", ("templates", "oxe_droid"), "\ud800 {p}"),
            entry("prompts.json", ("negative",), MISSING),
            *(entry(CONF, (*ROBOT, "video"), value) for value in (MISSING, [], {"modality_keys": [None]})),
            entry(CONF, (*ROBOT, "state", "modality_keys"), ["state.joint_position"] * 2),
            entry(CONF, ("relative_action_keys",), [{}]),
            entry(CONF, ("relative_action",), "yes"),
            *(entry(CONF, (*STEPS, CROP, "scale"), value) for value in (MISSING, 0.001, True, "0.9")),
            *(entry(CONF, (*STEPS, RESIZE, "height"), value) for value in (MISSING, -24, 25, "24")),
            *(entry(CONF, (*STEPS, RESIZE), {"_target_": target}) for target in (3, "x.VideoFlip")),
            entry(CONF, (*STEPS, SCALED, "normalization_modes"), {}),
            entry(CONF, (*STEPS, JOINED, "state_concat_order"), ["state.gripper_position", "state.joint_position"]),
            entry(CONF, (*STEPS, LANGUAGE, "formalize_language"), "no"),
            *(
                entry(META, (*VIDEO, "resolution"), value)
                for value in (MISSING, [0, 180], [[], 1], ["320", "180"], [320])
            ),
            *(
                entry(META, (*STATE, "q01"), value)
                for value in (
                    MISSING,
                    [],
                    [0.0] * 6,
                    [9.0] * 7,
                    ["0"] * 7,
                    [None] * 7,
                    [float("nan")] * 7,
                    [10**400] * 7,
                )
            ),
            entry(META, (*STATE, "std"), [-1.0] * 7),
            *(tensor(QUERY, way) for way in TENSOR_WAYS),
            *(tensor(CLS, way) for way in TENSOR_WAYS if way != "in one axis"),
        ]
    ),
}

HARMLESS: Mapping[str, Damage] = {
    "relay.json's cameras": entry("relay.json", ("cameras",), "droid")[1],
    "a percentile like the other": entry(META, (*STATE, "q99"), [-2.0 - 0.1 * i for i in range(7)])[1],
    "no largest value": entry(META, (*STATE, "max"), MISSING)[1],
    "another crop": entry(CONF, (*STEPS, CROP, "scale"), 1)[1],
    "shards without their index": lambda folder: (folder / "model.safetensors.index.json").unlink(),
    "a vector without its axes of one": tensor(CLS, "in one axis")[1],
    "a switch that is null": entry(CONFIG, (*DIT, "concat_first_frame_latent"), None)[1],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("whole") / "checkpoint")


def look(folder: Path) -> list[str]:
    return list(inspect("dreamzero", folder, sample=Sample()).problems)


def start(folder: Path) -> None:
    options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    load_checkpoint(folder, progress=lambda phase, share: None, **options)


@pytest.mark.parametrize("damage", REFUSED.values(), ids=REFUSED.keys())
def test_what_keeps_a_folder_from_starting_is_told_alike_without_reading_a_tensor(
    damage: Damage, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(copy_of(whole, tmp_path))
    monkeypatch.delattr(SafetensorsSource, "read")
    told = look(tmp_path)
    with pytest.raises(CheckpointError) as error:
        start(tmp_path)
    assert str(error.value) in "\n".join(told)


@pytest.mark.parametrize("way", NOT_FINITE)
@pytest.mark.parametrize("name", [QUERY, CLS])
def test_weights_that_are_not_finite_end_the_start_by_name(name: str, way: str, whole: Path, tmp_path: Path) -> None:
    tensor(name, way)[1](copy_of(whole, tmp_path))
    assert look(tmp_path) == []
    with pytest.raises(CheckpointError, match=rf"^{re.escape(name)} in .*: 1 of [\d,]+ values are NaN or infinite;"):
        start(tmp_path)


@pytest.mark.parametrize("damage", HARMLESS.values(), ids=HARMLESS.keys())
def test_what_does_no_harm_is_no_problem(damage: Damage, whole: Path, tmp_path: Path) -> None:
    damage(copy_of(whole, tmp_path))
    assert look(tmp_path) == []
    start(tmp_path)
