"""Options that only some models take: every command refuses them by name for the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.cli.main import main

pytestmark = pytest.mark.torch

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("model", "flags", "text"),
    [
        (
            "pi05",
            ("--embodiment", "libero_sim"),
            "--embodiment is not an option of pi05; its own are --config, --robot",
        ),
        ("demo", ("--resize", "fast"), "--resize is not an option of demo"),
        ("groot", ("--config", "pi05_droid"), "--config is not an option of groot; its own are --embodiment, --resize"),
        ("groot", ("--robot", "droid"), "--robot is not an option of groot"),
        ("groot", ("--compile",), "--compile is not an option of groot"),
    ],
)
def test_serving_refuses_an_option_of_another_model(
    model: str, flags: tuple[str, ...], text: str, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["serve", model, "--checkpoint", str(tmp_path), *flags]) == 2
    assert text in capsys.readouterr().err


def test_a_serve_file_refuses_an_option_of_another_model(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "robots.yaml"
    file.write_text(f"models: {{arm: {{model: groot, checkpoint: {tmp_path}, robot: droid}}}}\n")
    assert main(["serve", str(file)]) == 2
    assert "--robot is not an option of groot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "flags", "text"),
    [
        ("pi0", ("--embodiment", "libero_sim"), "--embodiment is not an option of pi0"),
        ("groot", ("--robot", "droid"), "--robot is not an option of groot"),
    ],
)
def test_checking_refuses_an_option_of_another_model(
    model: str, flags: tuple[str, ...], text: str, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["check", str(tmp_path), "--model", model, *flags]) == 2
    assert text in capsys.readouterr().err
