"""One embodiment's settings and statistics, and what a training run may say that is not done here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dreamzero_folders import conf_yaml, metadata_json
from dreamzero_recipes import agibot, droid, recipe_of

from relay.engine.weights import CheckpointError
from relay.models.dreamzero.frames import Views
from relay.models.dreamzero.observation import camera_keys
from relay.models.dreamzero.recipe import find_embodiments, read_conf

Change = Callable[[dict[str, Any], dict[str, Any]], object]


def test_keys_widths_and_offsets_follow_the_files() -> None:
    recipe = droid()
    assert recipe.cameras == ("exterior_image_1_left", "exterior_image_2_left", "wrist_image_left")
    assert [(part.key, part.width, part.relative) for part in recipe.actions] == [
        ("joint_position", 7, True),
        ("gripper_position", 1, False),
    ]
    assert [(part.key, part.width) for part in recipe.state] == [("joint_position", 7), ("gripper_position", 1)]
    assert (recipe.horizon, recipe.action_dim, recipe.state_width, recipe.action_width) == (24, 8, 64, 32)
    assert recipe.views == Views((180, 320), 0.95, (24, 32), 3, wrist_on_top=True)
    assert recipe.views.picture == (48, 64)


def test_another_robot_has_its_own() -> None:
    recipe = agibot()
    assert recipe.cameras == ("top_head", "hand_left", "hand_right")
    assert [part.key for part in recipe.actions if part.relative] == [
        "left_arm_joint_position",
        "right_arm_joint_position",
    ]
    assert recipe.action_dim == 16
    assert not recipe.views.wrist_on_top
    assert camera_keys(recipe, "roboarena")["top_head"] == "observation/top_head"


def test_a_configuration_of_one_robot_may_leave_its_name_out() -> None:
    conf = conf_yaml(["oxe_droid"])
    conf["modality_configs"] = conf["modality_configs"]["oxe_droid"]
    recipe = recipe_of("oxe_droid", conf)
    assert recipe.cameras == droid().cameras
    assert find_embodiments(conf, metadata_json(["oxe_droid"])) == ("oxe_droid",)


def test_embodiments_have_both_settings_and_statistics() -> None:
    assert find_embodiments(conf_yaml(["oxe_droid"]), metadata_json(["oxe_droid", "agibot"])) == ("oxe_droid",)


@pytest.mark.parametrize(
    ("entries", "relative"),
    [
        ({"relative_action": False}, False),
        ({"relative_action": False, "relative_action_per_horizon": True}, True),
        ({"relative_action_keys": []}, False),
    ],
)
def test_offsets_are_those_of_the_training_run(entries: dict[str, Any], relative: bool) -> None:
    recipe = recipe_of("oxe_droid", {**conf_yaml(["oxe_droid"]), **entries})
    assert recipe.actions[0].relative is relative


def test_statistics_by_step_are_cut_to_the_horizon() -> None:
    metadata = metadata_json(["oxe_droid"])
    values = metadata["oxe_droid"]["statistics"]["action"]["joint_position"]
    low = np.arange(48 * 7).reshape(48, 7) * -1.0
    values["q01"], values["q99"] = low.tolist(), (low + 500).tolist()
    joints = recipe_of("oxe_droid", None, metadata).actions[0]
    assert joints.low.shape == (24, 7)
    assert joints.width == 7
    assert np.array_equal(joints.low, low[:24])


def transforms(conf: dict[str, Any]) -> dict[str, dict[str, Any]]:
    steps = conf["transforms"]["oxe_droid"]["transforms"]
    return {step["_target_"].rpartition(".")[2]: step for step in steps}


def test_instructions_lose_punctuation_where_training_says_so() -> None:
    conf = conf_yaml(["oxe_droid"])
    transforms(conf)["DreamTransform"]["formalize_language"] = True
    assert recipe_of("oxe_droid", conf).formalize
    assert not droid().formalize


def action_statistics(metadata: dict[str, Any]) -> dict[str, Any]:
    return metadata["oxe_droid"]["statistics"]["action"]


REFUSED: list[tuple[Change, str]] = [
    (lambda conf, meta: conf.pop("modality_configs"), "conf.yaml: modality_configs is missing, expected an object"),
    (lambda conf, meta: conf.pop("transforms"), "conf.yaml: transforms is missing"),
    (
        lambda conf, meta: conf["modality_configs"]["oxe_droid"]["state"].update(modality_keys=["joint_position"]),
        "conf.yaml: modality_configs.oxe_droid.state: modality_keys has 'joint_position', expected names that",
    ),
    (
        lambda conf, meta: transforms(conf)["ConcatTransform"].update(action_concat_order=["action.gripper_position"]),
        "conf.yaml: action_concat_order is ['action.gripper_position'], but modality_keys says another order",
    ),
    (
        lambda conf, meta: transforms(conf)["StateActionTransform"]["normalization_modes"].update(
            {"action.joint_position": "mean_std"}
        ),
        "conf.yaml: the normalization mode of action.joint_position is 'mean_std', expected 'q99'",
    ),
    (
        lambda conf, meta: conf["transforms"]["oxe_droid"]["transforms"].append({"_target_": "x.VideoNormalize"}),
        "conf.yaml: transforms.oxe_droid: VideoNormalize is not done by this server",
    ),
    (
        lambda conf, meta: conf["transforms"]["oxe_droid"]["transforms"].append({"target": "x"}),
        "conf.yaml: transforms.oxe_droid: a map of 1 items is not a transform",
    ),
    (
        lambda conf, meta: transforms(conf)["VideoCrop"].update(scale=1.5),
        "conf.yaml: VideoCrop: scale is 1.5, expected a number from 0.1 to 1",
    ),
    (
        lambda conf, meta: transforms(conf)["VideoResize"].update(interpolation="cubic"),
        "conf.yaml: VideoResize is expected to be linear with antialias",
    ),
    (
        lambda conf, meta: transforms(conf)["DreamTransform"].update(always_use_default_instruction=True),
        "conf.yaml: always_use_default_instruction is set",
    ),
    (
        lambda conf, meta: meta["oxe_droid"]["modalities"]["video"]["wrist_image_left"].update(resolution=[640, 480]),
        "metadata.json: oxe_droid.modalities.video: the views have the resolutions",
    ),
    (
        lambda conf, meta: action_statistics(meta).pop("gripper_position"),
        "metadata.json: oxe_droid.statistics.action: gripper_position is missing",
    ),
    (
        lambda conf, meta: action_statistics(meta)["joint_position"].update(q99=[1.0] * 6),
        "metadata.json: oxe_droid.statistics.action.joint_position: q01 has shape (7,), but q99 (6,)",
    ),
    (
        lambda conf, meta: action_statistics(meta)["joint_position"].update(q99=[float("nan")] * 7),
        "metadata.json: oxe_droid.statistics.action.joint_position: q99 of joint_position[0] is nan, expected a finite",
    ),
    (
        lambda conf, meta: action_statistics(meta)["joint_position"].update(q01=[0.0] * 6 + [9.0]),
        "metadata.json: oxe_droid.statistics.action.joint_position: q01 of joint_position[6] is 9, above q99, 2.7;",
    ),
    (
        lambda conf, meta: action_statistics(meta)["joint_position"].update(
            q01=[[0.0] * 7] * 24, q99=[[1.0] * 7] * 23 + [[-1.0] * 7]
        ),
        "metadata.json: oxe_droid.statistics.action.joint_position: q01 of joint_position[23, 0] is 0, above q99, -1",
    ),
    (
        lambda conf, meta: action_statistics(meta)["joint_position"].update(std=[-1.0] * 7),
        "metadata.json: oxe_droid.statistics.action.joint_position: std of joint_position[0] is -1, expected 0 or more",
    ),
    (
        lambda conf, meta: conf.update(relative_action_keys=[3]),
        "conf.yaml: relative_action_keys holds 3, expected text",
    ),
    (
        lambda conf, meta: conf["modality_configs"]["oxe_droid"]["state"].update(
            modality_keys=["state.gripper_position"] * 2
        ),
        "conf.yaml: modality_configs.oxe_droid.state: modality_keys has 'state.gripper_position' twice",
    ),
    (
        lambda conf, meta: action_statistics(meta)["joint_position"].update(q01=[[0.0] * 7] * 8),
        "metadata.json: oxe_droid.statistics.action.joint_position: q01 is of 8 steps, but a chunk has 24",
    ),
    (
        lambda conf, meta: action_statistics(meta)["joint_position"].update(q01=[0.0] * 6, q99=[1.0] * 6),
        "conf.yaml: joint_position is one of relative_action_keys and has 6 numbers, but the state has 7",
    ),
    (
        lambda conf, meta: meta["oxe_droid"]["statistics"]["state"]["joint_position"].update(
            q01=[0.0] * 70, q99=[1.0] * 70
        ),
        "the state of metadata.json have 71 numbers, but the network takes 64",
    ),
]


@pytest.mark.parametrize(("change", "told"), REFUSED)
def test_what_is_damaged_or_not_done_here_is_refused(change: Change, told: str) -> None:
    conf, metadata = conf_yaml(["oxe_droid"]), metadata_json(["oxe_droid"])
    change(conf, metadata)
    with pytest.raises(CheckpointError) as error:
        recipe_of("oxe_droid", conf, metadata)
    assert str(error.value).startswith(told)


def test_an_embodiment_without_statistics_is_refused_with_those_there_are() -> None:
    with pytest.raises(CheckpointError, match="embodiment 'yam' is not one of this checkpoint's; it has oxe_droid"):
        recipe_of("yam", conf_yaml(["oxe_droid"]), metadata_json(["oxe_droid"]))
    with pytest.raises(CheckpointError, match="it has oxe_droid, did you mean 'oxe_droid'"):
        recipe_of("oxe-droid", conf_yaml(["oxe_droid"]), metadata_json(["oxe_droid"]))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [", "is not YAML: "),
        ("- 1\n", "holds a list of 1 items, expected a map"),
        ("a: !!python/name:os.system", "is not YAML"),
    ],
)
def test_a_configuration_that_is_no_plain_yaml_is_refused(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "conf.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=f"^conf.yaml {told}"):
        read_conf(tmp_path / "conf.yaml")
