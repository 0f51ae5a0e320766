"""What a checkpoint's files say of one embodiment, and what is refused about them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from groot_folders import DROID, IDS, LIBERO, WIDTHS, processor_kwargs, statistics_of

from relay.engine.weights import CheckpointError
from relay.models.groot.embodiments import KNOWN, resolve
from relay.models.groot.recipe import Recipe, read_recipe

SIZES: dict[str, Any] = {key: WIDTHS[key] for key in ("max_state_dim", "max_action_dim", "action_horizon")}


def read(tag: str = DROID, processor: Any = None, statistics: Any = None, **changes: Any) -> Recipe:
    return read_recipe(
        processor_kwargs([DROID, LIBERO]) if processor is None else processor,
        {key: statistics_of(key) for key in (DROID, LIBERO)} if statistics is None else statistics,
        IDS,
        tag,
        **{**SIZES, **changes},
    )


def changed(path: str, value: Any) -> dict[str, Any]:
    """The settings with one entry of DROID's set, or one taken out with `...`."""
    processor = copy.deepcopy(processor_kwargs([DROID, LIBERO]))
    place: Any = processor
    *way, last = path.split("/")
    for key in ["modality_configs", DROID, *way] if way else []:
        place = place[int(key) if isinstance(place, list) else key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return processor


def test_droid_is_read_with_its_frames_keys_and_representations() -> None:
    recipe = read()
    assert (recipe.embodiment.tag, recipe.embodiment.slot) == (DROID, 24)
    assert recipe.cameras == ("exterior_image_1_left", "wrist_image_left")
    assert recipe.frames == (-15, 0)
    assert recipe.language_key == "annotation.language.language_instruction"
    assert [(part.key, part.width) for part in recipe.state] == [
        ("eef_9d", 9),
        ("gripper_position", 1),
        ("joint_position", 7),
    ]
    assert [(group.key, group.width, group.relative, group.state_key) for group in recipe.actions] == [
        ("eef_9d", 9, "xyz_rot6d", "eef_9d"),
        ("gripper_position", 1, None, ""),
        ("joint_position", 7, "joints", "joint_position"),
    ]
    assert recipe.horizon == 40
    assert recipe.formalize_language
    assert recipe.clip
    assert not recipe.exclude_state


def test_percentiles_scale_the_state_and_absolute_actions_but_never_relative_ones() -> None:
    recipe, numbers = read(), statistics_of(DROID)
    assert np.array_equal(recipe.state[0].low, numbers["state"]["eef_9d"]["q01"])
    assert np.array_equal(recipe.state[0].high, numbers["state"]["eef_9d"]["q99"])
    assert np.array_equal(recipe.actions[1].high, numbers["action"]["gripper_position"]["q99"])
    assert np.array_equal(recipe.actions[0].low, numbers["relative_action"]["eef_9d"]["min"])
    assert recipe.actions[0].low.shape == (40, 9)


def test_without_percentiles_everything_is_scaled_by_its_extremes() -> None:
    recipe, numbers = read(processor=changed("use_percentiles", False)), statistics_of(DROID)
    assert np.array_equal(recipe.state[0].low, numbers["state"]["eef_9d"]["min"])
    assert np.array_equal(recipe.actions[1].high, numbers["action"]["gripper_position"]["max"])


def test_relative_actions_are_taken_as_absolute_where_the_checkpoint_turns_them_off() -> None:
    recipe = read(processor=changed("use_relative_action", False))
    assert [group.relative for group in recipe.actions] == [None] * 3
    assert np.array_equal(recipe.actions[0].low, statistics_of(DROID)["action"]["eef_9d"]["q01"])


def test_delta_actions_are_never_converted() -> None:
    told = {"rep": "DELTA", "type": "NON_EEF", "format": "DEFAULT"}
    processor = changed("action/action_configs", [{"rep": "ABSOLUTE"}, {"rep": "ABSOLUTE"}, told])
    group = read(processor=processor).actions[2]
    assert group.relative is None
    assert group.delta


def test_encodings_of_the_state_go_by_key() -> None:
    processor = changed("state/sin_cos_embedding_keys", ["joint_position"])
    processor["modality_configs"][DROID]["state"]["mean_std_embedding_keys"] = ["gripper_position"]
    processor["max_state_dim"] = 24
    recipe = read(processor=processor, max_state_dim=24)
    assert [part.encoding for part in recipe.state] == ["min_max", "mean_std", "sin_cos"]
    assert recipe.state[2].encoded_width == 14
    assert np.array_equal(recipe.state[1].high, statistics_of(DROID)["state"]["gripper_position"]["std"])


def test_angles_are_encoded_only_where_the_checkpoint_says_so_at_all() -> None:
    processor = changed("state/sin_cos_embedding_keys", ["joint_position"])
    processor["apply_sincos_state_encoding"] = False
    assert read(processor=processor).state[2].encoding == "min_max"


@pytest.mark.parametrize("name", ["libero_sim", "LIBERO_PANDA", "Libero_Panda", "LIBERO_SIM"])
def test_an_embodiment_goes_by_its_tag_or_name_in_any_case(name: str) -> None:
    assert read(name).embodiment.tag == LIBERO


def test_the_checkpoints_own_slots_win_and_the_table_fills_in() -> None:
    assert resolve("libero_sim", {"libero_sim": 7}, [LIBERO]).slot == 7
    assert resolve("libero_sim", {}, [LIBERO]).slot == 2
    assert resolve("my_arm", {"my_arm": 31}, ["my_arm"]).slot == 31


@pytest.mark.parametrize(
    ("wanted", "ids", "message"),
    [
        ("libero_smi", {}, "'libero_smi' is not an embodiment of GR00T N1.7, did you mean 'libero_sim'"),
        ("liberopanda", {}, "did you mean 'libero_sim'"),
        ("zzz", {}, f"'zzz' is not an embodiment .*; this checkpoint has {LIBERO} .LIBERO_PANDA., my_arm"),
        ("SIMPLER_ENV_GOOGLE", {}, "was not trained on the embodiment 'simpler_env_google', which needs a fine-tuned"),
        ("XDOF", {}, "no statistics of the embodiment 'xdof_relative_eef_relative_joint'; this checkpoint has"),
        ("my_arm", {}, "embodiment_id.json does not say the slot of the embodiment 'my_arm'"),
        ("my_arm", {"my_arm": "3"}, "embodiment_id.json says '3', which is no number of the slot"),
    ],
)
def test_other_embodiments_are_refused_with_all_there_are(wanted: str, ids: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve(wanted, ids, [LIBERO, "my_arm"])


def test_the_table_has_the_released_slots() -> None:
    slots = {"libero_sim": 2, "simpler_env_google": 0, "simpler_env_widowx": 1, "unitree_g1_sonic": 11, DROID: 24}
    assert {tag: KNOWN[tag].slot for tag in slots} == slots
    assert [tag for tag, known in KNOWN.items() if known.slot == 26] == [
        "real_r1_pro_sharpa_relative_eef",
        "real_r1_pro_sharpa_relative_eef_human",
        "real_r1_pro_sharpa_relative_eef_maxinsights",
        "real_r1_pro_sharpa_relative_eef_mecka",
    ]


def test_statistics_absent_for_a_tag_are_refused_with_those_there_are() -> None:
    with pytest.raises(CheckpointError, match=f"has no statistics of the embodiment '{DROID}', only of: {LIBERO}"):
        read(statistics={LIBERO: statistics_of(LIBERO)})


def test_relative_statistics_of_fewer_steps_are_refused_and_of_more_are_cut() -> None:
    numbers = copy.deepcopy(statistics_of(DROID))
    entry = numbers["relative_action"]["joint_position"]
    numbers["relative_action"]["joint_position"] = {key: [*rows, [0.0] * 7] for key, rows in entry.items()}
    assert np.array_equal(read(statistics={DROID: numbers}).actions[2].low, entry["min"])
    numbers["relative_action"]["joint_position"] = {key: rows[:39] for key, rows in entry.items()}
    with pytest.raises(CheckpointError, match="'joint_position' has 39 steps, this embodiment's actions 40"):
        read(statistics={DROID: numbers})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("use_percentiles", ..., "use_percentiles is missing, expected true or false"),
        ("use_relative_action", ..., "use_relative_action is missing"),
        ("use_albumentations", ..., "use_albumentations is missing"),
        ("use_tactile", True, "tactile inputs are not supported"),
        ("max_state_dim", 29, "says max_state_dim 29, but the network has 20"),
        ("max_action_horizon", 16, "says max_action_horizon 16, but the network has 40"),
        ("video/modality_keys", [], "modality_keys is empty"),
        ("video/delta_indices", [0.5], "delta_indices is a list of 1 items, expected at least one integer"),
        ("language/delta_indices", [0, 1], "delta_indices has 2 entries, expected one"),
        ("action/delta_indices", list(range(50)), "50 steps, but the network gives 40; .* a longer horizon"),
        ("action/action_configs", [], "action_configs needs one entry for each of 3 keys"),
    ],
)
def test_settings_that_do_not_fit_are_refused(path: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(processor=changed(path, value))


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"rep": "SOMETHING"}, "rep is 'SOMETHING', expected one of ABSOLUTE, RELATIVE, DELTA"),
        ({"rep": "RELATIVE", "type": "NON_EEF", "format": "XYZ_ROT6D"}, "is one of poses, but type says NON_EEF"),
        ({"rep": "RELATIVE", "type": "EEF", "format": "XYZ_ROTVEC"}, "have 6 values, the statistics 9"),
        (
            {"rep": "RELATIVE", "type": "EEF", "format": "XYZ_ROT6D", "state_key": "pose"},
            "its 9 values are relative to the state's 'pose', which is no key of the state",
        ),
        (
            {"rep": "RELATIVE", "type": "EEF", "format": "XYZ_ROT6D", "state_key": "joint_position"},
            "relative to the state's 'joint_position', which has 7 values",
        ),
    ],
)
def test_relative_actions_that_cannot_be_made_absolute_are_refused(told: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(processor=changed("action/action_configs", [told, {"rep": "ABSOLUTE"}, {"rep": "ABSOLUTE"}]))


def test_enumerations_may_be_written_by_their_values() -> None:
    told = {"rep": "relative", "type": "eef", "format": "xyz+rot6d"}
    processor = changed("action/action_configs", [told, {"rep": "absolute"}, {"rep": "absolute"}])
    assert read(processor=processor).actions[0].relative == "xyz_rot6d"


def test_a_state_or_actions_too_wide_for_the_network_are_refused() -> None:
    processor = changed("state/sin_cos_embedding_keys", ["joint_position"])
    with pytest.raises(CheckpointError, match="24 values, but the network has room for 20"):
        read(processor=processor)
    processor = changed("max_action_dim", 12)
    with pytest.raises(CheckpointError, match="17 values, but the network has room for 12"):
        read(processor=processor, max_action_dim=12)


def test_a_history_of_states_that_the_network_does_not_take_is_refused() -> None:
    processor = changed("state/delta_indices", [-1, 0])
    assert read(processor=processor).state_steps == 2
    with pytest.raises(CheckpointError, match="delta_indices has 2 entries, but the network takes 1"):
        read(processor=processor, state_history_length=1)
