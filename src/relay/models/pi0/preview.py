"""What the network would see of an observation: frames as they are resized, the prompt token by token, the state.

Goes the way of a real request, through `transforms.prepare`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relay.engine.test_card import draw_test_card
from relay.models.pi0.config import Pi0Config
from relay.models.pi0.inspection import Inspection
from relay.models.pi0.tokenizer import PromptTokenizer, discretize
from relay.models.pi0.transforms import Pi0Prepared, prepare
from relay.models.pi0.units import RobotUnits
from relay.models.report import Cell, Sample, Section
from relay.protocol.errors import ObservationError
from relay.protocol.images import decode_frame
from relay.protocol.messages import Observation, Options
from relay.robots.profile import RobotProfile


@dataclass(frozen=True, slots=True)
class Preview:
    """Frames are by camera, None where it is masked."""

    sections: Sequence[Section]
    frames: Mapping[str, NDArray[np.uint8] | None]


def preview(found: Inspection, tokenizer: PromptTokenizer, sample: Sample) -> Preview:
    """Prepare a sample for an inspected checkpoint without problems.

    Raises:
        ObservationError: the sample is not one of this checkpoint's.
    """
    config = found.config
    assert config is not None
    robot = RobotUnits(found.profile, found.normalization) if found.profile and found.normalization else None
    cameras = [camera.name for camera in found.profile.cameras] if found.profile else list(config.cameras)
    given = _frames(cameras, sample.frames)
    neutral = sample.state is None  # in model format, which needs no robot and which not every robot's server takes
    prepared = prepare(
        _observation(given, sample, config, robot),
        Options(),
        config,
        tokenizer,
        robot=None if neutral else robot,
        model_units=found.normalization is None,
    )
    present = iter(prepared.images)
    frames = {camera: next(present) if camera in given else None for camera in config.cameras}
    sections = [
        _frames_section(given, frames, bool(sample.frames)),
        _state_section(prepared, sample, config, robot),
        _prompt_section(prepared, sample, tokenizer),
    ]
    return Preview(sections, frames)


def _frames(cameras: Sequence[str], files: Sequence[bytes]) -> dict[str, bytes | NDArray[np.uint8]]:
    """A frame for every camera, or for the first ones as many as there are files."""
    if not files:
        return {camera: draw_test_card(camera) for camera in cameras}
    if len(files) > len(cameras):
        raise ObservationError(f"{len(files)} frames for {len(cameras)} cameras: {', '.join(cameras)}")
    return dict(zip(cameras, files, strict=False))


def _observation(
    frames: Mapping[str, bytes | NDArray[np.uint8]], sample: Sample, config: Pi0Config, robot: RobotUnits | None
) -> Observation:
    """The sample under the robot's keys where its units are those of a known robot, otherwise in model format."""
    if robot is None or sample.state is None:
        state = np.zeros(config.state_dim, np.float32) if sample.state is None else sample.state
        return {"image": frames, "state": state, "prompt": sample.prompt}
    keys = {camera.name: camera.keys[0] for camera in robot.profile.cameras}
    return {
        **{keys[camera]: frame for camera, frame in frames.items()},
        **_state_by_key(sample.state, robot.profile),
        "prompt": sample.prompt,
    }


def _state_by_key(state: Sequence[float], profile: RobotProfile) -> dict[str, Any]:
    if len(state) != profile.state_dim:
        names = ", ".join(profile.state_names)
        raise ObservationError(f"--state has {len(state)} values; {profile.name} expects {profile.state_dim}: {names}")
    values = iter(state)
    return {part.keys[0]: [next(values) for _ in part.names] for part in profile.state}


def _frames_section(
    given: Mapping[str, bytes | NDArray[np.uint8]], frames: Mapping[str, NDArray[np.uint8] | None], from_files: bool
) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for camera, resized in frames.items():
        if resized is None:
            rows.append((camera, "masked", None))
            continue
        frame = given[camera]
        height, width, _ = (decode_frame(frame, camera) if isinstance(frame, bytes) else frame).shape
        size = f"{width}x{height} to {resized.shape[1]}x{resized.shape[0]}"
        rows.append((camera, "file" if from_files else "test card", size))
    return Section("What the model sees: frames", rows, ("camera", "frame", "resized"))


def _state_section(prepared: Pi0Prepared, sample: Sample, config: Pi0Config, robot: RobotUnits | None) -> Section:
    state = prepared.state[: config.state_dim]
    bins = discretize(state) if config.state_in_prompt else [None] * len(state)
    names = robot.profile.state_names if robot else ()
    given = sample.state if sample.state is not None and robot is not None else ()
    rows = [
        (
            index,
            names[index] if index < len(names) else f"state_{index}",
            float(given[index]) if given else None,
            float(state[index]),
            bins[index],
        )
        for index in range(len(state))
    ]
    remarks = [note.text for note in prepared.notes if note.about]
    if sample.state is None:
        remarks.append("a neutral state, the middle of the training data; --state takes one of yours")
    columns = ("index", "name", "robot", "normalized", "in the prompt")
    return Section("What the model sees: state", rows, columns, remarks)


def _prompt_section(prepared: Pi0Prepared, sample: Sample, tokenizer: PromptTokenizer) -> Section:
    rows = [(place, token, tokenizer.vocabulary.piece(token)) for place, token in enumerate(prepared.tokens)]
    notes = [note.text for note in prepared.notes if not note.about and not note.text.startswith("cameras masked")]
    remarks = [f"{len(rows)} tokens, at most {tokenizer.max_tokens}, from {sample.prompt[:200]!r}", *notes]
    return Section("What the model sees: prompt", rows, ("place", "id", "piece"), remarks)
