"""docs/dreamzero.md: its loop runs against a real server, its tables and handshake are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dreamzero_folders import write_checkpoint
from numpy.typing import NDArray
from threaded_server import serving

import relay
from relay.models import registry
from relay.models.dreamzero.frames import COUNTS
from relay.models.dreamzero.observation import camera_keys
from relay.models.dreamzero.schedule import COMPUTED

pytestmark = pytest.mark.dreamzero

PAGE = (Path(__file__).parents[2] / "docs" / "dreamzero.md").read_text("utf-8")
LOOP, HANDSHAKE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CAMERAS = ("exterior_image_0_left", "exterior_image_1_left", "wrist_image_left")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_checkpoint(tmp_path_factory.mktemp("dreamzero"))
    return registry.load("dreamzero", checkpoint=folder, device="cpu", num_steps=5)


def test_the_loop_runs_as_it_stands(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[NDArray[np.float32]] = []
    sent: list[int] = []
    whole = engine.prepare
    monkeypatch.setattr(
        engine, "prepare", lambda asked, options: sent.append(len(asked[KEYS[0]])) or whole(asked, options)
    )
    space: dict[str, Any] = {
        "look": lambda: {camera: np.full((180, 320, 3), len(moved), np.uint8) for camera in CAMERAS},
        "done": lambda: len(moved) >= 72,
        "joints": lambda: np.zeros(7),
        "gripper": lambda: np.zeros(1),
        "move": moved.append,
    }
    with serving(engine) as url:
        opened = relay.Policy
        monkeypatch.setattr(relay, "Policy", lambda address: opened(url))
        exec(LOOP, space)
        space["policy"].close()
    assert len(moved) == 72
    assert sent[-3:] == [1, 4, 4]  # before them the warm-up's
    assert space["chunk"].shape == (24, 8)


KEYS = [f"observation/{camera}" for camera in CAMERAS]


def test_the_handshake_is_as_printed(engine: Any) -> None:
    printed = ast.literal_eval(HANDSHAKE)
    assert dict(engine.spec.metadata) == dict(engine.spec.handshake) == printed


def test_the_table_of_cameras_has_the_keys_of_both_numberings(engine: Any) -> None:
    rows = re.findall(r"^\| (?:left exterior|right exterior|wrist) \| `(.*)` \| `(.*)` \|$", PAGE, re.MULTILINE)
    for column, camera_set in enumerate(("roboarena", "droid")):
        assert [row[column] for row in rows] == list(camera_keys(engine._recipe, camera_set).values())


def test_the_numbers_of_steps_and_frames_are_those_of_the_code() -> None:
    assert f"{', '.join(map(str, list(COMPUTED)[:-1]))} or {list(COMPUTED)[-1]}" in PAGE
    assert COUNTS == (1, 2, 3, 4, 8, 9)
