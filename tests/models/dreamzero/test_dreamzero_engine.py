"""DreamZero's engine: recorded calls, what a session goes on from, options, failures, refusals at the start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dreamzero_folders import write_checkpoint
from golden_engine import actions, answer, golden_engine, observation, observed, undisturbed
from tiny_dreamzero import SCENARIOS, distance, frames

from relay.engine.adapter_folders import AdapterChoice
from relay.engine.base import Chunk, Failure, Work
from relay.engine.weights import CheckpointError
from relay.engine.worker import NonFiniteActions
from relay.models import registry
from relay.models.dreamzero.checkpoint import Checkpoint
from relay.models.dreamzero.engine import DreamZeroEngine
from relay.models.dreamzero.footprint import Footprint
from relay.models.dreamzero.schedule import COMPUTED
from relay.protocol.errors import ObservationError
from relay.protocol.messages import Options

pytestmark = pytest.mark.dreamzero

PICTURES = frames("engine", 9).numpy()

SERVED = [name for name in SCENARIOS if name != "restart"]
"""In mid-session a single frame never reaches the network alone, as it does there."""


# ---- recorded calls


@pytest.mark.parametrize("scenario", SERVED)
def test_recorded_calls_give_the_references_actions(scenario: str) -> None:
    engine = golden_engine(decouple=scenario == "decouple")
    session = engine.open_session()
    steps = 16 if scenario == "full16" else None
    for number in range(len(SCENARIOS[scenario])):
        given = actions(engine, session, observation(scenario, number), num_steps=steps)
        assert given.dtype == np.float32
        assert distance(torch.from_numpy(given), f"{scenario}/{number}/action") <= 1e-5, number


# ---- which frames a call has


def replies(*clips: np.ndarray, words: str = "A") -> list[bytes]:
    """The actions of one episode."""
    engine = golden_engine()
    session = engine.open_session()
    return [actions(engine, session, observed(str(number), clip, words)).tobytes() for number, clip in enumerate(clips)]


def test_an_episode_begins_with_the_newest_of_several_frames() -> None:
    assert replies(PICTURES[:4]) == replies(PICTURES[3])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_than_four_frames_are_led_by_those_before_them(count: int) -> None:
    sent = PICTURES[1 : 1 + count]
    whole = np.concatenate([*[PICTURES[:1]] * (4 - count), sent])
    assert replies(PICTURES[0], sent)[1] == replies(PICTURES[0], whole)[1]


def test_single_frames_go_on_with_the_last_four() -> None:
    one_by_one = replies(*PICTURES[:5])
    clips = [np.stack([PICTURES[max(at, 0)] for at in range(number - 3, number + 1)]) for number in range(1, 5)]
    assert one_by_one == replies(PICTURES[0], *clips)


def test_a_full_window_begins_anew_with_the_newest_of_eight_frames() -> None:
    before = [PICTURES[:4]] * 4
    assert replies(*before, PICTURES[:8])[4] == replies(*before, PICTURES[7])[4]


def test_another_prompt_begins_anew_with_the_newest_frame_and_without_the_past() -> None:
    engine = golden_engine()
    session = engine.open_session()
    actions(engine, session, observed("0", PICTURES[0]))
    actions(engine, session, observed("1", PICTURES[:4]))
    changed = actions(engine, session, observed("0", PICTURES[:8], "B"))
    assert changed.tobytes() == replies(PICTURES[7], words="B")[0]


def test_the_frames_before_a_full_window_still_lead_single_ones_after_it() -> None:
    before = [PICTURES[:4]] * 4
    clip = np.stack([PICTURES[3], PICTURES[3], PICTURES[5], PICTURES[6]])
    # the fifth call begins a window with its only frame, the sixth brings one more
    single = replies(*before, PICTURES[5], PICTURES[6])[5]
    assert single == replies(*before, PICTURES[5], np.stack([PICTURES[2], PICTURES[3], PICTURES[5], PICTURES[6]]))[5]
    assert single != replies(*before, PICTURES[5], clip)[5]


# ---- failures


def breaks_off(*_: Any) -> None:
    raise RuntimeError("no kernel image is available")


def gives_infinity(engine: Any) -> Any:
    whole = engine.model.infer

    def infer(*args: Any, **kwargs: Any) -> Any:
        imagined = whole(*args, **kwargs)
        return imagined._replace(actions=torch.full_like(imagined.actions, torch.inf))

    return infer


@pytest.mark.parametrize("before", [0, 2, 4])
@pytest.mark.parametrize("trouble", ["breaks off", "is infinite"])
def test_a_request_that_failed_leaves_the_session_as_it_was(
    before: int, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = golden_engine()
    session = engine.open_session()
    for number in range(before):
        actions(engine, session, observation("base", number))
    with monkeypatch.context() as patch:
        if trouble == "breaks off":
            patch.setattr("relay.models.dreamzero.schedule.UniPC.step", breaks_off)
        else:
            patch.setattr(engine.model, "infer", gives_infinity(engine))
        row = answer(engine, session, observed("other", PICTURES[:4], "B"))
    assert isinstance(row, Failure)
    assert isinstance(row.error, NonFiniteActions if trouble == "is infinite" else RuntimeError)
    for number in range(before, 6):
        assert actions(engine, session, observation("base", number)).tobytes() == undisturbed("base")[number]


def test_one_rows_failure_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = golden_engine()
    whole, calls = engine.model.infer, iter([True, False])
    monkeypatch.setattr(engine.model, "infer", lambda *given: breaks_off() if next(calls) else whole(*given))
    prepared = engine.prepare(observation("base", 0), Options())
    first, second = engine.infer([Work(prepared, Options(), engine.open_session()) for _ in range(2)])
    assert isinstance(first, Failure)
    assert isinstance(second, Chunk)


# ---- options


OBSERVING, DENOISING = 6, 7
"""Arguments of a pass: one with actions beside the video has one more."""


def count_passes(engine: DreamZeroEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of arguments of every pass to come."""
    dit, passes = engine.model.network.dit, []
    whole = dit.forward
    monkeypatch.setattr(dit, "forward", lambda *given: passes.append(len(given)) or whole(*given))
    return passes


@pytest.mark.parametrize(("asked", "runs"), [(None, 8), *((steps, steps) for steps in COMPUTED)])
def test_num_steps_is_how_often_the_network_denoises(
    asked: int | None, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = golden_engine()
    passes = count_passes(engine, monkeypatch)
    actions(engine, engine.open_session(), observation("base", 0), num_steps=asked)
    assert passes.count(DENOISING) == runs
    assert passes.count(OBSERVING) == 1


@pytest.mark.parametrize("steps", [1, 4, 9, 15, 17])
def test_other_numbers_of_steps_are_refused_with_those_that_exist(steps: int) -> None:
    with pytest.raises(ObservationError, match=rf"num_steps is {steps}; .* 5, 6, 7, 8, 16"):
        golden_engine().prepare(observation("base", 0), Options(num_steps=steps))


def test_a_seed_says_all_of_a_first_reply() -> None:
    engine = golden_engine()

    def reply(seed: int) -> bytes:
        return actions(engine, engine.open_session(), observation("base", 0), seed=seed).tobytes()

    assert reply(1) == reply(1)
    assert reply(1) != reply(2)


def test_video_and_actions_begin_with_the_same_numbers_of_one_seed() -> None:
    noise = super(type(golden_engine()), golden_engine())._noise
    video, of_actions = noise(Options(seed=1140))
    assert video.shape == (1, 16, 2, 6, 8)
    assert of_actions.shape == (1, 24, 32)
    drawn = torch.randn((1, 24, 32), generator=torch.Generator().manual_seed(1140), dtype=torch.bfloat16)
    assert torch.equal(of_actions, drawn.float())
    assert torch.equal(video.flatten()[:8], of_actions.flatten()[:8])


def test_without_a_seed_every_request_draws_its_own() -> None:
    noise = super(type(golden_engine()), golden_engine())._noise
    first, second = noise(Options()), noise(Options())
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert not torch.equal(first[0].flatten()[:8], first[1].flatten()[:8])


def test_noise_of_the_actions_says_all_of_a_first_reply() -> None:
    engine = golden_engine()
    noise = np.random.default_rng(3).standard_normal((24, 32)).astype(np.float32)

    def reply(given: np.ndarray) -> bytes:
        return actions(engine, engine.open_session(), observation("base", 0), noise=given).tobytes()

    assert reply(noise) == reply(noise)
    assert reply(noise) != reply(-noise)


def test_noise_of_another_shape_is_refused_with_the_models() -> None:
    with pytest.raises(ObservationError, match=r"noise: expected \(24, 32\)"):
        golden_engine().prepare(observation("base", 0), Options(noise=np.zeros((24, 8), np.float32)))


@pytest.mark.parametrize(("alike", "runs"), [(-2.0, 4), (2.0, 16)])
def test_the_dynamic_schedule_lets_the_network_rest_where_its_flows_are_alike(
    alike: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = golden_engine(dynamic=True)
    assert any("--schedule dynamic" in remark for remark in engine.remarks)
    monkeypatch.setattr("relay.models.dreamzero.schedule.ALIKE", ((alike, 4),))
    passes = count_passes(engine, monkeypatch)
    actions(engine, engine.open_session(), observation("base", 0))
    assert passes.count(DENOISING) == runs


def test_a_number_of_steps_that_is_asked_for_goes_before_the_dynamic_schedule() -> None:
    engine = golden_engine(dynamic=True)
    asked = actions(engine, engine.open_session(), observation("base", 0), num_steps=8)
    assert asked.tobytes() == undisturbed("base")[0]


def test_a_row_without_a_session_is_an_episode_of_its_own() -> None:
    engine = golden_engine()
    prepared = engine.prepare(observation("base", 0), Options())
    (row,) = engine.infer([Work(prepared, Options())])
    assert isinstance(row, Chunk)
    assert np.asarray(row.actions).tobytes() == undisturbed("base")[0]
    assert len(engine.residents) == 0


def test_a_comparison_gets_the_units_of_every_dimension() -> None:
    engine = golden_engine()
    zero, length = engine.action_scale(engine.prepare(observation("base", 0), Options()))
    assert (zero == np.zeros((24, 32))).all()
    assert (length == np.ones((24, 32))).all()


# ---- the start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dreamzero"))


def load(folder: Path, **choices: Any) -> Any:
    return registry.load("dreamzero", checkpoint=folder, device="cpu", **choices)


def test_warm_up_leaves_no_session_behind_and_finds_out_how_much_they_may_take(folder: Path) -> None:
    engine = load(folder)
    assert engine.residents.limit is None
    engine.warm_up(lambda phase, share: None)
    assert len(engine.residents) == 0
    assert 1 <= engine.residents.most <= 16


@pytest.mark.parametrize(("sessions", "most"), [(0.5, 1), (1.2, 1), (3.0, 2), (40.0, 16), (None, 16)])
def test_as_many_sessions_fit_as_there_is_memory_for_and_one_at_least(
    sessions: float | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = golden_engine()
    needed = engine._footprint
    free = None if sessions is None else int(sessions * needed.session) + needed.work
    monkeypatch.setattr("relay.models.dreamzero.engine.free_memory", lambda device: free)
    engine.warm_up(lambda phase, share: None)
    assert engine.residents.most == most


def test_more_memory_than_there_is_for_sessions_is_remarked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = golden_engine(sessions=4)
    free = int(2.5 * engine._footprint.session) + engine._footprint.work
    monkeypatch.setattr("relay.models.dreamzero.engine.free_memory", lambda device: free)
    engine.warm_up(lambda phase, share: None)
    assert engine.residents.most == 4
    assert any("GB are free for sessions" in remark for remark in engine.remarks)


def test_a_loaded_policy_tells_its_evaluations_and_sizes(folder: Path) -> None:
    spec = load(folder).spec
    assert (spec.num_steps, spec.action_horizon, spec.action_dim, spec.max_batch) == (8, 24, 8, 1)
    assert load(folder, num_steps=5).spec.num_steps == 5


def test_a_reply_is_in_the_robots_units(folder: Path) -> None:
    engine = load(folder)
    black = np.zeros((180, 320, 3), np.uint8)
    asked = {
        **{f"observation/{camera}": black for camera in ("exterior_image_0_left", "exterior_image_1_left")},
        "observation/wrist_image_left": black,
        "observation/gripper_position": 0.5,
        "prompt": "pick",
    }
    replies = []
    for joints in (np.zeros(7), np.full(7, 9.0), np.full(7, 10.0)):
        prepared = engine.prepare({**asked, "observation/joint_position": joints}, Options(seed=1))
        (row,) = engine.infer([Work(prepared, Options(seed=1), engine.open_session())])
        replies.append(row.actions)
    assert replies[0].shape == (24, 8)
    # beyond the trained range the network sees the same state, and the offsets go to the one that came
    np.testing.assert_allclose(replies[2][:, :7] - replies[1][:, :7], 1, rtol=1e-5)
    np.testing.assert_array_equal(replies[2][:, 7], replies[1][:, 7])


def test_weights_that_are_not_finite_end_the_start(folder: Path) -> None:
    engine = load(folder)
    with torch.no_grad():
        engine.model.network.dit.action_decoder.layer2.b.fill_(torch.nan)
    with pytest.raises(CheckpointError, match="actions that are not finite: its weights are damaged"):
        engine.warm_up(lambda phase, share: None)


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"num_steps": 4}, "--num-steps of dreamzero must be 5, 6, 7, 8 or 16, got 4"),
        ({"num_steps": 8, "schedule": "dynamic"}, "--num-steps and --schedule dynamic exclude each other"),
        ({"schedule": "quick"}, "--schedule must be fixed or dynamic, got 'quick'"),
        ({"cameras": "reversed"}, "--cameras is 'reversed', expected roboarena or droid"),
        ({"session_memory": 0.001}, "--session-memory 0.001: one session takes 0.00416 GB; give at least that"),
        ({"session_memory": float("inf")}, "--session-memory must be a number of GB, got inf"),
        ({"adapters": AdapterChoice({"cups": Path("cups")})}, "dreamzero takes no LoRA adapters yet"),
        ({"dtype": "float16"}, "--dtype must be auto or float32 or bfloat16"),
    ],
)
def test_what_cannot_be_done_is_refused_at_the_start(choices: dict[str, Any], text: str, folder: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        load(folder, **choices)
    assert text in str(refused.value)


@pytest.mark.parametrize("session", [917_176_320, 14_277_017_600, 4_156_416])
def test_the_memory_that_a_refusal_names_is_enough(session: int) -> None:
    engine = golden_engine()
    size = Footprint({}, memory=session, cross=0, work=0)
    checkpoint = Checkpoint(engine.model, engine._tokenizer, engine._recipe, "roboarena", size)
    with pytest.raises(CheckpointError) as refused:
        DreamZeroEngine("dreamzero", checkpoint, session_memory=1)
    told = re.search(r"one session takes (\S+) GB", str(refused.value))
    assert told is not None
    assert DreamZeroEngine("dreamzero", checkpoint, session_memory=int(float(told[1]) * 1e9)).residents.most == 1


def test_a_device_without_graphs_for_this_model_is_remarked_on() -> None:
    assert "CUDA graphs" in golden_engine(graphs_wanted=True).remarks[0]
