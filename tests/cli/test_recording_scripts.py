"""The scripts that record a reference: what they write is what `relay parity` reads."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relay.cli.reference_file import read_reference
from relay.engine.frames import resize_with_pad

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ("record_openpi.py", "record_lerobot.py")


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_imports_nothing_of_relay_and_only_numpy_when_it_is_read(name: str) -> None:
    tree = ast.parse((EXAMPLES / name).read_text("utf-8"))
    everywhere = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in everywhere for alias in node.names} | {
        node.module for node in everywhere if isinstance(node, ast.ImportFrom)
    }
    assert not any(str(imported).startswith("relay") for imported in names)
    at_once = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert at_once <= {"argparse", "dataclasses", "json", "numpy"}


def test_an_openpi_recording_is_read_back(tmp_path: Path) -> None:
    openpi = script("record_openpi.py")
    rng = np.random.default_rng(0)
    noise, actions = rng.standard_normal((2, 50, 32)), rng.standard_normal((2, 50, 14))
    frames = rng.integers(256, size=(2, 3, 224, 224), dtype=np.uint8)
    observations = [{"state": np.ones(14), "images": {"cam_high": frames[i]}, "prompt": f"task {i}"} for i in range(2)]
    metadata = {"source": "openpi", "versions": {"jax": "0.5.3"}, "dtype": "float32", "units": "robot"}
    openpi["write"](tmp_path / "r.npz", observations, noise, 10, list(actions), metadata)
    reference = read_reference(tmp_path / "r.npz")
    assert (reference.source, reference.units) == ("openpi", "robot")
    for index, sample in enumerate(reference.samples):
        assert sample.observation["prompt"] == f"task {index}"
        assert np.array_equal(sample.observation["images"]["cam_high"], frames[index])
        assert np.array_equal(sample.noise, noise[index].astype(np.float32))
        assert np.array_equal(sample.actions, actions[index])
        assert sample.num_steps == 10


def test_an_openpi_recording_gives_its_own_observations_back(tmp_path: Path) -> None:
    openpi = script("record_openpi.py")
    state, frame = np.arange(14.0), np.zeros((3, 4, 4), np.uint8)
    np.savez(tmp_path / "o.npz", **{"state": state[None], "images/cam_high": frame[None], "prompt": np.array(["go"])})
    (observation,) = openpi["read_observations"](tmp_path / "o.npz")
    assert observation["prompt"] == "go"
    assert type(observation["prompt"]) is str
    assert np.array_equal(observation["images"]["cam_high"], frame)


def test_a_lerobot_recording_is_read_back(tmp_path: Path) -> None:
    lerobot = script("record_lerobot.py")
    rng = np.random.default_rng(0)
    observations = [lerobot["random_observation"](rng, ["observation.images.front"], (224, 224), 6) for _ in range(3)]
    noise, actions = rng.standard_normal((3, 10, 32)), rng.standard_normal((3, 10, 6))
    metadata = {"source": "lerobot", "versions": {}, "dtype": "float32", "units": "robot"}
    lerobot["write"](tmp_path / "r.npz", observations, noise, 10, list(actions), metadata)
    reference = read_reference(tmp_path / "r.npz")
    assert len(reference.samples) == 3
    read = reference.samples[2].observation
    assert read["prompt"] == "pick up the fork"
    assert np.array_equal(read["observation.images.front"], observations[2]["observation.images.front"])
    assert np.array_equal(read["observation.state"], observations[2]["observation.state"])


@pytest.mark.parametrize("shape", [(480, 640), (720, 1280), (224, 224), (101, 37)])
def test_lerobots_frames_are_resized_as_relay_does(shape: tuple[int, int]) -> None:
    frame = np.random.default_rng(0).integers(256, size=(*shape, 3), dtype=np.uint8)
    fitted = script("record_lerobot.py")["fitted"]({"observation.images.front": frame, "prompt": "go"}, (224, 224))
    assert np.array_equal(fitted["observation.images.front"], resize_with_pad(frame, 224, 224))
