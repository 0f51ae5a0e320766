"""One observation to what the network takes and its actions back, in every form that clients send."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from groot_folders import DROID, LIBERO, observation
from groot_observations import EXTERIOR, FORMS, RECIPES, WRIST, in_form, state_with, with_text
from groot_words import write_tokenizer

from relay.models.groot.image_recipe import ImageRecipe
from relay.models.groot.images import prepare_frame
from relay.models.groot.prompt import PromptTokenizer, load_tokenizer
from relay.models.groot.transforms import GrootPrepared, prepare, resting_state, to_robot
from relay.models.groot.units import to_network, to_robot_units
from relay.protocol.errors import ObservationError
from relay.protocol.images import Codec, encode_frame
from relay.protocol.messages import Options


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("words") / "tokenizer.json"))


def ready(
    came: dict[str, Any], tokenizer: PromptTokenizer, tag: str = DROID, options: Options | None = None, **changes: Any
) -> GrootPrepared:
    return prepare(came, options or Options(), RECIPES[tag], tokenizer, **changes)


def test_droids_row_holds_four_images_their_tokens_the_state_and_the_slot(tokenizer: PromptTokenizer) -> None:
    came = observation(DROID, size=(180, 320))
    row = ready(came, tokenizer).row
    assert [image.shape for image in row.images] == [(256, 448, 3)] * 4
    order = [(0, EXTERIOR), (0, WRIST), (1, EXTERIOR), (1, WRIST)]
    for image, (step, camera) in zip(row.images, order, strict=True):
        assert np.array_equal(image, prepare_frame(came["video"][camera][0, step], RECIPES[DROID].image))
    one_image = [151_652, *[151_655] * 112, 151_653]
    assert row.tokens.tolist() == [151_644, 872, 198, *one_image * 4, 10, 11, 12, 13, 14, 151_645, 198]
    assert np.array_equal(row.state, to_network({k: v[0] for k, v in came["state"].items()}, RECIPES[DROID]))
    assert row.slot == 24


@pytest.mark.parametrize("tag", [DROID, LIBERO])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_the_same_row(form: str, tag: str, tokenizer: PromptTokenizer) -> None:
    expected, row = ready(observation(tag), tokenizer, tag).row, ready(in_form(form, tag), tokenizer, tag).row
    assert row.tokens.tobytes() == expected.tokens.tobytes()
    assert row.state.tobytes() == expected.state.tobytes()
    assert [image.tobytes() for image in row.images] == [image.tobytes() for image in expected.images]


@pytest.mark.parametrize(("form", "prefix"), [("nested", ""), ("vllm", ""), ("lerobot", ""), ("flat", "action.")])
def test_actions_answer_in_the_form_that_was_asked_in(form: str, prefix: str, tokenizer: PromptTokenizer) -> None:
    prepared = ready(in_form(form, DROID), tokenizer)
    actions = np.random.default_rng(0).uniform(-1, 1, (40, 20)).astype(np.float32)
    groups = to_robot(actions, prepared, RECIPES[DROID])
    assert {key: values.shape for key, values in groups.items()} == {
        f"{prefix}eef_9d": (1, 40, 9),
        f"{prefix}gripper_position": (1, 40, 1),
        f"{prefix}joint_position": (1, 40, 7),
    }
    expected = to_robot_units(actions, {k: v[0] for k, v in observation(DROID)["state"].items()}, RECIPES[DROID])
    for key, values in expected.items():
        assert np.array_equal(groups[prefix + key][0], values)


def test_two_requests_with_other_states_do_not_mix_their_bases(tokenizer: PromptTokenizer) -> None:
    first, second = (ready(state_with(joint_position=[base] * 7), tokenizer) for base in (0.0, 1.0))
    still = np.zeros((40, 20), np.float32)
    moved = to_robot(still, second, RECIPES[DROID])["joint_position"]
    assert np.allclose(moved - to_robot(still, first, RECIPES[DROID])["joint_position"], 1, atol=1e-6)


def test_instructions_are_formalized_only_where_the_checkpoint_was_trained_so(tokenizer: PromptTokenizer) -> None:
    came = with_text(prompt="Pick up the black bowl!")
    raw = prepare(came, Options(), replace(RECIPES[DROID], formalize_language=False), tokenizer)
    assert ready(came, tokenizer).row.tokens[-7:-2].tolist() == [10, 11, 12, 13, 14]
    assert raw.row.tokens[-7:-2].tolist() == [15, 11, 12, 13, 16]


def test_an_instruction_without_any_letter_is_refused(tokenizer: PromptTokenizer) -> None:
    with pytest.raises(ObservationError, match="prompt has no letters or digits"):
        ready(with_text(prompt="?!"), tokenizer)


def test_the_default_prompt_is_formalized_too(tokenizer: PromptTokenizer) -> None:
    tokens = ready(with_text(), tokenizer, default_prompt="Pick up!").row.tokens
    assert tokens[-4:-2].tolist() == [10, 11]


@pytest.mark.parametrize("steps", [0, 51])
def test_numbers_of_steps_out_of_range_are_refused(steps: int, tokenizer: PromptTokenizer) -> None:
    with pytest.raises(ObservationError, match=f"num_steps must be between 1 and 50, got {steps}"):
        ready(observation(DROID), tokenizer, options=Options(num_steps=steps))


def test_options_go_with_the_row(tokenizer: PromptTokenizer) -> None:
    assert ready(observation(DROID), tokenizer).num_steps is None
    noise = np.zeros((40, 20), np.float32)
    assert ready(observation(DROID), tokenizer, options=Options(num_steps=7, noise=noise)).num_steps == 7


def test_noise_of_another_shape_than_the_networks_is_refused(tokenizer: PromptTokenizer) -> None:
    noise = np.zeros((40, 17), np.float32)
    with pytest.raises(ObservationError, match=r"noise: expected \(40, 20\) float32, got \(40, 17\)"):
        ready(observation(DROID), tokenizer, options=Options(noise=noise))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (np.zeros((2, 180, 320, 3), np.float32), r"\(H, W, 3\) uint8 RGB, .* got \(180, 320, 3\) float32"),
        (np.zeros((2, 3, 180, 320), np.uint8), r"got \(3, 180, 320\) uint8; transpose channels-first frames"),
        (np.zeros((2, 180, 320, 4), np.uint8), r"got \(180, 320, 4\) uint8"),
        ([b"no image", b"no image"], "begins with the bytes 6e 6f .* expected a JPEG, PNG or WebP file"),
    ],
)
def test_frames_of_another_kind_are_refused_by_camera(frame: Any, message: str, tokenizer: PromptTokenizer) -> None:
    came = observation(DROID)
    with pytest.raises(ObservationError, match=rf"video\['{WRIST}'\].*{message}"):
        ready({**came, "video": {**came["video"], WRIST: frame}}, tokenizer)


def test_cut_off_files_are_refused_by_camera_and_time(tokenizer: PromptTokenizer) -> None:
    came = observation(DROID)
    whole = encode_frame(np.zeros((64, 80, 3), np.uint8), Codec.JPEG_Q90)
    video = {**came["video"], WRIST: [whole, whole[:-40]]}
    with pytest.raises(ObservationError, match=rf"video\['{WRIST}'\]\[1\] is a damaged or truncated JPEG file"):
        ready({**came, "video": video}, tokenizer)


def test_strips_of_pixels_are_refused(tokenizer: PromptTokenizer) -> None:
    came = observation(DROID)
    strip = np.zeros((2, 4, 804, 3), np.uint8)
    with pytest.raises(ObservationError, match=rf"{WRIST}'\]\[0\] is 4x804 pixels; one side may be at most 200 times"):
        ready({**came, "video": {**came["video"], WRIST: strip}}, tokenizer)


def test_frames_of_too_many_tokens_are_refused_before_they_are_resized(tokenizer: PromptTokenizer) -> None:
    came = observation(DROID)
    wide = np.zeros((2, 20, 2000, 3), np.uint8)
    with pytest.raises(
        ObservationError, match=r"the prompt has \d+ tokens, \d+ of them for 4 frames, and at most 4096"
    ):
        ready({**came, "video": {**came["video"], WRIST: wide}}, tokenizer)


@pytest.mark.parametrize("pose", [np.zeros(9), np.array([0, 0, 0, 1, 0, 0, 2, 0, 0.0])])
def test_poses_without_a_rotation_are_refused(pose: Any, tokenizer: PromptTokenizer) -> None:
    with pytest.raises(ObservationError, match=r"state\['eef_9d'\]: its last six numbers are two rows of a rotation"):
        ready(state_with(eef_9d=pose), tokenizer)


@pytest.mark.parametrize("tag", [DROID, LIBERO])
def test_the_resting_state_passes_every_check(tag: str, tokenizer: PromptTokenizer) -> None:
    prepared = ready({**observation(tag), "state": resting_state(RECIPES[tag])}, tokenizer, tag)
    actions = to_robot(np.zeros((40, 20), np.float32), prepared, RECIPES[tag])
    assert all(np.isfinite(values).all() for values in actions.values())


def test_the_fast_resize_is_used_where_it_is_asked_for(tokenizer: PromptTokenizer) -> None:
    came = observation(LIBERO, size=(180, 320))
    exact, fast = (ready(came, tokenizer, LIBERO, fast_resize=fast).row.images[0] for fast in (False, True))
    assert np.array_equal(fast, prepare_frame(came["video"]["image"][0, 0], RECIPES[LIBERO].image, fast=True))
    assert not np.array_equal(fast, exact)


def test_a_decoder_that_is_passed_in_decodes_the_files(tokenizer: PromptTokenizer) -> None:
    names: list[str] = []

    def decode(data: bytes, name: str) -> Any:
        names.append(name)
        return np.zeros((64, 80, 3), np.uint8)

    ready(in_form("encoded", DROID), tokenizer, decode=decode)
    wanted = [f"video['{camera}'][{step}]" for step in (0, 1) for camera in (EXTERIOR, WRIST)]
    assert sorted(names) == sorted(wanted)  # side by side, so in any order


def test_cameras_of_other_sizes_share_one_prompt(tokenizer: PromptTokenizer) -> None:
    came = observation(LIBERO)
    came["video"]["wrist_image"] = np.zeros((256, 256, 3), np.uint8)
    recipe = replace(RECIPES[LIBERO], image=ImageRecipe("area", shortest_edge=256, crop_fraction=0.95))
    row = prepare(came, Options(), recipe, tokenizer).row
    assert [image.shape for image in row.images] == [(256, 320, 3), (256, 256, 3)]
    assert (row.tokens == 151_655).sum() == 80 + 64
