"""A look at a damaged folder and a start from it say the same, and neither ends in an error of another kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_folders import MISSING, NOT_FINITE, TENSOR_WAYS, Damage, copy_of, entry, file_damages, tensor
from folders import write_lerobot, write_openpi

from relay.engine.statistics import StatisticsError
from relay.engine.weights import CheckpointError, SafetensorsSource
from relay.models.pi0.checkpoint import load_checkpoint
from relay.models.pi0.report import inspect
from relay.models.report import Sample

STATISTICS = "assets/droid/norm_stats.json"
VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model."
PATCHES = f"{VISION}embeddings.patch_embedding.weight"

OPENPI: Mapping[str, Damage] = {
    **file_damages(STATISTICS, "tokenizer.json", "model.safetensors", "relay.json"),
    **dict(
        [
            *(entry("config.json", ("action_horizon",), value) for value in ("10", 1.5, True)),
            *(entry("config.json", ("action_dim",), value) for value in (0, 7, "32")),
            *(entry("relay.json", ("vision_heads",), value) for value in (0, 5, "2", None)),
            entry("relay.json", ("vision_head",), 2),
            *(
                entry(STATISTICS, ("norm_stats", "state", "q01"), value)
                for value in (MISSING, [], [0.0] * 7, [9.0] * 8, ["0"] * 8, [float("nan")] * 8, [10**400] * 8)
            ),
            entry(STATISTICS, ("norm_stats", "actions", "std"), [-1.0] * 8),
            entry(STATISTICS, ("norm_stats",), []),
            *(tensor(PATCHES, way) for way in TENSOR_WAYS),
            *(tensor("action_in_proj.weight", way) for way in TENSOR_WAYS),
        ]
    ),
}

BEFORE = "policy_preprocessor.json"
LEROBOT: Mapping[str, Damage] = {
    **file_damages("config.json", BEFORE, "policy_postprocessor.json"),
    **dict(
        [
            *(entry("config.json", (key,), 0) for key in ("chunk_size", "max_action_dim")),
            *(entry("config.json", (key,), "7") for key in ("chunk_size", "image_resolution", "input_features")),
            *(entry(BEFORE, ("steps",), value) for value in (MISSING, {}, ["x"])),
        ]
    ),
}


@pytest.fixture(scope="module")
def openpi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_openpi(tmp_path_factory.mktemp("openpi"), "pi05", action_horizon=15)


@pytest.fixture(scope="module")
def lerobot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lerobot(tmp_path_factory.mktemp("lerobot"), "pi05")


def look(folder: Path, config: str | None) -> list[str]:
    return list(inspect("pi05", folder, config=config, robot=None, tokenizer=None, sample=Sample()).problems)


def start(folder: Path, config: str | None) -> None:
    options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "tokenizer": None}
    load_checkpoint(folder, config=config, progress=lambda phase, share: None, **options)


def see_that_both_refuse(folder: Path, config: str | None, patch: pytest.MonkeyPatch) -> None:
    patch.delattr(SafetensorsSource, "read")
    told = look(folder, config)
    with pytest.raises((CheckpointError, StatisticsError)) as error:
        start(folder, config)
    assert str(error.value) in "\n".join(told)


@pytest.mark.parametrize("damage", OPENPI.values(), ids=OPENPI.keys())
def test_what_keeps_openpis_folder_from_starting_is_told_alike_without_reading_a_tensor(
    damage: Damage, openpi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(copy_of(openpi, tmp_path))
    see_that_both_refuse(tmp_path, "pi05_droid", monkeypatch)


@pytest.mark.parametrize("damage", LEROBOT.values(), ids=LEROBOT.keys())
def test_what_keeps_lerobots_folder_from_starting_is_told_alike_without_reading_a_tensor(
    damage: Damage, lerobot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(copy_of(lerobot, tmp_path))
    see_that_both_refuse(tmp_path, None, monkeypatch)


@pytest.mark.parametrize("way", NOT_FINITE)
@pytest.mark.parametrize("name", [PATCHES, "action_in_proj.weight"])
def test_weights_that_are_not_finite_end_the_start_by_name(name: str, way: str, openpi: Path, tmp_path: Path) -> None:
    tensor(name, way)[1](copy_of(openpi, tmp_path))
    assert look(tmp_path, "pi05_droid") == []
    with pytest.raises(CheckpointError, match=rf"^{re.escape(name)} in .*: 1 of [\d,]+ values are NaN or infinite;"):
        start(tmp_path, "pi05_droid")


def test_whole_folders_start(openpi: Path, lerobot: Path) -> None:
    for folder, config in ((openpi, "pi05_droid"), (lerobot, None)):
        assert look(folder, config) == []
        start(folder, config)
