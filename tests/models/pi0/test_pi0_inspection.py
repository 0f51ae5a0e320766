"""What a folder says about itself, in every format: what is taken from where, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import TINY, change_json, norm_stats, write_assets, write_json, write_lerobot, write_openpi, write_relay
from safetensors.torch import load_file, save_file

from relay.models.pi0.checkpoint import Inspection, complete_settings, inspect_checkpoint
from relay.models.pi0.config import CAMERAS
from relay.models.pi0.configurations import CONFIGURATIONS
from relay.robots.profile_file import load_profile


def problem(found: Inspection) -> str:
    """The one problem of a folder."""
    assert len(found.problems) == 1, found.problems
    return found.problems[0]


def test_an_openpi_folder_with_its_configuration_is_complete(tmp_path: Path) -> None:
    folder = write_openpi(tmp_path, "pi05", action_horizon=15)
    found = inspect_checkpoint(folder, config="pi05_droid")
    assert found.problems == ()
    assert found.tensor_problems() == []
    assert found.form == "openpi-pytorch"
    assert found.config is not None
    assert (found.config.action_horizon, found.config.state_dim, found.config.state_in_prompt) == (15, 8, True)
    assert found.config.cameras == CAMERAS
    assert found.normalization is not None
    assert (found.normalization.kind, found.normalization.style) == ("quantile", "openpi")
    assert found.profile == load_profile("droid")
    assert found.statistics == (folder / "assets/droid/norm_stats.json",)
    assert found.tokenizer == folder / "tokenizer.json"


def test_every_setting_names_its_source(tmp_path: Path) -> None:
    settings = {**TINY, "num_steps": 5}
    found = inspect_checkpoint(
        write_openpi(tmp_path, "pi05", action_horizon=15, settings=settings), config="pi05_droid"
    )
    told = {key: (setting.value, setting.source) for key, setting in found.settings.items()}
    assert told["num_steps"] == (5, "relay.json")
    assert told["action_horizon"] == (15, "openpi's config.json")
    assert told["state_in_prompt"] == (True, "the configuration pi05_droid")
    assert told["heads"] == (8, "the tensors")
    assert told["state_dim"] == (8, "the robot or its statistics")


def test_pi05_libero_has_no_state_in_its_prompt(tmp_path: Path) -> None:
    folder = write_openpi(tmp_path, "pi05", assets={"physical-intelligence/libero": (8, 7)})
    found = inspect_checkpoint(folder, config="pi05_libero")
    assert found.problems == ()
    assert found.config is not None
    assert not found.config.state_in_prompt
    assert found.config.max_token_len == 200


def test_a_configurations_metadata_are_the_checkpoints(tmp_path: Path) -> None:
    folder = write_openpi(tmp_path, "pi0", assets={"trossen": (14, 14)}, action_horizon=50)
    assert inspect_checkpoint(folder, config="pi0_aloha").metadata == {"reset_pose": [0, -1.5, 1.5, 0, 0, 0]}


@pytest.mark.parametrize("name", list(CONFIGURATIONS))
def test_every_configuration_has_a_shipped_robot_and_serves_a_folder_made_for_it(name: str, tmp_path: Path) -> None:
    configuration = CONFIGURATIONS[name]
    robot = load_profile(configuration.robot)
    folder = write_openpi(
        tmp_path,
        configuration.family,
        assets={configuration.asset_id: (robot.state_dim, robot.action_dim)},
        action_horizon=configuration.action_horizon,
    )
    found = inspect_checkpoint(folder, config=name)
    assert found.problems == ()
    assert found.config is not None
    assert found.config.action_horizon == configuration.action_horizon


def test_an_unknown_configuration_is_refused_with_the_nearest(tmp_path: Path) -> None:
    text = problem(inspect_checkpoint(write_openpi(tmp_path, "pi05"), config="pi05_droit"))
    assert "configuration 'pi05_droit' is not known, did you mean 'pi05_droid'?" in text


def test_a_configuration_of_the_other_family_is_refused(tmp_path: Path) -> None:
    folder = write_openpi(tmp_path, "pi0", action_horizon=15)
    text = problem(inspect_checkpoint(folder, config="pi05_droid"))
    assert text == "the configuration pi05_droid says model 'pi05', but the tensors say 'pi0'"


def test_a_checkpoint_of_the_other_family_is_not_served(tmp_path: Path) -> None:
    text = problem(inspect_checkpoint(write_relay(tmp_path, "pi0"), family="pi05"))
    assert text == "this is a pi0 checkpoint; serve it as pi0, not as pi05"


def test_a_configuration_that_contradicts_the_folder_is_refused(tmp_path: Path) -> None:
    text = problem(inspect_checkpoint(write_openpi(tmp_path, "pi05", action_horizon=10), config="pi05_droid"))
    assert "openpi's config.json says action_horizon 10, but the configuration pi05_droid says 15" in text


@pytest.mark.parametrize("value", [15.0, True, "15", [15]])
def test_a_horizon_of_another_type_in_openpis_config_is_refused(value: Any, tmp_path: Path) -> None:
    folder = write_openpi(tmp_path, "pi05", config={"action_horizon": value})
    assert "config.json: action_horizon is" in problem(inspect_checkpoint(folder))
    assert "expected an integer" in problem(inspect_checkpoint(folder))


def test_a_variant_that_is_no_text_in_openpis_config_is_refused(tmp_path: Path) -> None:
    folder = write_openpi(tmp_path, "pi05", config={"paligemma_variant": []})
    assert "paligemma_variant is a list of 0 items, expected text" in problem(inspect_checkpoint(folder))


@pytest.mark.parametrize("file", ["relay.json", "config.json", "assets/droid/norm_stats.json"])
def test_a_file_that_is_nested_too_deeply_is_refused(file: str, tmp_path: Path) -> None:
    folder = write_openpi(tmp_path, "pi05", action_horizon=15)
    (folder / file).write_text('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}")
    assert "it is nested too deeply" in problem(inspect_checkpoint(folder, config="pi05_droid"))


def test_relay_json_settles_a_contradiction(tmp_path: Path) -> None:
    folder = write_openpi(tmp_path, "pi05", action_horizon=15, settings={**TINY, "action_horizon": 10})
    found = inspect_checkpoint(folder, config="pi05_droid")
    assert found.problems == ()
    assert found.config is not None
    assert found.config.action_horizon == 10


def test_the_command_lines_robot_comes_before_the_configurations(tmp_path: Path) -> None:
    folder = write_openpi(tmp_path, "pi05", action_horizon=15)
    found = inspect_checkpoint(folder, config="pi05_droid", robot="droid-jointpos")
    assert found.profile == load_profile("droid-jointpos")


def test_full_size_networks_have_the_heads_of_their_variant(tmp_path: Path) -> None:
    text = problem(
        inspect_checkpoint(write_openpi(tmp_path, "pi05", action_horizon=15, settings={}), config="pi05_droid")
    )
    assert "nothing says 'vision_heads'" in text  # the tiny tower is none of the variants that are known


class TestStatistics:
    """Whose statistics are taken."""

    def test_none_is_an_error_that_names_the_place_and_the_remedy(self, tmp_path: Path) -> None:
        folder = write_openpi(tmp_path, "pi05", action_horizon=15)
        (folder / "assets/droid/norm_stats.json").unlink()
        text = problem(inspect_checkpoint(folder, config="pi05_droid"))
        assert f"no statistics: looked for {folder}/assets/droid/norm_stats.json; copy the assets folder" in text

    def test_several_must_be_chosen_from(self, tmp_path: Path) -> None:
        settings = {**TINY, "normalization": "quantile", "state_in_prompt": True, "max_token_len": 200, "num_steps": 10}
        folder = write_openpi(tmp_path, "pi05", assets={"trossen": (14, 14), "my/arm": (8, 8)}, settings=settings)
        text = problem(inspect_checkpoint(folder))
        assert "holds statistics for several robots: my/arm, trossen; write" in text
        assert "relay.json as 'asset_id'" in text
        change_json(folder / "relay.json", "asset_id", value="my/arm")
        assert inspect_checkpoint(folder).statistics == (folder / "assets/my/arm/norm_stats.json",)

    def test_the_robots_name_chooses_too(self, tmp_path: Path) -> None:
        settings = {**TINY, "normalization": "quantile", "state_in_prompt": True, "max_token_len": 200, "num_steps": 10}
        folder = write_openpi(tmp_path, "pi05", assets={"trossen": (14, 14), "droid": (8, 8)}, settings=settings)
        found = inspect_checkpoint(folder, robot="droid")
        assert found.statistics == (folder / "assets/droid/norm_stats.json",)
        assert found.settings["asset_id"].value == "droid"

    def test_those_of_another_asset_than_the_configurations_are_not_taken(self, tmp_path: Path) -> None:
        folder = write_openpi(tmp_path, "pi05", assets={"my/arm": (8, 8)}, action_horizon=15)
        text = problem(inspect_checkpoint(folder, config="pi05_droid"))
        assert "the configuration pi05_droid asks for the statistics of 'droid'" in text
        assert "holds those of my/arm; write the right one into relay.json as 'asset_id'" in text
        write_json(folder / "relay.json", {**TINY, "asset_id": "my/arm"})
        assert inspect_checkpoint(folder, config="pi05_droid").problems == ()

    def test_another_robots_width_is_refused(self, tmp_path: Path) -> None:
        folder = write_openpi(tmp_path, "pi05", assets={"droid": (14, 14)}, action_horizon=15)
        text = problem(inspect_checkpoint(folder, config="pi05_droid"))
        assert "statistics of 14 state dimensions, but this robot's state has 8" in text

    def test_padded_statistics_are_cut_to_the_robots_width(self, tmp_path: Path) -> None:
        folder = write_openpi(tmp_path, "pi05", action_horizon=15)
        padded = {"state": norm_stats(8, padded=32), "actions": norm_stats(8, padded=32)}
        write_json(folder / "assets/droid/norm_stats.json", {"norm_stats": padded})
        found = inspect_checkpoint(folder, config="pi05_droid")
        assert found.problems == ()
        assert found.config is not None
        assert found.config.state_dim == 8
        assert found.normalization is not None
        assert found.normalization.actions.q99 is not None
        assert found.normalization.actions.q99.shape == (8,)

    def test_a_constant_dimension_is_named(self, tmp_path: Path) -> None:
        folder = write_openpi(tmp_path, "pi0", action_horizon=10)
        change_json(folder / "assets/droid/norm_stats.json", "norm_stats", "state", "std", 3, value=0.0)
        assert "std of state[3] is 0, so it cannot be scaled" in problem(inspect_checkpoint(folder, config="pi0_droid"))

    def test_they_are_never_ignored(self, tmp_path: Path) -> None:
        folder = write_relay(tmp_path, "pi05")
        write_assets(folder, {"droid": (8, 8)})
        text = problem(inspect_checkpoint(folder))
        assert "there are statistics (droid), but nothing says how they are used" in text

    def test_a_folder_may_declare_to_be_served_in_model_format_only(self, tmp_path: Path) -> None:
        found = inspect_checkpoint(write_relay(tmp_path, "pi05"))
        assert found.problems == ()
        assert found.normalization is None
        assert found.profile is None

    def test_without_a_robot_their_length_is_the_state_width(self, tmp_path: Path) -> None:
        settings = {**TINY, "normalization": "quantile", "state_in_prompt": True, "max_token_len": 200, "num_steps": 10}
        found = inspect_checkpoint(write_openpi(tmp_path, "pi05", assets={"my/arm": (6, 6)}, settings=settings))
        assert found.problems == ()
        assert found.config is not None
        assert found.config.state_dim == 6


def test_a_stated_state_width_that_is_not_the_robots_is_refused(tmp_path: Path) -> None:
    folder = write_openpi(tmp_path, "pi05", action_horizon=15, settings={**TINY, "state_dim": 7})
    text = problem(inspect_checkpoint(folder, config="pi05_droid"))
    assert text == "relay.json says state_dim 7, but robot droid has 8"


def test_a_pi0_network_has_no_state_in_its_prompt(tmp_path: Path) -> None:
    assert "state_in_prompt is true, but a pi0 network" in problem(
        inspect_checkpoint(write_relay(tmp_path, "pi0", state_in_prompt=True))
    )


def test_a_robot_of_ones_own_may_bring_statistics_and_their_kind(tmp_path: Path) -> None:
    folder = write_relay(tmp_path / "checkpoint", "pi05", state_dim=8)
    stats = {"norm_stats": {"state": norm_stats(8), "actions": norm_stats(8)}}
    write_json(tmp_path / "stats.json", stats)
    robot = tmp_path / "arm.yaml"
    robot.write_text("base: droid\nstatistics: stats.json\nnormalization: z_score\n")
    found = inspect_checkpoint(folder, robot=str(robot))
    assert found.problems == ()
    assert found.normalization is not None
    assert found.normalization.kind == "z_score"
    assert found.statistics == (tmp_path / "stats.json",)


def test_a_robots_statistics_may_be_those_of_a_lerobot_normalizer(tmp_path: Path) -> None:
    stats = {"observation.state": norm_stats(6), "action": norm_stats(6, shift=0.2)}
    arrays = {f"{key}.{name}": torch.tensor(value) for key, values in stats.items() for name, value in values.items()}
    save_file(arrays, tmp_path / "mine.safetensors")
    robot = tmp_path / "arm.yaml"
    robot.write_text(
        "cameras: {base_0_rgb: cam}\nstate: [{key: q, names: j_1..6}]\nactions: [{names: j_1..6}]\n"
        "statistics: mine.safetensors\n"
    )
    folder = write_openpi(tmp_path / "run", "pi05", action_horizon=15)
    found = inspect_checkpoint(folder, config="pi05_droid", robot=str(robot))
    assert found.statistics == (tmp_path / "mine.safetensors",)
    assert found.normalization is not None
    assert found.normalization.actions.q99 is not None
    np.testing.assert_array_equal(found.normalization.actions.q99, np.float32(norm_stats(6, shift=0.2)["q99"]))


def test_a_normalization_is_told_to_come_from_the_profile_that_changed_it(tmp_path: Path) -> None:
    robot = tmp_path / "arm.yaml"
    robot.write_text("base: droid\nnormalization: z_score\n")
    folder = write_openpi(tmp_path / "run", "pi05", action_horizon=15)
    found = inspect_checkpoint(folder, config="pi05_droid", robot=str(robot))
    assert found.problems == ()
    setting = found.settings["normalization"]
    assert (setting.value, setting.source) == ("z_score", "the robot profile")


def test_a_robot_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert "droit" in problem(inspect_checkpoint(write_relay(tmp_path, "pi05"), robot="droit"))


@pytest.mark.parametrize("inner", ["params", "assets"])
def test_a_path_beside_the_checkpoint_is_answered_with_the_right_one(inner: str, tmp_path: Path) -> None:
    (tmp_path / "params").mkdir()
    (tmp_path / "assets").mkdir()
    text = problem(inspect_checkpoint(tmp_path / inner))
    assert text == f"no weights in {tmp_path / inner}; did you mean {tmp_path}?"


def test_a_run_is_answered_with_its_last_step(tmp_path: Path) -> None:
    for step in ("10000", "20000"):
        (tmp_path / step / "params").mkdir(parents=True)
    assert problem(inspect_checkpoint(tmp_path)).endswith(f"did you mean {tmp_path / '20000'}?")


@pytest.mark.parametrize("form", ["openpi", "lerobot", "relay"])
def test_complete_settings_say_everything_that_was_found_out(form: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    if form == "openpi":
        folder = write_openpi(tmp_path, "pi0", assets={"trossen": (14, 14)}, action_horizon=50)
        options = {"config": "pi0_aloha"}
    else:
        folder = write_lerobot(tmp_path, "pi05") if form == "lerobot" else write_relay(tmp_path, "pi05")
    before = inspect_checkpoint(folder, **options)
    write_json(folder / "relay.json", complete_settings(before))
    after = inspect_checkpoint(folder)  # without the options
    assert after.problems == ()
    assert after.config == before.config
    assert after.profile == before.profile
    assert after.metadata == before.metadata
    assert (after.normalization is None) == (before.normalization is None)
    if before.normalization and after.normalization and before.normalization.kind != "none":
        for first, second in (
            (before.normalization.state, after.normalization.state),
            (before.normalization.actions, after.normalization.actions),
        ):
            pairs = zip(first.pair(before.normalization.kind), second.pair(after.normalization.kind), strict=True)
            assert all(np.array_equal(ours, theirs) for ours, theirs in pairs)


def test_settings_are_not_complete_while_something_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are statistics"):
        complete_settings(inspect_checkpoint(write_openpi(tmp_path, "pi05")))


def test_all_unknown_settings_are_named_at_once(tmp_path: Path) -> None:
    settings = {**TINY, "normalization": "quantile"}
    text = problem(inspect_checkpoint(write_openpi(tmp_path, "pi05", settings=settings), robot="droid"))
    assert text.startswith("nothing says 'max_token_len', 'num_steps', 'state_in_prompt', and the tensors")


def test_a_missing_tokenizer_is_told_beside_a_wrong_configuration(tmp_path: Path) -> None:
    found = inspect_checkpoint(write_openpi(tmp_path, "pi05", tokenizer=False), config="pi05_droit")
    assert ["configuration 'pi05_droit'" in found.problems[0], "no tokenizer" in found.problems[1]] == [True, True]


def test_missing_tensors_are_told_before_the_settings_are_known(tmp_path: Path) -> None:
    folder = write_openpi(tmp_path, "pi05", settings={})
    tensors = load_file(folder / "model.safetensors")
    del tensors["action_in_proj.bias"]
    save_file(tensors, folder / "model.safetensors")
    found = inspect_checkpoint(folder)
    assert found.problems
    assert found.tensor_problems() == ["missing: action_in_proj.bias"]
