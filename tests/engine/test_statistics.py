"""Statistics files: read whole, or refused with file, dimension and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from relay.engine.normalization import Kind, Statistics
from relay.engine.statistics import (
    StatisticsError,
    find_openpi_assets,
    fit,
    numbers,
    read_lerobot_state,
    read_norm_stats,
)

VECTOR = {"mean": [0.0, 1.0], "std": [1.0, 2.0], "q01": [-1.0, -2.0], "q99": [1.0, 4.0]}


def write(folder: Path, content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "norm_stats.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_openpis_file_gives_state_and_actions_in_float64(tmp_path: Path) -> None:
    actions = {**VECTOR, "mean": [0.1, 0.2]}
    state, read = read_norm_stats(write(tmp_path, {"norm_stats": {"state": VECTOR, "actions": actions}}))
    assert state.q99 is not None
    assert state.q99.tolist() == [1.0, 4.0]
    assert read.mean is not None
    assert read.mean.dtype == np.float64
    assert read.mean.tolist() == [0.1, 0.2]


def test_assets_are_found_below_nested_repository_ids(tmp_path: Path) -> None:
    for asset_id in ("droid", "physical-intelligence/libero"):
        write(tmp_path / "assets" / asset_id, {})
    found = find_openpi_assets(tmp_path)
    assert list(found) == ["droid", "physical-intelligence/libero"]
    assert found["droid"] == tmp_path / "assets/droid/norm_stats.json"


def test_linked_asset_folders_are_found_too(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere/libero", {})
    (tmp_path / "run/assets/own").mkdir(parents=True)
    (tmp_path / "run/assets/own/linked").symlink_to(tmp_path / "elsewhere/libero")
    (tmp_path / "run/assets/physical-intelligence").symlink_to(tmp_path / "elsewhere")
    assert list(find_openpi_assets(tmp_path / "run")) == ["own/linked", "physical-intelligence/libero"]


def test_links_that_lead_back_give_nothing_twice(tmp_path: Path) -> None:
    write(tmp_path / "assets/droid", {})
    (tmp_path / "assets/again").symlink_to(tmp_path / "assets")
    (tmp_path / "assets/droid/up").symlink_to(tmp_path)
    (tmp_path / "assets/self").symlink_to(tmp_path / "assets/self")
    assert list(find_openpi_assets(tmp_path)) == ["droid"]


def test_a_link_is_followed_two_levels_deep_and_no_further(tmp_path: Path) -> None:
    for inner in ("a/b", "a/b/c"):
        write(tmp_path / "elsewhere" / inner, {})
    (tmp_path / "run/assets").mkdir(parents=True)
    (tmp_path / "run/assets/link").symlink_to(tmp_path / "elsewhere")
    assert list(find_openpi_assets(tmp_path / "run")) == ["link/a/b"]


def test_a_folder_without_assets_has_none(tmp_path: Path) -> None:
    assert find_openpi_assets(tmp_path) == {}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "cannot be read as JSON"),
        ([1], "expected an object with the key 'norm_stats'"),
        ({"norm_stats": []}, "expected 'norm_stats' to be an object"),
        ({"norm_stats": {"state": VECTOR}}, "no statistics of 'actions'; it has state"),
        ({"norm_stats": {"state": VECTOR, "actions": {**VECTOR, "std": [1.0]}}}, "mean 2, std 1"),
        ({"norm_stats": {"state": VECTOR, "actions": {**VECTOR, "std": ["a"]}}}, "std of actions is not a list"),
        ({"norm_stats": {"state": {**VECTOR, "q01": [[1.0]]}, "actions": VECTOR}}, "q01 of state has shape (1, 1)"),
    ],
)
def test_a_file_that_is_none_of_openpis_is_refused(tmp_path: Path, content: Any, text: str) -> None:
    with pytest.raises(StatisticsError) as error:
        read_norm_stats(write(tmp_path, content))
    assert text in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_lerobots_state_file_gives_one_features_statistics(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    arrays = {"observation.state.mean": [1.0, 2.0], "observation.state.count": [7.0], "action.mean": [3.0]}
    save_file({name: np.array(value, np.float32) for name, value in arrays.items()}, file)
    read = read_lerobot_state(file, "observation.state")
    assert read.mean is not None
    assert read.mean.tolist() == [1.0, 2.0]
    with pytest.raises(StatisticsError, match=r"of 'observation'; it has action, observation\.state"):
        read_lerobot_state(file, "observation")


def test_a_damaged_or_missing_state_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.safetensors").write_bytes(b"\x10\x00\x00")
    with pytest.raises(StatisticsError, match="is not a whole safetensors file"):
        read_lerobot_state(tmp_path / "state.safetensors", "action")
    with pytest.raises(
        StatisticsError, match=r"no statistics at .*absent.*; copy it from where the checkpoint was trained"
    ):
        read_lerobot_state(tmp_path / "absent.safetensors", "action")


def statistics(**vectors: list[float]) -> Statistics:
    return Statistics(**{name: np.array(values) for name, values in vectors.items()})


def fitted(given: Statistics, kind: Kind, width: int | None) -> Statistics:
    return fit(given, kind, width, name="state", file=Path("droid/norm_stats.json"))


def test_padding_beyond_the_robots_width_is_cut() -> None:
    padded = statistics(mean=[1.0, 2.0, 0.0, 0.0], std=[1.0, 2.0, 0.0, 0.0], q01=[-1.0, -2.0, -1e-10, 0.0])
    cut = fitted(padded, "z_score", 2)
    assert cut.mean is not None
    assert cut.mean.tolist() == [1.0, 2.0]
    assert cut.q01 is not None
    assert cut.q01.tolist() == [-1.0, -2.0]


@pytest.mark.parametrize("width", [1, 3])
def test_another_robots_width_is_refused(width: int) -> None:
    with pytest.raises(StatisticsError, match=rf"of 2 state dimensions, but this robot's state has {width};.* --robot"):
        fitted(statistics(mean=[1.0, 2.0], std=[1.0, 2.0]), "z_score", width)


def test_a_constant_dimension_is_named() -> None:
    with pytest.raises(
        StatisticsError, match=r"droid/norm_stats.json: std of state\[1\], state\[2\] is 0, so it cannot"
    ):
        fitted(statistics(mean=[1.0, 2.0, 3.0], std=[1.0, 0.0, 0.0]), "z_score", None)
    with pytest.raises(StatisticsError, match=r"q99 - q01 of state\[0\] is 0"):
        fitted(statistics(q01=[1.0, 2.0], q99=[1.0, 3.0]), "quantile", 2)


def test_a_constant_matters_only_in_what_the_kind_needs() -> None:
    given = statistics(mean=[1.0], std=[0.0], q01=[0.0], q99=[1.0])
    assert fitted(given, "quantile", 1).q99 is not None


def test_a_value_that_is_not_finite_is_named() -> None:
    with pytest.raises(StatisticsError, match=r"mean of state\[1\] is nan, expected a finite number"):
        fitted(statistics(mean=[1.0, float("nan")], std=[1.0, 1.0]), "z_score", 2)


@pytest.mark.parametrize(
    ("vectors", "told"),
    [
        ({"q01": [-1.0, 2.0]}, r"q01 of state\[1\] is 2, above q99, 1;"),
        ({"min": [-2.0, 3.0]}, r"min of state\[1\] is 3, above max, 2;"),
        ({"std": [1.0, -0.5]}, r"std of state\[1\] is -0.5, expected 0 or more;"),
        ({"max": [float("inf"), 2.0]}, r"max of state\[0\] is inf, expected a finite number;"),
    ],
)
@pytest.mark.parametrize("kind", ["quantile", "z_score", "min_max"])
def test_what_cannot_be_right_is_refused_by_name_and_place_whatever_is_used(
    kind: Kind, vectors: dict[str, list[float]], told: str
) -> None:
    right = {"mean": [0.0, 0.0], "std": [1.0, 1.0], "q01": [-1.0, -1.0], "q99": [1.0, 1.0]}
    right |= {"min": [-2.0, -2.0], "max": [2.0, 2.0]}
    assert fitted(statistics(**right), kind, 2).q01 is not None
    with pytest.raises(StatisticsError, match=rf"^droid/norm_stats.json: {told} compute the statistics anew"):
        fitted(statistics(**{**right, **vectors}), kind, 2)


def test_padding_is_not_looked_at() -> None:
    given = statistics(mean=[0.0, 0.0], std=[1.0, 0.0], q01=[-1.0, 1e-10], q99=[1.0, 0.0])
    assert fitted(given, "quantile", 1).q01 is not None


@pytest.mark.parametrize("given", [["1"], [True], [None], [10**400], [[1.0], [1.0, 2.0]], [{}], "1", None, {"a": 1}])
def test_only_numbers_are_numbers(given: Any) -> None:
    assert numbers(given) is None


def test_missing_quantiles_are_named() -> None:
    with pytest.raises(StatisticsError, match="has no q01 of state, which quantile normalization needs"):
        fitted(statistics(mean=[1.0], std=[1.0]), "quantile", 1)
