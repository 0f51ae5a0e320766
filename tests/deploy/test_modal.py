"""The recipe for Modal, as Modal's own package builds it. It has not been run there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from deploy_environment import DEPLOY, TOOLS, needs_deploy_tools

from relay.cli.main import main
from relay.cli.serve import Serve, _settings
from relay.server.settings import ServerSettings

pytestmark = needs_deploy_tools

TUNNEL = "wss://abc.r5.modal.host:443"


@pytest.fixture(scope="module")
def inspected() -> dict[str, Any]:
    """What `modal_inspection.py` saw."""
    command = [
        str(TOOLS / "python"),
        str(Path(__file__).with_name("modal_inspection.py")),
        str(DEPLOY / "modal/app.py"),
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.fixture
def settings(inspected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> ServerSettings:
    """What the server makes of its command line in the container."""
    monkeypatch.setenv("RELAY_API_KEYS", "robot-7-0123456789")
    understood: list[Serve] = []
    monkeypatch.setattr(Serve, "run", lambda options: understood.append(options) or 0)
    assert main(inspected["commands"][0][1:]) == 0
    return _settings(understood[0].listener)


def test_modal_takes_the_class_for_a_server_behind_its_own_check(inspected: dict[str, Any]) -> None:
    assert (inspected["app"], inspected["server"]) == ("relay", "Server")
    assert not inspected["options"].get("unauthenticated")
    assert inspected["secrets"] == 1


def test_the_container_has_time_to_load_and_to_drain(inspected: dict[str, Any]) -> None:
    assert inspected["options"]["startup_timeout"] >= 300
    assert inspected["options"]["exit_grace_period"] > ServerSettings().drain_seconds
    assert inspected["options"]["min_containers"] == 1


def test_the_proxys_port_is_the_servers_and_asks_for_a_key(inspected: dict[str, Any], settings: ServerSettings) -> None:
    assert settings.port == inspected["options"]["port"]
    assert settings.host == "0.0.0.0"  # Modal finds no server on loopback
    assert len(settings.api_keys) == 1
    assert not settings.insecure


def test_the_tunnel_leads_to_a_port_that_opens_to_tickets_only(
    inspected: dict[str, Any], settings: ServerSettings
) -> None:
    assert inspected["forwarded"][0] == {"port": settings.direct_port}
    assert settings.direct_port != settings.port
    assert settings.direct_url == TUNNEL


def test_numbers_for_prometheus_are_off(settings: ServerSettings) -> None:
    assert settings.metrics_port == 0


def test_a_server_that_ends_is_started_again_and_the_tunnel_is_closed_at_the_end(inspected: dict[str, Any]) -> None:
    assert len(inspected["commands"]) == 2
    assert inspected["commands"][0] == inspected["commands"][1]
    assert inspected["forwarded"][-1] == "closed"
