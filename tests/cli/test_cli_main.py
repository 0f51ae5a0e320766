"""The command line itself: what is missing is said, and what is wrong is refused at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from relay.cli.main import main


@pytest.mark.parametrize("missing", ["tyro", "rich"])
def test_a_missing_extra_is_named(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == (
        f"relay: the command line needs {missing}; install it with: pip install 'relay-robotics[cli]'\n"
    )


def test_serving_without_torch_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["serve", "demo"]) == 2
    assert (
        "serving needs torch and safetensors; install with: pip install 'relay-robotics[server]'"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("command", "doing"),
    [(("check", "."), "checking"), (("parity", "--checkpoint", ".", "--reference", "r.npz"), "comparing")],
)
def test_checking_and_comparing_without_torch_name_the_extra(
    command: tuple[str, ...], doing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(command) == 2
    assert f"{doing} needs torch and safetensors; install with" in capsys.readouterr().err


def test_an_unknown_model_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "pi5"]) == 2
    assert "model 'pi5' is not known, did you mean 'pi05'?" in capsys.readouterr().err


def test_a_wrong_port_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "demo", "--port", "70000"]) == 2
    assert "port must be between 0 (any) and 65535, got 70000" in capsys.readouterr().err


def test_a_negative_idle_timeout_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "demo", "--idle-timeout", "-1"]) == 2
    assert "idle_timeout must not be negative, got -1.0" in capsys.readouterr().err


def test_a_bound_of_the_guidance_that_is_not_positive_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "demo", "--rtc-max-guidance-weight", "0"]) == 2
    assert "--rtc-max-guidance-weight must be a positive number, got 0.0" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "demo", "bench", "check", "parity"])
def test_help_loads_no_torch(command: str) -> None:
    script = (
        "import sys\n"
        "from relay.cli.main import main\n"
        "try:\n"
        f"    main(['{command}', '--help'])\n"
        "except SystemExit:\n"
        "    sys.exit(int('torch' in sys.modules))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
