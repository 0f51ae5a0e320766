"""Observations through the wire, to a tiny pi0.5 of 14 joints: images, cameras, state, prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny import image

import relay
from field.loopback import CLIENTS, refused, robot, serving, state
from field.tiny_policy import ACTION_DIM, BASE, LEFT, MAX_TOKENS, RIGHT, STATE_DIM, Characters, observation, tiny_engine
from relay.models.pi0.tokenizer import PromptTokenizer, discretize, load_vocabulary
from relay.protocol.messages import Observation, Options

GEMMA = Path(__file__).parents[2] / "vocab" / "gemma.json"
FRAME = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)


def actions(url: str, **changes: Any) -> NDArray[np.float32]:
    with relay.Policy(url, codec=relay.Codec.RAW) as policy:
        return policy.infer(observation(**changes))["actions"]


def refusal(url: str, **changes: Any) -> str:
    with robot("Policy", url) as infer:
        return refused(infer, observation(**changes))


class Listening:
    """An engine around the tiny one that remembers what reached the network."""

    def __init__(self, **options: Any) -> None:
        self.inner = tiny_engine(**options)
        self.spec = self.inner.spec
        self.tokens: list[tuple[int, ...]] = []

    def prepare(self, observation: Observation, options: Options) -> Any:
        return self.inner.prepare(observation, options)

    def batch_key(self, prepared: Any) -> str:
        return self.inner.batch_key(prepared)

    def warm_up(self, progress: Any) -> None:
        pass

    def infer(self, batch: Any) -> Any:
        self.tokens += [work.prepared.tokens for work in batch]
        return self.inner.infer(batch)


# ---- 4.1: RGB, height, width, channels

ODD_FRAMES: dict[str, tuple[NDArray[Any], str]] = {
    "channels first": (np.zeros((3, 480, 640), np.uint8), "(3, 480, 640) uint8"),
    "float in 0..1": (np.zeros((480, 640, 3), np.float32), "(480, 640, 3) float32"),
    "float in 0..255": (np.full((480, 640, 3), 200.0), "(480, 640, 3) float64"),
    "four channels": (np.zeros((480, 640, 4), np.uint8), "(480, 640, 4) uint8"),
    "grey": (np.zeros((480, 640), np.uint8), "(480, 640) uint8"),
    "empty": (np.zeros((0, 0, 3), np.uint8), "(0, 0, 3) uint8"),
}


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("kind", ODD_FRAMES)
def test_lesson_4_1_a_frame_that_is_not_rgb_is_refused_by_camera_shape_and_dtype(name: str, kind: str, tiny_url: str):
    """Physical-Intelligence/openpi#293. Model format has no conversions, so that nothing is guessed."""
    frame, came = ODD_FRAMES[kind]
    with robot(name, tiny_url) as infer:
        text = refused(infer, observation(image={BASE: frame}))
    assert f"image['{BASE}']: expected (H, W, 3) uint8 RGB" in text
    assert f"got {came}" in text


@pytest.mark.parametrize("codec", [relay.Codec.RAW, relay.Codec.LOSSLESS])
def test_lesson_4_1_a_slice_with_strides_is_the_frame_that_it_shows(codec: relay.Codec, tiny_url: str):
    """Physical-Intelligence/openpi#293: BGR frames are commonly turned round by a negative stride."""
    flipped = FRAME[::2, ::-1, ::-1]
    with relay.Policy(tiny_url, codec=codec) as policy:
        strided = policy.infer(observation(image={BASE: flipped}))["actions"]
        copied = policy.infer(observation(image={BASE: flipped.copy()}))["actions"]
        other = policy.infer(observation(image={BASE: FRAME[::2]}))["actions"]
    assert strided.tobytes() == copied.tobytes()
    assert strided.tobytes() != other.tobytes()


def test_lesson_4_1_red_and_blue_are_not_swapped_on_the_way():
    """Physical-Intelligence/openpi#293."""
    seen: list[NDArray[np.uint8]] = []

    class Watching(Listening):
        def infer(self, batch: Any) -> Any:
            seen.extend(work.prepared.images for work in batch)
            return super().infer(batch)

    red = np.zeros((224, 224, 3), np.uint8)
    red[..., 0] = 255
    with serving(Watching()) as server:
        for codec in (relay.Codec.RAW, relay.Codec.LOSSLESS, relay.Codec.JPEG_Q90):
            with relay.Policy(server.url, codec=codec) as policy:
                policy.infer(observation(image={BASE: red}))
    for images in seen:
        assert images[..., 0].min() > 245
        assert images[..., 1:].max() < 10
    assert len(seen) == 3


# ---- 4.2: unknown cameras, missing cameras


def test_lesson_4_2_missing_cameras_are_masked_and_reported_once(tiny_url: str):
    """huggingface/lerobot#2332, #1620."""
    with relay.Policy(tiny_url) as policy:
        notes = [policy.infer(observation()).get("notes", []) for _ in range(3)]
    assert notes == [[f"cameras masked: {LEFT}, {RIGHT}"], [], []]


def test_lesson_4_2_a_misspelt_camera_is_refused_with_the_nearest_name(tiny_url: str):
    """huggingface/lerobot#2332: the letter O for a zero."""
    text = refusal(tiny_url, image={BASE: FRAME, "left_wrist_O_rgb": FRAME})
    assert "image['left_wrist_O_rgb'] is not a camera of this policy, did you mean 'left_wrist_0_rgb'?" in text


def test_lesson_4_2_no_camera_at_all_is_refused(tiny_url: str):
    """huggingface/lerobot#1620."""
    assert "image: no camera; send at least one of" in refusal(tiny_url, image={})


# ---- 4.3: a failed inference is an error at the caller


@pytest.mark.parametrize("name", CLIENTS)
def test_lesson_4_3_an_engine_that_always_fails_is_an_error_from_the_first_call(name: str):
    """huggingface/lerobot#2119."""
    with serving() as server, robot(name, server.url) as infer:
        text = refused(infer, state(1, do="raise"))
    assert "Internal inference error" in text
    assert ("RuntimeError: cannot read weights.bin" in text) == (name != "PolicyClient")  # its path tells no more


@pytest.mark.parametrize("name", CLIENTS)
def test_lesson_4_3_what_the_engine_says_about_an_observation_reaches_the_caller(name: str):
    """huggingface/lerobot#2119."""
    with serving() as server, robot(name, server.url) as infer:
        assert "state[0] is out of reach" in refused(infer, state(1, do="fail"))


# ---- 4.4: harmless conversions are done, everything else is refused


@pytest.mark.parametrize("name", CLIENTS)
def test_lesson_4_4_a_state_of_doubles_or_a_list_gives_the_same_reply(name: str, tiny_url: str):
    """strands-labs/robots#149 (see also #148)."""
    usual = observation()["state"]
    with robot(name, tiny_url) as infer:
        replies = [infer(observation(state=form)) for form in (usual, usual.astype(np.float64), usual.tolist())]
    assert replies[0].tobytes() == replies[1].tobytes() == replies[2].tobytes()


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (np.zeros((1, 14), np.float32), "state has shape (1, 14); this policy expects 14 values"),
        ("up", "state: expected 14 numbers, got str"),
        ([0.0] * 13, "state has 13 values; this policy expects 14 values, or 32 padded with zeros"),
    ],
)
def test_lesson_4_4_any_other_state_is_refused_with_the_rule(form: Any, expected: str, tiny_url: str):
    """strands-labs/robots#149."""
    assert expected in refusal(tiny_url, state=form)


# ---- 4.5: the instruction


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"prompt": None, "promt": "pick up the fork"}, "did you mean 'prompt'?"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": ["pick", "up"]}, "prompt: expected a string, got a list of 2"),
        ({"prompt": 7}, "prompt: expected a string, got int"),
    ],
)
def test_lesson_4_5_no_usable_instruction_is_an_error(changes: dict[str, Any], expected: str, tiny_url: str):
    """NVIDIA/Isaac-GR00T#92."""
    assert expected in refusal(tiny_url, **changes)


@pytest.mark.parametrize("form", [b"pick up the fork", ["pick up the fork"]])
def test_lesson_4_5_bytes_and_a_list_of_one_are_the_text_they_hold(form: Any, tiny_url: str):
    """NVIDIA/Isaac-GR00T#92."""
    assert actions(tiny_url, prompt=form).tobytes() == actions(tiny_url).tobytes()


def test_lesson_4_5_a_default_instruction_of_the_server_stands_in():
    """NVIDIA/Isaac-GR00T#92."""
    with serving(tiny_engine(default_prompt="pick up the fork")) as server:
        expected = actions(server.url).tobytes()
        assert actions(server.url, prompt=None).tobytes() == expected
        assert actions(server.url, prompt="").tobytes() == expected
        assert actions(server.url, prompt="put it down").tobytes() != expected


# ---- 4.6: the state is never invented


@pytest.mark.parametrize("name", CLIENTS)
def test_lesson_4_6_an_absent_state_is_an_error_that_names_its_size(name: str, tiny_url: str):
    """strands-labs/robots#897."""
    with robot(name, tiny_url) as infer:
        assert "'state' is missing; it has 14 values" in refused(infer, observation(state=None))


def test_lesson_4_6_a_state_under_another_name_is_an_error_that_says_so(tiny_url: str):
    """strands-labs/robots#897."""
    text = refusal(tiny_url, state=None, states=np.zeros(14, np.float32))
    assert "'state' is missing; 'states' is not a key of this policy, did you mean 'state'?" in text


# ---- 4.7: the state in the prompt has the robot's width, and the prompt keeps its tail


def test_lesson_4_7_a_padded_state_gives_the_tokens_of_the_real_one():
    """FluxVLA/FluxVLA#101."""
    usual = np.linspace(-0.9, 0.9, STATE_DIM, dtype=np.float32)
    usual[-1] = 0.0  # a real zero is no padding
    engine = Listening()
    with serving(engine) as server:
        for form in (usual, np.pad(usual, (0, ACTION_DIM - STATE_DIM))):
            actions(server.url, state=form)
    bins = " ".join(map(str, discretize(usual)))
    expected = (2, *Characters().encode(f"Task: pick up the fork, State: {bins};\nAction: "))
    assert engine.tokens == [expected, expected]
    assert len(bins.split()) == 14


@pytest.mark.vocab
def test_lesson_4_7_with_the_real_vocabulary_the_tokens_are_the_references():
    """FluxVLA/FluxVLA#101; the text is that of openpi: src/openpi/models/tokenizer.py."""
    gemma = load_vocabulary(GEMMA)
    usual = np.linspace(-0.9, 0.9, STATE_DIM, dtype=np.float32)
    engine = Listening()
    engine.inner._tokenizer = PromptTokenizer(gemma, 200, True)
    work = [
        engine.prepare(observation(state=form), Options())
        for form in (usual, np.pad(usual, (0, ACTION_DIM - STATE_DIM)))
    ]
    bins = " ".join(str(b) for b in np.digitize(usual, np.linspace(-1, 1, 257)[:-1]) - 1)
    reference = (gemma.bos_id, *gemma.encode(f"Task: pick up the fork, State: {bins};\nAction: "))
    assert [row.tokens for row in work] == [reference, reference]


def test_lesson_4_7_a_long_instruction_is_cut_before_the_state_and_the_reply_says_so():
    """FluxVLA/FluxVLA#101."""
    engine = Listening()
    with serving(engine) as server:
        with relay.Policy(server.url) as policy:
            reply = policy.infer(observation(prompt="pick up the fork " * 176))
        with robot("PolicyClient", server.url) as infer:  # whose replies have no room for a note
            refusal = infer(observation(prompt="pick up the fork " * 176))
    tail = tuple(Characters().encode(";\nAction: "))
    assert engine.tokens[0][-len(tail) :] == tail
    assert len(engine.tokens) == 1
    assert len(engine.tokens[0]) <= MAX_TOKENS
    assert any(note.startswith("prompt truncated") for note in reply["notes"])
    assert refusal["message"].startswith("prompt truncated")


# ---- 4.8: nothing is rebuilt while requests come in


@pytest.mark.parametrize("requests", [200, pytest.param(1_000, marks=pytest.mark.slow)])
def test_lesson_4_8_states_and_prompts_of_any_length_compile_nothing(requests: int):
    """flashrt-project/FlashRT#77, #94. Counts compilations instead of comparing times, which a busy machine blurs."""
    random = np.random.default_rng(0)
    engine = Listening()
    engine.inner.warm_up(lambda phase, share: None)
    before = compiled_graphs()
    with serving(engine) as server, relay.Policy(server.url, codec=relay.Codec.RAW) as policy:
        for number in range(requests):
            policy.infer(
                observation(
                    image={BASE: FRAME[:8, :8]},
                    state=random.uniform(-1, 1, 14),
                    prompt="pick up the fork and put it down"[: 5 + number % 20],
                )
            )
    assert len({len(tokens) for tokens in engine.tokens}) > 20
    assert compiled_graphs() == before


def compiled_graphs() -> int:
    """How many graphs torch has compiled in this process."""
    counters = sys.modules.get("torch._dynamo.utils")
    return 0 if counters is None else counters.counters["stats"]["unique_graphs"]


# ---- 4.9: masks


def test_lesson_4_9_a_masked_camera_equals_an_absent_one_and_a_black_one_does_not(tiny_url: str):
    """Physical-Intelligence/openpi#593."""
    black = np.zeros((224, 224, 3), np.uint8)
    two = {BASE: image(0, 0), LEFT: image(0, 1)}
    absent = actions(tiny_url, image=two)
    masked = actions(tiny_url, image={**two, RIGHT: black}, image_mask={RIGHT: False})
    present = actions(tiny_url, image={**two, RIGHT: black}, image_mask={RIGHT: True})
    assert masked.tobytes() == absent.tobytes()
    assert present.tobytes() != absent.tobytes()


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ({RIGHT: True}, f"image_mask['{RIGHT}'] is true but image holds no frame for it"),
        ({BASE: 1}, f"image_mask['{BASE}']: expected a bool, got int"),
        ({"front": True}, "image_mask['front'] is not a camera of this policy"),
    ],
)
def test_lesson_4_9_the_callers_mask_is_checked(mask: dict[str, Any], expected: str, tiny_url: str):
    """Physical-Intelligence/openpi#593."""
    assert expected in refusal(tiny_url, image_mask=mask)
