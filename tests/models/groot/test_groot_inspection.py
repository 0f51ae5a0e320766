"""GR00T folders: which are read, what is refused, and with which remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from groot_folders import (
    BACKBONE,
    DROID,
    LIBERO,
    VOCABULARY,
    statistics_of,
    write_isaac,
    write_json,
    write_lerobot,
)
from safetensors.torch import load_file, save_file

from relay.models.groot.inspection import inspect_checkpoint

HAS_TOKENIZER = {"tokenizer": VOCABULARY}


def problems(folder: Path, **options: Any) -> str:
    """All of them as one text."""
    return "\n".join(inspect_checkpoint(folder, **{**HAS_TOKENIZER, **options}).problems)


@pytest.mark.parametrize(
    "write",
    [
        write_isaac,
        lambda folder: write_isaac(folder, processor_folder=True),
        lambda folder: write_isaac(folder, shards=3),
        lambda folder: write_isaac(folder, ids=False),
        write_lerobot,
        lambda folder: write_lerobot(folder, flat=True),
    ],
    ids=["released", "as training leaves it", "in shards", "without ids", "lerobot", "lerobot on a plain data set"],
)
def test_a_whole_folder_has_no_problems_and_one_embodiment(write: Callable[[Path], Path], tmp_path: Path) -> None:
    found = inspect_checkpoint(write(tmp_path), **HAS_TOKENIZER)
    assert found.problems == ()
    assert found.recipe is not None
    assert (found.recipe.embodiment.tag, found.recipe.embodiment.slot) == (LIBERO, 2)
    assert found.recipe.horizon == 16


def test_the_only_embodiment_needs_no_name_and_several_do(tmp_path: Path) -> None:
    folder = write_isaac(tmp_path, tags=[DROID, LIBERO])
    assert problems(folder) == f"--embodiment is needed, since this checkpoint knows several: {DROID}, {LIBERO}"
    assert problems(folder, embodiment=LIBERO) == ""


@pytest.mark.parametrize("name", ["libero_sim", "LIBERO_PANDA", "Libero_Sim"])
def test_an_embodiment_goes_by_tag_or_name_in_any_case(name: str, tmp_path: Path) -> None:
    found = inspect_checkpoint(write_isaac(tmp_path, tags=[DROID, LIBERO]), embodiment=name, **HAS_TOKENIZER)
    assert found.recipe is not None
    assert found.recipe.embodiment.tag == LIBERO


def test_relay_json_may_name_the_embodiment_and_the_option_wins(tmp_path: Path) -> None:
    settings = {"backbone": BACKBONE, "embodiment": DROID}
    folder = write_isaac(tmp_path, tags=[DROID, LIBERO], settings=settings)
    for option, expected in ((None, DROID), (LIBERO, LIBERO)):
        found = inspect_checkpoint(folder, embodiment=option, **HAS_TOKENIZER)
        assert found.recipe is not None
        assert found.recipe.embodiment.tag == expected


def test_an_unknown_embodiment_is_answered_with_all_and_the_nearest(tmp_path: Path) -> None:
    told = problems(write_isaac(tmp_path, tags=[DROID, LIBERO]), embodiment="libero_simm")
    assert "'libero_simm' is not an embodiment" in told
    assert f"did you mean '{LIBERO}'?" in told
    assert DROID in told


def test_a_part_of_a_tag_is_answered_with_the_whole_one(tmp_path: Path) -> None:
    told = problems(write_isaac(tmp_path, tags=[DROID, LIBERO]), embodiment="droid")
    assert f"'droid' is not an embodiment of GR00T N1.7, did you mean '{DROID}'?" in told


def test_an_embodiment_without_statistics_is_told_so(tmp_path: Path) -> None:
    folder = write_isaac(tmp_path, tags=[DROID, LIBERO], statistics={DROID: None})
    assert f"no statistics of the embodiment '{DROID}', only of: {LIBERO}" in problems(folder, embodiment=DROID)


def test_an_embodiment_of_fine_tuned_checkpoints_only_is_told_so(tmp_path: Path) -> None:
    told = problems(write_isaac(tmp_path, tags=[DROID]), embodiment=LIBERO)
    assert f"not trained on the embodiment '{LIBERO}', which needs a fine-tuned one" in told


def test_statistics_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    statistics = statistics_of(LIBERO)
    statistics["state"]["roll"]["q99"] = [float("nan")]
    told = problems(write_isaac(tmp_path, statistics={LIBERO: statistics}))
    assert f"state of 'roll' of {LIBERO}: q99 of roll[0] is nan, expected a finite number" in told


@pytest.mark.parametrize(
    ("config", "version"),
    [
        ({"model_type": "gr00t_n1_5", "architectures": ["GR00T_N1_5"]}, "N1.5"),
        ({"model_type": "Gr00tN1d6", "architectures": ["Gr00tN1d6"]}, "N1.6"),
    ],
)
def test_an_earlier_version_is_refused_by_name_with_what_to_use(
    config: dict[str, Any], version: str, tmp_path: Path
) -> None:
    told = problems(write_isaac(tmp_path, config=config))
    assert told.startswith(f"this is a GR00T {version} checkpoint; only N1.7 is served: use Isaac-GR00T's server")
    assert told.endswith("or fine-tune nvidia/GR00T-N1.7-3B")


def test_lerobots_n15_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path, config={"tokenizer_assets_repo": "lerobot/eagle2hg-processor-groot-n1p5"})
    assert "this is a GR00T N1.5 checkpoint" in problems(folder)
    assert "lerobot 0.5.1" in problems(folder)


def test_a_folder_of_checkpoints_lists_them(tmp_path: Path) -> None:
    for name in ("libero_10", "libero_goal"):
        write_isaac(tmp_path / name)
    (tmp_path / "images").mkdir()
    told = problems(tmp_path)
    assert "choose one of libero_10, libero_goal" in told
    assert str(tmp_path / "libero_10") in told


@pytest.mark.parametrize(
    ("content", "told"),
    [({"type": "pi05"}, "says 'pi05'"), ({"model_type": "llama"}, "says 'llama'"), ({}, "says nil")],
)
def test_another_models_folder_is_refused(content: dict[str, Any], told: str, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", content)
    assert "is no GR00T checkpoint: its config.json " + told in problems(tmp_path)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    assert f"no config.json in {tmp_path}" in problems(tmp_path)


@pytest.mark.parametrize("key", ["select_layer", "vl_self_attention_cfg", "state_history_length"])
def test_a_size_that_is_missing_is_never_guessed(key: str, tmp_path: Path) -> None:
    assert f"config.json: {key} is missing" in problems(write_isaac(tmp_path, config={key: None}))


@pytest.mark.parametrize(
    ("processor", "told"),
    [
        ({"max_state_dim": 29}, "says max_state_dim 29, but the network has 20"),
        ({"max_action_horizon": 50}, "says max_action_horizon 50, but the network has 40"),
        ({"use_albumentations": False}, "config.json says use_albumentations_transforms True"),
    ],
)
def test_two_files_that_contradict_each_other_are_refused(processor: dict[str, Any], told: str, tmp_path: Path) -> None:
    assert told in problems(write_isaac(tmp_path, processor=processor))


@pytest.mark.parametrize("name", ["processor_config.json", "statistics.json"])
def test_a_missing_file_is_named_with_both_places(name: str, tmp_path: Path) -> None:
    folder = write_isaac(tmp_path)
    (folder / name).unlink()
    assert f"no {name} in {folder}, nor under processor/" in problems(folder)


def test_a_missing_tokenizer_is_told_with_the_remedy(tmp_path: Path) -> None:
    told = problems(write_isaac(tmp_path, tokenizer=False), tokenizer=None)
    assert "nvidia/Cosmos-Reason2-2B or Qwen/Qwen3-VL-2B-Instruct" in told
    assert "--tokenizer FILE" in told


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    folder = write_isaac(tmp_path, tags=[DROID, LIBERO], tokenizer=False, settings={"backbon": {}})
    told = inspect_checkpoint(folder).problems
    assert any("unknown key 'backbon', did you mean 'backbone'?" in problem for problem in told)
    assert any("no tokenizer in" in problem for problem in told)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"embodimant": LIBERO}, "unknown key 'embodimant', did you mean 'embodiment'?"),
        ({"embodiment": 2}, "embodiment is 2, expected text"),
        ({"backbone": BACKBONE, "config": {}}, "'config' is for lerobot folders"),
        ({"backbone": {**BACKBONE, "layers": 3}}, "relay.json: backbone: unknown key 'layers'"),
    ],
)
def test_a_wrong_relay_json_is_refused(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    assert told in problems(write_isaac(tmp_path, settings=settings))


def change_steps(folder: Path, file: str, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    content = json.loads((folder / file).read_text())
    change(content["steps"])
    write_json(folder / file, content)


def test_a_lerobot_step_that_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path)
    step = {"registry_name": "relative_actions_processor", "config": {"enabled": True}}
    change_steps(folder, "policy_preprocessor.json", lambda steps: steps.insert(2, step))
    assert "the step 'relative_actions_processor' is not supported" in problems(folder)


def test_a_lerobot_step_that_is_switched_off_does_not_matter(tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path)
    step = {"registry_name": "relative_actions_processor", "config": {"enabled": False}}
    change_steps(folder, "policy_preprocessor.json", lambda steps: steps.insert(2, step))
    assert problems(folder) == ""


def test_lerobots_two_files_must_hold_the_same_statistics(tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path)

    def shift(steps: list[dict[str, Any]]) -> None:
        steps[0]["config"]["raw_stats"]["state"]["x"]["min"] = [-9.0]

    change_steps(folder, "policy_postprocessor.json", shift)
    assert "raw_stats differs between policy_preprocessor.json and policy_postprocessor.json" in problems(folder)


def test_lerobots_gripper_of_libero_is_remarked(tmp_path: Path) -> None:
    (remark,) = inspect_checkpoint(write_lerobot(tmp_path), **HAS_TOKENIZER).remarks
    assert "here the client does" in remark


def test_a_tensor_that_is_not_lerobots_is_named(tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    save_file({**tensors, "stray": tensors["_groot_model.action_head.vlln.bias"].clone()}, file)
    assert "tensor stray does not begin with _groot_model." in problems(folder)


def test_a_setting_of_the_processor_that_is_not_known_is_remarked_and_those_of_training_are_not(tmp_path: Path) -> None:
    settings = {"clip_outlier": False, "sharpness": 3, "color_jitter_params": {"brightness": 0.3}, "use_mean_std": True}
    found = inspect_checkpoint(write_isaac(tmp_path, processor=settings), **HAS_TOKENIZER)
    assert found.problems == ()
    assert found.remarks == (
        "processor_config.json: clip_outlier is not known and has no effect here, did you mean 'clip_outliers'?",
        "processor_config.json: sharpness is not known and has no effect here",
    )
