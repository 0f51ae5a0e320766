"""Observations in model format: what is taken, what is refused, and with which words."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from relay.engine.base import Note
from relay.models.pi0.config import DEMO
from relay.models.pi0.tokenizer import PromptTokenizer
from relay.models.pi0.transforms import Pi0Prepared, prepare
from relay.protocol.errors import ObservationError
from relay.protocol.images import Codec, encode_frame
from relay.protocol.messages import Options

FRAME = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
PADDED = replace(DEMO, action_dim=32, state_dim=4, max_token_len=80)


class Characters:
    bos_id = 2
    unknown_id = None

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


def observation(**changes: Any) -> dict[str, Any]:
    base = {"image": {"base_0_rgb": FRAME}, "state": np.zeros(4, np.float32), "prompt": "pick"}
    merged = {**base, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def prepared(options: Options | None = None, *, default_prompt: str | None = None, **changes: Any) -> Pi0Prepared:
    tokenizer = PromptTokenizer(Characters(), PADDED.max_token_len, True)
    return prepare(observation(**changes), options or Options(), PADDED, tokenizer, default_prompt=default_prompt)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size, with no pixels behind it."""
    return (
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
        + width.to_bytes(4, "big")
        + height.to_bytes(4, "big")
        + b"\x08\x02\0\0\0abcd"
    )


def test_missing_cameras_are_masked_and_the_caller_is_told() -> None:
    row = prepared()
    assert row.images.shape == (1, 224, 224, 3)
    assert row.notes == (Note("cameras masked: left_wrist_0_rgb, right_wrist_0_rgb"),)


def test_cameras_stand_in_the_models_order_whatever_the_dicts() -> None:
    dark = np.zeros((224, 224, 3), np.uint8)
    row = prepared(image={"right_wrist_0_rgb": dark + 3, "left_wrist_0_rgb": dark + 2, "base_0_rgb": dark + 1})
    assert row.images[:, 0, 0, 0].tolist() == [1, 2, 3]
    assert row.notes == ()


def test_a_masked_black_frame_equals_an_absent_one() -> None:
    black = np.zeros((224, 224, 3), np.uint8)
    masked = prepared(image={"base_0_rgb": FRAME, "right_wrist_0_rgb": black}, image_mask={"right_wrist_0_rgb": False})
    assert np.array_equal(masked.images, prepared().images)
    assert len(prepared(image={"base_0_rgb": FRAME, "right_wrist_0_rgb": black}).images) == 2


def test_lossless_bytes_give_the_same_pixels_as_the_array() -> None:
    encoded = prepared(image={"base_0_rgb": encode_frame(FRAME, Codec.LOSSLESS)})
    assert np.array_equal(encoded.images, prepared().images)


def test_a_padded_state_gives_the_same_tokens_as_the_real_one() -> None:
    state = np.array([0.1, -0.2, 0.3, 0.0], np.float32)
    assert prepared(state=state).tokens == prepared(state=np.pad(state, (0, 28))).tokens


@pytest.mark.parametrize("state", [np.zeros(4, np.float64), [0, 0, 0, 0], [0.0] * 4, np.zeros(4, np.int64)])
def test_harmless_conversions_of_the_state_are_done(state: Any) -> None:
    assert prepared(state=state).tokens == prepared().tokens


@pytest.mark.parametrize("prompt", ["pick", b"pick", ["pick"]])
def test_a_prompt_may_be_text_bytes_or_a_list_of_one(prompt: Any) -> None:
    assert prepared(prompt=prompt).tokens == prepared().tokens


def test_a_default_prompt_stands_in_for_a_missing_one() -> None:
    assert prepared(prompt=None, default_prompt="pick").tokens == prepared().tokens


@pytest.mark.parametrize("prompt", [None, "", " ", b""])
def test_a_default_prompt_stands_in_for_an_empty_one(prompt: Any) -> None:
    tokenizer = PromptTokenizer(Characters(), PADDED.max_token_len, True)
    empty = {**observation(), "prompt": prompt}
    assert prepare(empty, Options(), PADDED, tokenizer, default_prompt="pick").tokens == prepared().tokens


def test_token_ids_are_taken_instead_of_text() -> None:
    row = prepared(
        prompt=None,
        tokenized_prompt=np.array([2, 5, 6, 0, 0]),
        tokenized_prompt_mask=np.array([True] * 3 + [False] * 2),
    )
    assert row.tokens == (2, 5, 6)


def test_unknown_keys_are_reported_not_used() -> None:
    assert prepared(modality_config="x").ignored == ("modality_config",)


def jpeg() -> bytes:
    out = BytesIO()
    Image.fromarray(FRAME).save(out, "JPEG")
    return out.getvalue()


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"image": None}, "'image' is missing"),
    ({"image": {}}, "no camera"),
    ({"image": FRAME}, "image: expected a map"),
    ({"image": {"left_wrist_O_rgb": FRAME}}, r"image\['left_wrist_O_rgb'\] is not a camera .* mean 'left_wrist_0_rgb'"),
    ({"image": {"base_0_rgb": jpeg()[: len(jpeg()) // 2]}}, r"image\['base_0_rgb'\]"),
    ({"image": {"base_0_rgb": png_header(60_000, 60_000)}}, r"image\['base_0_rgb'\].*60000"),
    ({"image": {"base_0_rgb": b"not an image"}}, r"image\['base_0_rgb'\]"),
    ({"images": {"cam_high": FRAME}}, "'images' beside 'image'"),
    ({"image_mask": {"base_0_rgb": 1}}, r"image_mask\['base_0_rgb'\]: expected a bool"),
    ({"image_mask": {"base_0_rgb": False}}, "no camera"),
    ({"image_mask": {"left_wrist_0_rgb": True}}, "holds no frame"),
    ({"image_mask": {"front": True}}, "not a camera"),
    ({"state": None}, "'state' is missing"),
    ({"state": np.zeros(7)}, "state has 7 values; this policy expects 4 values, or 32 padded"),
    ({"state": np.zeros((1, 4))}, r"state has shape \(1, 4\)"),
    ({"state": "up"}, "state: expected 4 numbers"),
    ({"state": ["0", "1", "2", "3"]}, "state: expected 4 numbers"),
    ({"state": [True] * 4}, "state: expected 4 numbers"),
    ({"state": [[0], [0, 0]]}, "state: expected 4 numbers"),
    (
        {"prompt": None, "tokenized_prompt": [[1], [2, 3]], "tokenized_prompt_mask": np.array([True])},
        "expected one dimension of numbers or bools, got a list of 2",
    ),
    ({"state": np.array([0, np.nan, 0, 0])}, r"state\[1\] is nan"),
    ({"state": np.array([0, 0, np.inf, 0])}, r"state\[2\] is inf"),
    ({"state": np.ones(32)}, r"state\[4\] is 1; behind this policy's 4 values only zeros"),
    ({"prompt": None, "promt": "pick"}, "'prompt' is missing; 'promt' is not a key .* did you mean 'prompt'"),
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": " \n "}, "prompt is empty"),
    ({"prompt": 7}, "prompt: expected a string, got int"),
    ({"prompt": np.zeros(3)}, r"prompt: expected a string, got \(3,\) float64"),
    ({"prompt": ["a", "b"]}, "prompt: expected a string, got a list of 2"),
    ({"prompt": b"\xff\xfe"}, "not UTF-8"),
    ({"prompt": "x" * 5000}, "prompt has 5000 bytes"),
    ({"tokenized_prompt": np.array([1]), "tokenized_prompt_mask": np.array([True])}, "beside 'tokenized_prompt'"),
    ({"prompt": None, "tokenized_prompt": np.array([1])}, "tokenized_prompt_mask is missing"),
    ({"prompt": None, "tokenized_prompt_mask": np.array([True])}, "tokenized_prompt is missing"),
    (
        {"prompt": None, "tokenized_prompt": np.array([512]), "tokenized_prompt_mask": np.array([True])},
        "tokenized_prompt holds 512",
    ),
    (
        {"prompt": None, "tokenized_prompt": np.array([5]), "tokenized_prompt_mask": np.array([False])},
        "masks every token",
    ),
    (
        {"prompt": None, "tokenized_prompt": np.zeros(81, int), "tokenized_prompt_mask": np.ones(81, bool)},
        "at most 80 integers",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[message[:40] for _, message in REFUSALS])
def test_bad_input_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ObservationError, match=message):
        prepared(**changes)


@pytest.mark.parametrize("num_steps", [0, -1, 51])
def test_num_steps_outside_its_range_is_refused(num_steps: int) -> None:
    with pytest.raises(ObservationError, match=f"num_steps must be between 1 and 50, got {num_steps}"):
        prepared(Options(num_steps=num_steps))


def test_noise_of_another_shape_is_refused() -> None:
    with pytest.raises(ObservationError, match=r"noise: expected \(16, 32\) float32, got \(16, 4\)"):
        prepared(Options(noise=np.zeros((16, 4), np.float32)))


def test_frames_beyond_the_pixel_budget_are_refused_before_decoding() -> None:
    frame = np.broadcast_to(np.zeros(3, np.uint8), (6000, 6000, 3))
    with pytest.raises(ObservationError, match=r"MiB of pixels"):
        prepared(image={"base_0_rgb": frame, "left_wrist_0_rgb": frame, "right_wrist_0_rgb": frame})
