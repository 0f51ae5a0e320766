"""`WALLE_URL` from the environment and from `.env` files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from websockets.exceptions import InvalidURI

from relay.client.settings import policy_url

ENDPOINT = "/v1/realtime/robot/openpi"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory two levels down, and no `WALLE_URL` in the environment."""
    monkeypatch.delenv("WALLE_URL", raising=False)
    directory = tmp_path / "robot" / "arm"
    directory.mkdir(parents=True)
    monkeypatch.chdir(directory)
    return directory


# ---- the address


@pytest.mark.parametrize(
    ("value", "url"),
    [
        ("ws://gpu-box:8000", f"ws://gpu-box:8000{ENDPOINT}"),
        ("ws://gpu-box:8000/", f"ws://gpu-box:8000{ENDPOINT}"),
        ("wss://robots.example/{model}", f"wss://robots.example/pi05{ENDPOINT}"),
        ("wss://team--{model}.robots.example", f"wss://team--pi05.robots.example{ENDPOINT}"),
        ("wss://{model}.robots.example/{model}/", f"wss://pi05.robots.example/pi05{ENDPOINT}"),
        (f"wss://robots.example/{{model}}{ENDPOINT}", f"wss://robots.example/pi05{ENDPOINT}"),
        (f"wss://robots.example{ENDPOINT}/", f"wss://robots.example{ENDPOINT}"),
        ("wss://robots.example/{model}?region=us", f"wss://robots.example/pi05{ENDPOINT}?region=us"),
        ("  ws://gpu-box:8000\n", f"ws://gpu-box:8000{ENDPOINT}"),
    ],
)
def test_the_model_is_filled_in_and_the_endpoint_appended(
    monkeypatch: pytest.MonkeyPatch, value: str, url: str
) -> None:
    monkeypatch.setenv("WALLE_URL", value)
    assert policy_url("pi05") == url


def test_a_model_id_cannot_change_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WALLE_URL", "wss://robots.example/{model}")
    assert policy_url("../pi05?x#y") == f"wss://robots.example/..%2Fpi05%3Fx%23y{ENDPOINT}"


@pytest.mark.parametrize("model", ["", None, 5])
def test_a_model_that_is_no_id_is_refused(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setenv("WALLE_URL", "wss://robots.example/{model}")
    with pytest.raises(ValueError, match="model must be a model id such as 'pi05'"):
        policy_url(model)


@pytest.mark.parametrize("value", ["wss://robots.example/{Model}", "wss://robots.example/{}", "wss://{model.example"])
def test_braces_that_are_not_filled_in_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("WALLE_URL", value)
    with pytest.raises(InvalidURI, match=r"may hold \{model\} and no other braces"):
        policy_url("pi05")


def test_what_is_no_url_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WALLE_URL", "ws://[gpu-box:8000")
    with pytest.raises(InvalidURI):
        policy_url("pi05")


# ---- where it is looked for


def test_the_working_directory_has_a_dotenv_file(project: Path) -> None:
    (project / ".env").write_text("OTHER=1\nWALLE_URL=ws://here:1/{model}  # the lab\n")
    assert policy_url("pi0") == f"ws://here:1/pi0{ENDPOINT}"


def test_a_directory_above_has_a_dotenv_file(project: Path) -> None:
    (project.parent.parent / ".env").write_text('export WALLE_URL="ws://above:1"\n')
    assert policy_url("pi0") == f"ws://above:1{ENDPOINT}"


def test_the_nearest_dotenv_file_that_sets_it_wins(project: Path) -> None:
    (project / ".env").write_text("OTHER=1\n")
    (project.parent / ".env").write_text("WALLE_URL=ws://near:1\n")
    (project.parent.parent / ".env").write_text("WALLE_URL=ws://far:1\n")
    assert policy_url("pi0") == f"ws://near:1{ENDPOINT}"


def test_the_environment_wins_over_files(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / ".env").write_text("WALLE_URL=ws://file:1\n")
    monkeypatch.setenv("WALLE_URL", "ws://environment:1")
    assert policy_url("pi0") == f"ws://environment:1{ENDPOINT}"


def test_an_empty_value_counts_as_not_set(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / ".env").write_text("WALLE_URL=\n")
    (project.parent / ".env").write_text("WALLE_URL=ws://above:1\n")
    monkeypatch.setenv("WALLE_URL", "")
    assert policy_url("pi0") == f"ws://above:1{ENDPOINT}"


def test_a_byte_order_mark_does_no_harm(project: Path) -> None:
    (project / ".env").write_bytes(b"\xef\xbb\xbfWALLE_URL=ws://here:1\r\n")
    assert policy_url("pi0") == f"ws://here:1{ENDPOINT}"


def test_a_file_in_another_encoding_is_named(project: Path) -> None:
    (project / ".env").write_bytes("WALLE_URL=ws://here:1".encode("utf-16"))
    with pytest.raises(ValueError, match=r"arm.\.env is not UTF-8 text"):
        policy_url("pi0")


def test_absent_everywhere_it_says_where_it_was_looked_for(project: Path) -> None:
    (project.parent / ".env").write_text("WALLE_URI=ws://here:1\n")
    with pytest.raises(KeyError) as error:
        policy_url("pi0")
    (text,) = error.value.args
    assert text.startswith(f"WALLE_URL is not set: looked in the environment and for a .env file in {project}")
    assert str(project.parent / ".env") in text
    assert text.endswith("for example WALLE_URL=wss://gpu-box.example:8000/{model}")


# ---- what it leaves alone


def test_the_environment_is_left_as_it_is(project: Path) -> None:
    (project / ".env").write_text("WALLE_URL=ws://here:1\nOTHER_OF_RELAY=1\n")
    before = dict(os.environ)
    policy_url("pi0")
    assert dict(os.environ) == before


def test_importing_relay_reads_no_file(project: Path) -> None:
    (project / ".env").write_bytes(b"\xff\xfe")  # would be an error
    code = "import os, sys, relay; print('dotenv' in sys.modules, 'WALLE_URL' in os.environ)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False False"
