"""`relay demo` against a scripted policy: what it prints, writes, and exits with."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from expert_policy import ExpertPolicy, IdlePolicy

import relay
from relay.cli.main import main

URL = "ws://127.0.0.1:1"


class Connected:
    """A scripted policy with the rest of `relay.Policy`'s interface."""

    def __init__(self, script: ExpertPolicy | IdlePolicy) -> None:
        self.script = script
        self.closed = False
        self.codec: relay.Codec | None = None

    def __call__(self, url: str, codec: relay.Codec) -> Connected:
        assert url == URL
        self.codec = codec
        return self

    def infer(self, observation: dict[str, Any]) -> Any:
        return self.script.infer(observation)

    @property
    def last(self) -> Any:
        return self.script.last

    def get_server_metadata(self) -> dict[str, Any]:
        return {"model": "demo", "action_dim": 4}

    def __enter__(self) -> Connected:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed = True


@pytest.fixture
def expert(monkeypatch: pytest.MonkeyPatch) -> Connected:
    policy = Connected(ExpertPolicy([(5, index) for index in range(20)]))
    monkeypatch.setattr(relay, "Policy", policy)
    return policy


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Connected:
    policy = Connected(IdlePolicy())
    monkeypatch.setattr(relay, "Policy", policy)
    monkeypatch.setattr("relay.demo.report.REPORTED_EPISODES", 0)  # drawing failures takes long
    return policy


def demo(output: Path, *arguments: str) -> int:
    return main(["demo", "--url", URL, "--seed", "5", "--output", str(output), *arguments])


def test_it_drives_reports_and_closes(expert: Connected, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(tmp_path, "--episodes", "2", "--check") == 0
    assert expert.closed
    assert expert.codec is relay.Codec.JPEG_Q90
    printed = capsys.readouterr().out
    assert "success     100.0%  (2 of 2)" in printed
    assert " 1/2  put the " in printed
    assert "model           demo" in printed
    numbers = json.loads((tmp_path / "results.json").read_text())
    assert numbers["options"]["codec"] == "JPEG_Q90"
    assert numbers["first_frame_s"] > 0
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "episode.gif").exists()


def test_only_the_first_episodes_are_drawn(expert: Connected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.demo.report.REPORTED_EPISODES", 1)
    assert demo(tmp_path, "--episodes", "4") == 0
    assert (tmp_path / "report.html").read_text().count("<article>") == 1
    assert len(json.loads((tmp_path / "results.json").read_text())["episodes"]) == 4


def test_check_fails_below_the_threshold(idle: Connected, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(tmp_path, "--episodes", "1", "--check") == 1
    assert "below the threshold of 97.0%" in capsys.readouterr().out


def test_without_check_a_failure_is_only_reported(idle: Connected, tmp_path: Path) -> None:
    assert demo(tmp_path, "--episodes", "1") == 0


def test_the_threshold_can_be_chosen(idle: Connected, tmp_path: Path) -> None:
    assert demo(tmp_path, "--episodes", "1", "--check", "--threshold", "0") == 0


def test_options_reach_the_policy(idle: Connected, tmp_path: Path) -> None:
    prompt = "put the blue cube on the purple plate"
    arguments = ("--episodes", "1", "--num-steps", "2", "--replan-every", "8", "--prompt", prompt)
    demo(tmp_path, *arguments, "--codec", "lossless", "--ablate", "cameras")
    asked = idle.script.asked
    assert len(asked) == 120 / 8
    assert {(seen["num_steps"], seen["prompt"]) for seen in asked} == {(2, prompt)}
    assert (asked[0]["image"]["base_0_rgb"] == 127).all()
    assert idle.codec is relay.Codec.LOSSLESS


@pytest.mark.parametrize(
    ("arguments", "adapter"),
    [
        ((), None),
        (("--robot", "cross"), "demo-cross"),
        (("--robot", "cross", "--adapter", "base"), "base"),
        (("--robot", "cross", "--adapter", "none"), None),
        (("--robot", "cross", "--adapter", "mine"), "mine"),
        (("--adapter", "demo-cross"), "demo-cross"),
    ],
)
def test_a_robot_asks_for_its_own_adapter_unless_told_otherwise(
    arguments: tuple[str, ...], adapter: str | None, idle: Connected, tmp_path: Path
) -> None:
    assert demo(tmp_path, "--episodes", "1", "--replan-every", "16", *arguments) == 0
    assert {seen.get("adapter_dir") for seen in idle.script.asked} == {adapter}
    options = json.loads((tmp_path / "results.json").read_text())["options"]
    assert options["adapter"] == adapter
    assert options["robot"] == ("cross" if "cross" in arguments else "front")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--robot", "corss"), "robot 'corss' is not known; the nearest is 'cross'"),
        (("--episodes", "0"), "--episodes must be at least 1, got 0"),
        (("--replan-every", "17"), "--replan-every must be between 1 and 16, got 17"),
        (("--codec", "JPEG_Q91"), "--codec 'JPEG_Q91' is not known; known are RAW, LOSSLESS, JPEG_Q100"),
        (("--threshold", "97"), "--threshold must be between 0 and 1, got 97"),
        (("--prompt", "put the red cube on a yellow plate"), "nearest is 'put the red cube on the yellow plate'"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(tmp_path / "none", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_policy_of_another_robot_is_an_error_not_a_traceback(
    idle: Connected, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    idle.script = IdlePolicy((50, 32))
    assert demo(tmp_path, "--episodes", "1") == 1
    assert "actions of shape (50, 32)" in capsys.readouterr().out


def test_an_interrupted_run_closes_the_connection(
    idle: Connected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(observation: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(idle.script, "infer", interrupt)
    assert demo(tmp_path) == 130
    assert idle.closed
