"""docs/groot.md: its loop runs against a real server, its files are read, its tables are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from groot_folders import DROID, LIBERO, write_isaac
from numpy.typing import NDArray
from threaded_server import serving

import relay
from relay.cli.serve_file import read_serve_file
from relay.models import registry
from relay.models.groot.settings import KEYS

PAGE = (Path(__file__).parents[2] / "docs" / "groot.md").read_text("utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


def keys_of(path: str) -> set[str]:
    """The keys that the table of handshakes lists for a path."""
    section = PAGE.partition("## Handshakes")[2]
    (row,) = re.findall(rf"^\| {path} \| (.*) \|$", section, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", row)))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_isaac(tmp_path_factory.mktemp("groot"), tags=[DROID, LIBERO])
    return registry.load("groot", checkpoint=folder, embodiment=DROID, device="cpu", max_batch=1)


@pytest.mark.vocab
def test_the_loop_runs_as_it_stands(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def frames(camera: str, steps: list[int]) -> NDArray[np.uint8]:
        return np.zeros((len(steps), 180, 320, 3), np.uint8)

    def read(key: str) -> NDArray[np.float64]:
        return {"eef_9d": np.eye(4)[:3].ravel()[[3, 7, 11, 0, 1, 2, 4, 5, 6]]}.get(key, np.zeros(7))[: _WIDTHS[key]]

    with serving(engine) as url:
        opened = relay.Policy
        monkeypatch.setattr(relay, "Policy", lambda address: opened(url))
        space: dict[str, Any] = {"frames": frames, "read": read}
        exec(block("python"), space)
        space["policy"].close()
    assert space["chunk"].shape == (40, 7)
    assert space["chunk"].dtype == np.float32


_WIDTHS = {"eef_9d": 9, "gripper_position": 1, "joint_position": 7}


def test_the_serve_file_is_one(tmp_path: Path) -> None:
    file = tmp_path / "robots.yaml"
    file.write_text(block("yaml"))
    told = read_serve_file(file).policies
    assert [options.embodiment for _, options in told.values()] == [DROID, "xdof_relative_eef_relative_joint"]
    assert {model for model, _ in told.values()} == {"groot"}


@pytest.mark.vocab
def test_the_handshakes_have_the_keys_of_the_table(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(engine) as url, relay.Policy(url) as policy:
        monkeypatch.setenv("WALLE_URL", url)
        with relay.PolicyClient("groot") as client:
            vllm = client.get_server_metadata().keys() - {"instance_id", "max_payload_bytes"}
        openpi = policy.get_server_metadata().keys()
    assert keys_of("vLLM-Omni's") == vllm
    assert keys_of("OpenPI's") - {"default_prompt"} == openpi - vllm


def test_every_key_of_relay_json_is_named() -> None:
    (sentence,) = re.findall(r"whose keys are (.*?)\n\n", PAGE, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", sentence)) == KEYS.keys()
