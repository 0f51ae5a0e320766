"""lerobot folders: what is read from the config and the processor files, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import change_json, norm_stats, write_json, write_lerobot

from relay.models.pi0.checkpoint import Inspection, inspect_checkpoint

PRE, POST = "policy_preprocessor.json", "policy_postprocessor.json"


def problem(folder: Path, **options: Any) -> str:
    """The one problem of a folder."""
    found = inspect_checkpoint(folder, **options)
    assert len(found.problems) == 1, found.problems
    return found.problems[0]


def sound(folder: Path) -> Inspection:
    found = inspect_checkpoint(folder)
    assert found.problems == ()
    return found


def change_step(folder: Path, file: str, step: str, *keys: str, value: Any) -> None:
    names = [entry["registry_name"] for entry in json.loads((folder / file).read_text())["steps"]]
    change_json(folder / file, "steps", names.index(step), *keys, value=value)


@pytest.mark.parametrize(("family", "kind"), [("pi0", "z_score"), ("pi05", "quantile")])
def test_a_folder_is_complete_by_itself(family: str, kind: str, tmp_path: Path) -> None:
    found = sound(write_lerobot(tmp_path, family))
    assert found.form == "lerobot"
    assert found.tensor_problems() == []
    assert found.config is not None
    assert (found.config.family, found.config.action_horizon, found.config.state_dim) == (family, 10, 6)
    assert found.config.state_in_prompt == (family == "pi05")
    assert found.config.max_token_len == (200 if family == "pi05" else 48)
    assert found.normalization is not None
    assert (found.normalization.kind, found.normalization.style) == (kind, "lerobot")


def test_statistics_are_those_of_the_state_files(tmp_path: Path) -> None:
    scaling = sound(write_lerobot(tmp_path, "pi05")).normalization
    assert scaling is not None
    assert scaling.state.q01 is not None
    assert scaling.actions.q99 is not None
    np.testing.assert_array_equal(scaling.state.q01, np.float32(norm_stats(6)["q01"]))
    np.testing.assert_array_equal(scaling.actions.q99, np.float32(norm_stats(6, shift=0.2)["q99"]))


def test_state_files_are_found_by_their_name_and_not_by_the_steps_number(tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path, "pi05")
    (folder / "policy_preprocessor_step_3_normalizer_processor.safetensors").rename(folder / "elsewhere.safetensors")
    change_step(folder, PRE, "normalizer_processor", "state_file", value="elsewhere.safetensors")
    assert folder / "elsewhere.safetensors" in sound(folder).statistics


def test_the_cameras_are_the_networks_in_its_order_without_the_empty_ones(tmp_path: Path) -> None:
    found = sound(write_lerobot(tmp_path, "pi05", cameras=("wrist", "front"), empty_cameras=2))
    assert found.config is not None
    assert found.config.cameras == ("wrist", "front")


def test_the_robot_reads_flat_keys_and_maps_of_either_name(tmp_path: Path) -> None:
    profile = sound(write_lerobot(tmp_path, "pi05")).profile
    assert profile is not None
    frame, state = np.zeros((4, 4, 3), np.uint8), np.arange(6.0)
    for observation in (
        {"observation.images.front": frame, "observation.state": state},
        {"images": {"front": frame}, "state": state},
        {"images": {"observation.images.front": frame}, "state": state},
    ):
        reading = profile.read(observation)
        assert list(reading.frames) == ["front"]
        assert reading.state.tolist() == state.tolist()


def test_renamed_cameras_come_under_the_robots_own_keys(tmp_path: Path) -> None:
    rename = {
        "observation.images.top": "observation.images.front",
        "observation.images.front": "observation.images.wrist",
    }
    profile = sound(write_lerobot(tmp_path, "pi05", rename=rename)).profile
    assert profile is not None
    top, front = np.zeros((4, 4, 3), np.uint8), np.ones((4, 4, 3), np.uint8)
    reading = profile.read(
        {"observation.images.top": top, "observation.images.front": front, "observation.state": np.zeros(6)}
    )
    assert reading.frames["front"] is top
    assert reading.frames["wrist"] is front


def test_relative_actions_leave_out_joints_whose_name_holds_an_excluded_one(tmp_path: Path) -> None:
    profile = sound(write_lerobot(tmp_path, "pi05", relative={"enabled": True})).profile
    assert profile is not None
    assert [action.relative for action in profile.actions] == [True] * 5 + [False]
    state = np.arange(6.0)
    actions = profile.to_robot(np.zeros((2, 6)), state)
    assert actions.tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, 0.0]] * 2


def test_without_names_every_action_is_relative(tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path, "pi0", relative={"enabled": True, "action_names": None})
    profile = sound(folder).profile
    assert profile is not None
    assert all(action.relative for action in profile.actions)


@pytest.mark.parametrize(
    ("modes", "kind", "actions_kind"),
    [
        ({"STATE": "MIN_MAX", "ACTION": "MEAN_STD"}, "min_max", "z_score"),
        ({"STATE": "IDENTITY"}, "none", "quantile"),
        ({"ACTION": "IDENTITY"}, "quantile", "none"),
    ],
)
def test_state_and_actions_are_scaled_each_as_the_processors_say(
    modes: dict[str, str], kind: str, actions_kind: str, tmp_path: Path
) -> None:
    scaling = sound(write_lerobot(tmp_path, "pi05", modes=modes)).normalization
    assert scaling is not None
    assert (scaling.kind, scaling.actions_kind) == (kind, actions_kind)


def test_the_prompt_of_pi0_is_tokenized_as_it_comes(tmp_path: Path) -> None:
    assert sound(write_lerobot(tmp_path / "pi0", "pi0")).raw_prompt
    assert not sound(write_lerobot(tmp_path / "pi05", "pi05")).raw_prompt


def test_relay_json_may_say_that_a_base_model_is_served_as_it_is(tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path, "pi05")
    change_step(folder, PRE, "normalizer_processor", "state_file", value=None)
    assert "this checkpoint has no statistics of 'observation.state'" in problem(folder)
    change_json(folder / "relay.json", "normalization", value="none")
    scaling = sound(folder).normalization
    assert scaling is not None
    assert scaling.normalize_state(np.ones(6)).tolist() == [1.0] * 6


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("type", "act", "this is a 'act' policy; pi0 and pi05 are served"),
        ("min_period", 0.001, "min_period is 0.001; only 0.004 is supported"),
        ("use_visual_memory", True, "use_visual_memory is True; only False is supported"),
        ("use_peft", True, "use_peft is True; only False is supported"),
        ("chunk_size", "10", "chunk_size is '10', expected an integer"),
        ("chunk_size", 0, "action_horizon must be between 1 and 512, got 0"),
        ("max_action_dim", 24, "says action_dim 24, but the tensors say 32"),
        ("image_resolution", [448, 448], r"says image_resolution [448, 448], but the tensors say [224, 224]"),
        ("type", [], "type is a list of 0 items, expected text"),
        ("chunk_size", 15.0, "chunk_size is 15.0, expected an integer"),
        ("chunk_size", True, "chunk_size is True, expected an integer"),
        ("paligemma_variant", ["gemma_2b"], "paligemma_variant is a list of 1 items, expected text"),
        ("image_resolution", 224, "image_resolution is 224, expected a list"),
        ("image_resolution", [224], "image_resolution is [224], expected two integers"),
        ("input_features", {"observation.images.front": 5}, "observation.images.front is 5, expected an object"),
        ("output_features", {"action": {"type": "ACTION", "shape": [0]}}, "the shape of action is [0], expected one"),
        ("input_features", None, "input_features is missing"),
        ("input_features", {}, "input_features has no camera"),
    ],
)
def test_a_config_that_is_not_served_is_refused_by_key(key: str, value: Any, text: str, tmp_path: Path) -> None:
    assert text in problem(write_lerobot(tmp_path, "pi05", config={key: value}))


@pytest.mark.parametrize(
    ("file", "step", "keys", "value", "text"),
    [
        (PRE, "to_batch_processor", ("registry_name",), "crop_processor", "step 'crop_processor' is not known"),
        (PRE, "normalizer_processor", ("config", "eps"), 1e-6, "eps of normalizer_processor is 1e-06; only 1e-08"),
        (PRE, "normalizer_processor", ("config", "norm_map", "STATE"), "QUANTILE10", "scaled with 'QUANTILE10'"),
        (PRE, "normalizer_processor", ("config", "norm_map", "VISUAL"), "MEAN_STD", "images are scaled with MEAN_STD"),
        (PRE, "normalizer_processor", ("state_file",), "../x.safetensors", "expected a file in the same folder"),
        (PRE, "normalizer_processor", ("state_file",), "absent.safetensors", "absent.safetensors"),
        (PRE, "normalizer_processor", ("state_file",), 5, "state_file is 5, expected text"),
        (PRE, "normalizer_processor", ("config",), [], "config is a list of 0 items, expected an object"),
        (PRE, "normalizer_processor", ("config", "norm_map"), [], "norm_map is a list of 0 items, expected an object"),
        (PRE, "normalizer_processor", ("config", "norm_map", "STATE"), [], "STATE is a list of 0 items, expected text"),
        (PRE, "normalizer_processor", ("config", "features"), 5, "features is 5, expected an object"),
        (PRE, "normalizer_processor", ("registry_name",), [], "registry_name is a list of 0 items, expected text"),
        (PRE, "rename_observations_processor", ("config", "rename_map"), ["x"], "rename_map is a list of 1 items"),
        (PRE, "rename_observations_processor", ("config", "rename_map"), {"a": []}, "a is a list of 0 items"),
        (PRE, "relative_actions_processor", ("config", "enabled"), "false", "enabled is 'false', expected true or"),
        (PRE, "relative_actions_processor", ("config", "action_names"), 5, "action_names is 5, expected a list"),
        (PRE, "device_processor", ("config", "float_dtype"), "bfloat16", "rounds to bfloat16"),
        (POST, "absolute_actions_processor", ("config", "enabled"), True, "must both be enabled or neither"),
        (POST, "unnormalizer_processor", ("registry_name",), "my.module.Step", "step 'my.module.Step' is not known"),
    ],
)  # fmt: skip
def test_a_step_that_is_not_done_here_is_refused_by_name(
    file: str, step: str, keys: tuple[str, ...], value: Any, text: str, tmp_path: Path
) -> None:
    folder = write_lerobot(tmp_path, "pi05")
    change_step(folder, file, step, *keys, value=value)
    assert text in problem(folder)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ("none", "steps is 'none', expected a list"),
        (None, "steps is null, expected a list"),
        (["x"], "steps[0] is 'x', expected an object"),
        ([{}], "class is missing, expected text"),
    ],
)
def test_steps_that_are_no_list_of_objects_are_refused(steps: Any, text: str, tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path, "pi05")
    change_json(folder / PRE, "steps", value=steps)
    assert f"{PRE}: {text}" in problem(folder)


@pytest.mark.parametrize("count", [2, 8])
def test_more_or_fewer_names_than_actions_leave_every_action_with_one(count: int, tmp_path: Path) -> None:
    names = [f"joint_{i}" for i in range(count)]
    profile = sound(write_lerobot(tmp_path, "pi05", relative={"action_names": names})).profile
    assert profile is not None
    expected = [f"joint_{i}" if i < count else f"action_{i}" for i in range(6)]
    assert [action.name for action in profile.actions] == expected


def test_a_single_camera_without_a_name_comes_under_its_own_key(tmp_path: Path) -> None:
    features = {
        "observation.image": {"type": "VISUAL", "shape": [3, 480, 640]},
        "observation.state": {"type": "STATE", "shape": [6]},
    }
    profile = sound(write_lerobot(tmp_path, "pi05", config={"input_features": features})).profile
    assert profile is not None
    frame = np.zeros((4, 4, 3), np.uint8)
    reading = profile.read({"observation.image": frame, "observation.state": np.zeros(6)})
    assert reading.frames["observation.image"] is frame


def test_steps_in_another_order_are_refused(tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path, "pi05")
    content = json.loads((folder / PRE).read_text())
    content["steps"][3], content["steps"][4] = content["steps"][4], content["steps"][3]
    write_json(folder / PRE, content)
    assert "has its steps in the order" in problem(folder)


@pytest.mark.parametrize("file", [PRE, POST])
def test_missing_processor_files_are_named_with_the_remedy(file: str, tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path, "pi05")
    (folder / file).unlink()
    assert f"no {file} in {folder}" in problem(folder)
    assert "migrate_policy_normalization.py" in problem(folder)


def test_a_missing_tokenizer_is_answered_with_where_to_get_it(tmp_path: Path) -> None:
    text = problem(write_lerobot(tmp_path, "pi05", tokenizer=False))
    assert f"no tokenizer in {tmp_path}; put tokenizer.model or tokenizer.json" in text
    assert "google/paligemma-3b-pt-224 there, or pass --tokenizer FILE" in text


def test_openpis_configurations_are_not_for_lerobot_folders(tmp_path: Path) -> None:
    assert "this is a lerobot folder" in problem(write_lerobot(tmp_path, "pi05"), config="pi05_droid")


def test_another_robots_profile_must_fill_the_networks_cameras(tmp_path: Path) -> None:
    text = problem(write_lerobot(tmp_path, "pi05", state_dim=8, action_dim=8), robot="droid")
    assert text == "robot droid fills the camera 'base_0_rgb', but this checkpoint's are front, wrist"


def test_another_robots_profile_must_take_as_many_actions(tmp_path: Path) -> None:
    cameras = ("base_0_rgb", "left_wrist_0_rgb")
    folder = write_lerobot(tmp_path, "pi05", cameras=cameras, state_dim=8, action_dim=7)
    assert "robot droid takes 8 action dimensions, but this checkpoint gives 7" in problem(folder, robot="droid")


def test_a_robots_profile_takes_the_place_of_the_folders_own(tmp_path: Path) -> None:
    cameras = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    folder = write_lerobot(tmp_path, "pi05", cameras=cameras, state_dim=8, action_dim=8)
    found = inspect_checkpoint(folder, robot="droid")
    assert found.problems == ()
    assert found.profile is not None
    assert found.profile.name == "droid"


def write_profile(path: Path, text: str = "") -> str:
    """A profile of a robot with the folder's cameras and six joints."""
    path.write_text(
        "cameras: {front: cam/front, wrist: cam/wrist}\n"
        f"state: [{{key: q, names: j_1..6}}]\nactions: [{{names: j_1..6}}]\n{text}\n"
    )
    return str(path)


def test_a_profiles_statistics_are_not_ignored_beside_the_folders_own(tmp_path: Path) -> None:
    robot = write_profile(tmp_path / "arm.yaml", "statistics: mine.json")
    text = problem(write_lerobot(tmp_path, "pi05"), robot=robot)
    assert f"robot arm names the statistics {tmp_path / 'mine.json'}, but a lerobot folder is served with" in text
    assert "leave 'statistics' out of the profile" in text


@pytest.mark.parametrize("relative", ["", "relative: j_1..6", "relative: j_1..4"])
def test_a_profile_with_other_offsets_than_the_folders_is_refused(relative: str, tmp_path: Path) -> None:
    robot = write_profile(tmp_path / "arm.yaml", relative)
    text = problem(write_lerobot(tmp_path, "pi05", relative={"enabled": True}), robot=robot)
    assert "robot arm takes 'j_" in text
    assert "write 'relative: [j_1, j_2, j_3, j_4, j_5]' into the profile" in text


def test_offsets_of_a_profile_are_refused_where_the_folder_gives_none(tmp_path: Path) -> None:
    robot = write_profile(tmp_path / "arm.yaml", "relative: j_2")
    text = problem(write_lerobot(tmp_path, "pi05"), robot=robot)
    assert "robot arm takes 'j_2' for an offset, but this checkpoint gives it as a value of its own" in text


def test_a_profile_with_the_folders_offsets_is_served(tmp_path: Path) -> None:
    robot = write_profile(tmp_path / "arm.yaml", "relative: j_1..5")
    found = inspect_checkpoint(write_lerobot(tmp_path, "pi05", relative={"enabled": True}), robot=robot)
    assert found.problems == ()
    assert found.profile is not None
    assert [action.relative for action in found.profile.actions] == [True] * 5 + [False]


def test_a_normalization_of_the_profile_that_is_not_the_folders_is_blamed_on_the_profile(tmp_path: Path) -> None:
    robot = write_profile(tmp_path / "arm.yaml", "normalization: z_score")
    text = problem(write_lerobot(tmp_path, "pi05"), robot=robot)
    assert text.startswith("robot arm says normalization 'z_score', but lerobot's processor files say 'quantile'")
