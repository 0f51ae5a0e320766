"""Training samples: what the robot sees while it tries and errs, and what the expert would do from there.

Generated while training and never stored. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from relay.demo.drawing import CAMERAS, IMAGE_SIZE, object_pixels, render_all
from relay.demo.expert import expert_command
from relay.demo.robot import ACTION_HORIZON, commands_to_chunk, robot_state, state_to_model, task_prompt
from relay.demo.tabletop import CUBES, LOWEST_TOOL_M, PLATES, ROBOTS, Command, Tabletop, joints_for, tool_position

PATCH = 28
GRID = IMAGE_SIZE // PATCH  # patches along a side
OUT_OF_VIEW = -100  # what torch's cross entropy ignores

KEPT_SHARE = 0.4  # neighbouring states are nearly alike
LONGEST_EPISODE = 110
STEPS_AFTER_SUCCESS = 6
START_CLOSED_PROBABILITY = 0.15
DISTURBANCE_PROBABILITY = 0.12  # per step
DISTURBANCE_M = 0.022  # standard deviation per axis
LONGEST_DISTURBANCE = 3
GRIPPER_FLIP_PROBABILITY = 0.15  # per disturbed step
JPEG_PROBABILITY = 1 / 3
JPEG_QUALITY = (50, 100)
JPEG_FULL_COLOUR_QUALITY = 90  # 4:4:4 from here on, 4:2:0 below, as the client encodes


@dataclass(frozen=True, slots=True)
class Sample:
    """One observation with everything there is to learn from it.

    Attributes:
        frames: uint8 (2, 224, 224, 3), in the order of `drawing.CAMERAS`.
        prompt: the task in words.
        state: model units, float32 (4,).
        actions: model units, float32 (16, 4): the chunk that the undisturbed expert would execute from here.
        cells: int64 (2, 5), per camera and object of `drawing.OBJECTS`: the patch its centre is in, row by row on
            an 8x8 grid; -100 when out of view.
        offsets: float32 (2, 5, 2), x and y of that centre from the middle of its patch, in patches; 0 when out of
            view.
        plate, cube: which of the objects the prompt names.
    """

    frames: NDArray[np.uint8]
    prompt: str
    state: NDArray[np.float32]
    actions: NDArray[np.float32]
    cells: NDArray[np.int64]
    offsets: NDArray[np.float32]
    plate: int
    cube: int


def sample_stream(rng: np.random.Generator, robot: str = ROBOTS[0]) -> Iterator[Sample]:
    """Endless samples from episodes of one of the robots, in which the expert is disturbed now and then."""
    table = Tabletop(rng, robot)
    while True:
        table.reset()
        if rng.random() < START_CLOSED_PROBABILITY:
            table.opening = float(rng.choice([0.0, 0.5]))
        disturbed_for, displacement = 0, np.zeros(3)
        successes = 0
        for _ in range(LONGEST_EPISODE):
            if rng.random() < KEPT_SHARE:
                yield _sample(table, rng)
            if disturbed_for == 0 and rng.random() < DISTURBANCE_PROBABILITY:
                disturbed_for = int(rng.integers(1, LONGEST_DISTURBANCE + 1))
                displacement = rng.normal(0, DISTURBANCE_M, 3)
            command = expert_command(table)
            if disturbed_for > 0:
                disturbed_for -= 1
                command = _disturb(command, displacement, flip_gripper=rng.random() < GRIPPER_FLIP_PROBABILITY)
            table.step(command)
            successes += table.succeeded
            if successes > STEPS_AFTER_SUCCESS:
                break


def expert_chunk(table: Tabletop, horizon: int = ACTION_HORIZON) -> NDArray[np.float32]:
    """What the expert would do from this state if nothing disturbed it, model units (horizon, 4)."""
    future = table.copy()
    commands: list[Command] = []
    for _ in range(horizon):
        commands.append(expert_command(future))
        future.step(commands[-1])
    return commands_to_chunk(commands, table.tool)


def _sample(table: Tabletop, rng: np.random.Generator) -> Sample:
    frames = render_all(table)
    if rng.random() < JPEG_PROBABILITY:
        quality = int(rng.integers(JPEG_QUALITY[0], JPEG_QUALITY[1] + 1))
        frames = np.stack([_through_jpeg(frame, quality) for frame in frames])
    cells, offsets = _where_objects_are(table)
    return Sample(
        frames=frames,
        prompt=task_prompt(table.cube, table.plate),
        state=state_to_model(robot_state(table)),
        actions=expert_chunk(table),
        cells=cells,
        offsets=offsets,
        plate=PLATES.index(table.plate),
        cube=len(PLATES) + CUBES.index(table.cube),
    )


def _where_objects_are(table: Tabletop) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    pixels = np.stack([object_pixels(table, camera) for camera in CAMERAS])  # (cameras, objects, xy)
    in_view = np.all((pixels >= 0) & (pixels < IMAGE_SIZE), axis=-1)
    patch = np.floor(pixels / PATCH).astype(np.int64)
    cells = np.where(in_view, patch[..., 1] * GRID + patch[..., 0], OUT_OF_VIEW)
    offsets = np.where(np.expand_dims(in_view, -1), pixels / PATCH - patch - 0.5, 0.0)
    return cells, offsets.astype(np.float32)


def _disturb(command: Command, displacement: NDArray[np.float64], flip_gripper: bool) -> Command:
    x, y, z = np.array(tool_position(command[:3])) + displacement
    opening = 1.0 - command[3] if flip_gripper else command[3]
    return (*joints_for((x, y, max(LOWEST_TOOL_M, z))), opening)


def _through_jpeg(frame: NDArray[np.uint8], quality: int) -> NDArray[np.uint8]:
    """The frame as it arrives after JPEG, with the client's choice of colour sampling."""
    encoded = BytesIO()
    subsampling = 0 if quality >= JPEG_FULL_COLOUR_QUALITY else 2
    Image.fromarray(frame).save(encoded, "JPEG", quality=quality, subsampling=subsampling)
    return np.asarray(Image.open(encoded))
