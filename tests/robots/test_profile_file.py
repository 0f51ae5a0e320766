"""Profiles as YAML files: what they may say, and what each mistake is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.robots.gripper import Gripper
from relay.robots.profile import ProfileError
from relay.robots.profile_file import load_profile

MINIMAL = """
cameras: {base_0_rgb: front}
state: [{key: joints, names: [a, b]}]
actions: [{names: [a, b]}]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "my-arm.yaml"


def _with(text: str) -> str:
    """The smallest profile, with lines replaced or added."""
    lines = {line.partition(":")[0]: line for line in MINIMAL.strip().splitlines()}
    lines |= {"state": "state: [{key: joints, names: j_1..2}]"}
    lines |= {line.partition(":")[0]: line for line in text.strip().splitlines()}
    return "\n".join(lines.values())


def test_the_name_is_the_files(file: Path) -> None:
    file.write_text(_with(""))
    assert load_profile(file).name == "my-arm"


def test_a_name_may_be_given(file: Path) -> None:
    file.write_text(_with("name: left arm"))
    assert load_profile(str(file)).name == "left arm"


def test_what_is_not_said_is_unknown_and_not_guessed(file: Path) -> None:
    file.write_text(_with(""))
    profile = load_profile(file)
    action = profile.actions[0]
    assert (profile.control_hz, profile.statistics, profile.normalization, profile.conversion) == (None,) * 4
    assert (action.unit, action.kind, action.limits, action.gripper, action.relative) == (
        "unknown", "unknown", None, None, False,
    )  # fmt: skip
    assert profile.state[0].units == ("unknown", "unknown")


def test_ranges_are_written_out_beside_single_names(file: Path) -> None:
    file.write_text(_with("actions: [{names: [left_joint_1..3, left_gripper, right_9..11]}]"))
    names = [action.name for action in load_profile(file).actions]
    assert names == ["left_joint_1", "left_joint_2", "left_joint_3", "left_gripper", "right_9", "right_10", "right_11"]


def test_a_group_without_key_goes_on_with_the_key_before(file: Path) -> None:
    file.write_text(_with("state: [{key: q, names: j_1..2, unit: rad}, {names: g, unit: m}, {key: f, names: force}]"))
    parts = load_profile(file).state
    assert [(part.keys, part.names, part.units) for part in parts] == [
        (("q",), ("j_1", "j_2", "g"), ("rad", "rad", "m")),
        (("f",), ("force",), ("unknown",)),
    ]


def test_keys_may_have_alternatives(file: Path) -> None:
    file.write_text(_with("cameras: {base_0_rgb: [observation.images.top, images/top]}"))
    assert load_profile(file).cameras[0].keys == ("observation.images.top", "images/top")


def test_one_pair_of_limits_holds_for_the_group_and_several_for_one_name_each(file: Path) -> None:
    file.write_text(_with("actions: [{names: j_1..2, limits: [-1, 1]}, {names: k_1..2, limits: [[0, 1], [-2.5, 2]]}]"))
    limits = [action.limits for action in load_profile(file).actions]
    assert limits == [(-1, 1), (-1, 1), (0, 1), (-2.5, 2)]


def test_relative_names_are_actions(file: Path) -> None:
    file.write_text(_with("actions: [{names: [j_1..2, grip]}]\nrelative: j_1..2"))
    assert [action.relative for action in load_profile(file).actions] == [True, True, False]


def test_a_gripper_has_its_convention(file: Path) -> None:
    file.write_text(_with("actions: [{names: [a, b], gripper: {closed_at: -1, open_at: 1}}]"))
    assert load_profile(file).actions[0].gripper == Gripper(closed_at=-1, open_at=1)


def test_statistics_are_relative_to_the_file(file: Path) -> None:
    file.write_text(_with("statistics: stats/norm_stats.json\nnormalization: quantile"))
    assert load_profile(file).statistics == file.parent / "stats" / "norm_stats.json"
    assert load_profile(file).normalization == "quantile"


def test_a_file_extends_a_shipped_profile(file: Path) -> None:
    file.write_text("base: droid\ncontrol_hz: 10\n")
    profile, base = load_profile(file), load_profile("droid")
    assert (profile.name, profile.control_hz) == ("my-arm", 10)
    assert (profile.cameras, profile.state, profile.actions) == (base.cameras, base.state, base.actions)


def test_a_file_extends_another_file_whose_paths_stay_its_own(file: Path) -> None:
    folder = file.parent / "shared"
    folder.mkdir()
    (folder / "base.yaml").write_text(_with("name: base\nstatistics: stats.json"))
    file.write_text("base: shared/base.yaml")
    profile = load_profile(file)
    assert profile.name == "my-arm"
    assert profile.statistics == folder / "stats.json"


def test_a_base_of_a_base_is_refused(file: Path) -> None:
    file.write_text("base: libero-delta")
    with pytest.raises(ProfileError, match=r"my-arm.yaml: base: libero-delta.yaml has a base itself; extend that one"):
        load_profile(file)


def test_an_unknown_name_is_refused_with_the_nearest_and_all(file: Path) -> None:
    text = "robot profile 'doird' is not known, did you mean 'droid'.*known are aloha, aloha-sim, droid.*or a file that"
    with pytest.raises(ProfileError, match=text):
        load_profile("doird")


def test_a_file_that_is_not_there_is_refused_by_its_path(file: Path) -> None:
    with pytest.raises(ProfileError, match=r"robot profile .*my-arm.yaml cannot be read: No such file"):
        load_profile(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("camera: {}", "unknown key 'camera', did you mean 'cameras'.; it takes base, name"),
        ("- a", "my-arm.yaml is a list of 1 items, expected a map"),
        ("a: [", "my-arm.yaml is not YAML: "),
        ("name: a\nname: b", "is not YAML: the key 'name' stands there twice"),
        ("1: a", "the key 1 is not text"),
        ("state: [{key: q, names: a}]\nactions: [{names: a}]", "cameras is missing"),
        (_with("cameras: [a]"), "cameras is a list of 1 items, expected a map"),
        (_with("cameras: {base_0_rgb: 3}"), r"cameras.base_0_rgb is 3, expected text, or a list of texts"),
        (_with("cameras: {}"), "cameras: a profile needs at least one"),
        (_with("control_hz: fast"), "control_hz is 'fast', expected a number"),
        (_with("control_hz: true"), "control_hz is True, expected a number"),
        (_with("control_hz: 0"), "control_hz is 0, expected a number above 0"),
        (_with("control_hz: .inf"), "control_hz is inf, expected a number"),
        (_with("frames: [grey]"), "frames: 'grey' is not a form of frames"),
        (_with("conversion: droid"), "conversion is 'droid', expected 'aloha'"),
        (_with("normalization: min_max"), "normalization is 'min_max', expected 'z_score' or 'quantile'"),
        (_with("statistics: [a]"), "statistics is a list of 1 items, expected text"),
        (_with("base: droid.yaml"), "robot profile .*droid.yaml cannot be read"),
        (_with("state: {key: q}"), "state is a map of 1 items, expected a list of maps"),
        (_with("state: [q]"), r"state\[0\] is 'q', expected a map"),
        (_with("state: [{names: a}]"), r"state\[0\].key is missing"),
        (_with("state: [{key: q}]"), r"state\[0\].names is missing"),
        (_with("state: [{key: q, names: []}]"), r"state\[0\].names is a list of 0 items, expected at least one name"),
        (_with("state: [{key: q, name: a}]"), r"state\[0\]: unknown key 'name', did you mean 'names'"),
        (_with("state: [{key: q, names: j_3..1}]"), r"state\[0\].names: the range 'j_3..1' goes from 3 to 1"),
        (
            _with("actions: [{names: a, kind: speed}]"),
            r"actions\[0\].kind is 'speed', expected 'position' or 'velocity'",
        ),
        (_with("actions: [{names: a, unit: 3}]"), r"actions\[0\].unit is 3, expected text"),
        (_with("actions: [{names: a, limits: 1}]"), r"actions\[0\].limits is 1, expected \[least, most\]"),
        (_with("actions: [{names: a, limits: [1, x]}]"), r"actions\[0\].limits is a list of 2 items, expected \[least"),
        (
            _with("actions: [{names: [a, b], limits: [[0, 1]]}]"),
            r"actions\[0\].limits: 1 pairs for 2 names; give one pair, or one per name",
        ),
        (_with("actions: [{names: a, limits: [1, 0]}]"), r"actions: the limits of 'a' are \[1.0, 0.0\]"),
        (_with("actions: [{names: a, gripper: 1}]"), r"actions\[0\].gripper is 1, expected a map"),
        (_with("actions: [{names: a, gripper: {closed_at: 1}}]"), r"actions\[0\].gripper.open_at is missing"),
        (
            _with("actions: [{names: a, gripper: {closed_at: 1, open: 0}}]"),
            r"actions\[0\].gripper: unknown key 'open', did you mean 'open_at'",
        ),
        (
            _with("actions: [{names: a, gripper: {closed_at: 1, open_at: 1}}]"),
            r"actions\[0\].gripper: a gripper that is closed and open at 1 cannot move",
        ),
        (_with("relative: [aa]"), "relative: 'aa' is not an action, did you mean 'a'.; they are a, b"),
        (
            _with("actions: [{names: [x, y, z]}]\nrelative: z"),
            "relative: 'z' is action 2, and the state has no dimension 2",
        ),
    ],
)
def test_a_mistake_is_refused_with_file_and_key(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ProfileError, match=message) as refused:
        load_profile(file)
    assert str(file) in str(refused.value) or "droid.yaml" in str(refused.value)


@pytest.mark.parametrize("value", ["!!int x", "!!int ''", "!!bool x", "!!timestamp x", "2001-99-99"])
def test_a_value_that_yaml_cannot_make_is_refused(file: Path, value: str) -> None:
    file.write_text(_with(f"name: {value}"))
    with pytest.raises(ProfileError, match=r"my-arm.yaml is not YAML: .* cannot be read as"):
        load_profile(file)


def test_a_file_that_is_nested_too_deeply_is_refused(file: Path) -> None:
    file.write_text("a: " + "[" * 5_000 + "]" * 5_000)
    with pytest.raises(ProfileError, match=r"my-arm.yaml is not YAML: it is nested too deeply"):
        load_profile(file)


def test_a_file_that_is_not_text_is_refused(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ProfileError, match=r"my-arm.yaml cannot be read: it is not UTF-8 text"):
        load_profile(file)


def test_yaml_that_would_run_code_is_refused(file: Path) -> None:
    file.write_text("name: !!python/object/apply:os.getcwd []")
    with pytest.raises(ProfileError, match="is not YAML"):
        load_profile(file)
