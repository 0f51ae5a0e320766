"""The GR00T engine: which rows share a batch, one row's fault, what it refuses at the start and what it remarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from groot_folders import CAMERAS, DROID, LANGUAGE, LIBERO, observation, write_isaac

from relay.engine.base import Chunk, Failure, Work
from relay.engine.weights import CheckpointError
from relay.models import registry
from relay.models.groot import engine as engine_module
from relay.protocol.messages import Options

pytestmark = pytest.mark.vocab


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_isaac(tmp_path_factory.mktemp("groot"), tags=[DROID, LIBERO])


def load(folder: Path, **choices: Any) -> Any:
    options = {"embodiment": LIBERO, "device": "cpu", "max_batch": 2, **choices}
    return registry.load("groot", checkpoint=folder, **options)


@pytest.fixture(scope="module")
def libero(folder: Path) -> Any:
    return load(folder)


def key(engine: Any, asked: dict[str, Any], **options: Any) -> Any:
    return engine.batch_key(engine.prepare(asked, Options(**options)))


def test_prompts_states_and_seeds_share_a_batch(libero: Any) -> None:
    other = {**observation(LIBERO, 1), "language": {LANGUAGE[LIBERO]: "a longer sentence about other things"}}
    assert key(libero, observation(LIBERO), seed=1) == key(libero, other, seed=2)


def test_frame_sizes_and_steps_do_not(libero: Any) -> None:
    wide = observation(LIBERO, size=(64, 160))
    keys = {key(libero, observation(LIBERO)), key(libero, wide), key(libero, observation(LIBERO), num_steps=3)}
    assert len(keys) == 3


def test_the_checkpoints_own_steps_share_a_batch_with_the_same_number_asked_for(libero: Any) -> None:
    assert key(libero, observation(LIBERO)) == key(libero, observation(LIBERO), num_steps=4)


def test_embodiments_never_share_a_batch(libero: Any, folder: Path) -> None:
    droid = load(folder, embodiment=DROID)
    assert key(libero, observation(LIBERO))[0] != key(droid, observation(DROID))[0]


def test_one_rows_fault_leaves_the_others_alone(libero: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = [libero.prepare(observation(LIBERO, seed), Options(seed=seed)) for seed in range(2)]
    whole = engine_module.to_robot

    def fails_for_the_first(actions: Any, one: Any, recipe: Any) -> Any:
        if one is prepared[0]:
            raise ValueError("no way back")
        return whole(actions, one, recipe)

    monkeypatch.setattr(engine_module, "to_robot", fails_for_the_first)
    first, second = libero.infer([Work(one, Options(seed=1)) for one in prepared])
    assert isinstance(first, Failure)
    assert isinstance(second, Chunk)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_row_that_is_not_finite_fails_alone(libero: Any, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = libero.model.sample_actions

    def damaged(inputs: Any) -> torch.Tensor:
        actions = sample(inputs).clone()
        actions[0, 3, 1] = value
        return actions

    monkeypatch.setattr(libero.model, "sample_actions", damaged)
    prepared = libero.prepare(observation(LIBERO), Options())
    first, second = libero.infer([Work(prepared, Options(seed=1))] * 2)
    assert isinstance(first, Failure)
    assert "not finite" in str(first.error)
    assert isinstance(second, Chunk)


def test_every_row_has_arrays_of_its_own(libero: Any) -> None:
    prepared = libero.prepare(observation(LIBERO), Options())
    rows = libero.infer([Work(prepared, Options(seed=seed)) for seed in (1, 1)])
    for group in rows[0].actions:
        assert not np.shares_memory(rows[0].actions[group], rows[1].actions[group])
        assert rows[0].actions[group].dtype == np.float32


def test_warm_up_runs_every_batch_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(folder, max_batch=3)
    sizes: list[int] = []
    sample = engine.model.sample_actions
    monkeypatch.setattr(
        engine.model, "sample_actions", lambda inputs: sizes.append(len(inputs.tokens)) or sample(inputs)
    )
    engine.warm_up(lambda phase, share: None)
    assert sizes == [1, 2, 3]


def test_weights_that_are_not_finite_end_the_start(folder: Path) -> None:
    engine = load(folder)
    with torch.no_grad():
        engine.model.action_positions.fill_(torch.nan)
    with pytest.raises(CheckpointError, match="actions that are not finite: its weights are damaged"):
        engine.warm_up(lambda phase, share: None)


def test_on_a_cpu_nothing_is_remarked(folder: Path) -> None:
    engine = load(folder, graphs="auto")
    engine.warm_up(lambda phase, share: None)
    assert engine.remarks == []


def test_the_default_number_of_steps_can_be_chosen(folder: Path) -> None:
    assert load(folder, num_steps=7).spec.num_steps == 7


def test_maps_of_other_embodiments_are_not_kept(libero: Any) -> None:
    assert libero.model.slots == [2]


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"graphs": "on"}, "--graphs must be auto or off, got 'on'"),
        ({"resize": "faster"}, "--resize must be exact or fast, got 'faster'"),
        ({"dtype": "float16"}, "--dtype must be auto or float32 or bfloat16, got 'float16'"),
        ({"num_steps": 51}, "--num-steps must be between 1 and 50, got 51"),
        ({"embodiment": "libero"}, "'libero' is not an embodiment of GR00T N1.7"),
    ],
)
def test_a_wrong_option_ends_the_start(choices: dict[str, Any], text: str, folder: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        load(folder, **choices)
    assert text in str(raised.value)


def test_frames_in_time_reach_the_network_time_outermost(folder: Path) -> None:
    engine = load(folder, embodiment=DROID)
    frames = {camera: np.full((1, 2, 256, 256, 3), 10 * place, np.uint8) for place, camera in enumerate(CAMERAS[DROID])}
    for place, video in enumerate(frames.values()):
        video[0, 1] += 100 + place  # what is now
    prepared = engine.prepare({**observation(DROID), "video": frames}, Options())
    assert [int(image[0, 0, 0]) for image in prepared.row.images] == [0, 10, 100, 111]
