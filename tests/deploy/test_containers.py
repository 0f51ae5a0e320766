"""The recipes for Docker and Kubernetes: well-formed, of one mind with each other, and with what the server takes.

No image is built here: there is no Docker engine in the project's checks.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_environment import DEPLOY, ROOT, TOOLS, needs_deploy_tools

from free_ports import free_port
from relay.cli.main import main
from relay.cli.serve import Serve
from relay.server.settings import ServerSettings

DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
COMPOSE = yaml.safe_load((DEPLOY / "docker/compose.yaml").read_text("utf-8"))
PROMETHEUS = yaml.safe_load((DEPLOY / "docker/prometheus.yml").read_text("utf-8"))
DEPLOYMENT, SERVICE, NETWORK_POLICY = yaml.safe_load_all((DEPLOY / "kubernetes/relay.yaml").read_text("utf-8"))
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]

DRAIN_S = ServerSettings().drain_seconds


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Name and text of each, with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text("utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines if line.strip())]


def the_only(dockerfile: Path, name: str) -> str:
    (text,) = [text for instruction, text in instructions(dockerfile) if instruction == name]
    return text


COMMANDS: dict[str, list[str]] = {
    **{dockerfile.stem: json.loads(the_only(dockerfile, "CMD")) for dockerfile in DOCKERFILES},
    "compose": COMPOSE["services"]["server"]["command"],
    "kubernetes": CONTAINER["args"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_relay_serve_takes_the_command_and_publishes_what_the_recipe_says(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    understood: list[Any] = []
    monkeypatch.setattr(Serve, "run", lambda options: understood.append(options) or 0)
    assert main(["serve", *command]) == 0
    (options,) = understood
    assert (options.listener.host, options.listener.port) == ("0.0.0.0", 8000)
    assert (options.listener.metrics_host, options.listener.metrics_port) == ("0.0.0.0", 9100)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_copies_only_what_is_there_and_not_ignored(dockerfile: Path) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")}
    for name, text in instructions(dockerfile):
        if name == "COPY":
            for source in text.split()[:-1]:
                assert (ROOT / source).exists()
                assert source in allowed


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_runs_as_a_user_without_rights_and_stops_by_draining(dockerfile: Path) -> None:
    assert the_only(dockerfile, "USER") == "10001"
    assert the_only(dockerfile, "STOPSIGNAL") == "SIGTERM"
    assert json.loads(the_only(dockerfile, "ENTRYPOINT")) == ["relay", "serve"]  # no shell, which would keep the signal
    assert the_only(dockerfile, "EXPOSE") == "8000 9100"
    assert "/healthz" in the_only(dockerfile, "HEALTHCHECK")


def test_the_images_have_the_projects_own_release_of_torch() -> None:
    torch = re.search(r"^TORCH \?= torch==(\S+)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert torch is not None
    for dockerfile in DOCKERFILES:
        assert ("ARG", f"TORCH_VERSION={torch[1]}") in instructions(dockerfile)


@needs_deploy_tools
@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_hadolint_finds_nothing_in_the_dockerfile(dockerfile: Path) -> None:
    finished = subprocess.run([str(TOOLS / "hadolint"), str(dockerfile)], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout


@needs_deploy_tools
def test_the_manifests_are_kubernetes_own_without_unknown_keys() -> None:
    command = [str(TOOLS / "kubernetes-validate"), "--strict", str(DEPLOY / "kubernetes/relay.yaml")]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@needs_deploy_tools
def test_the_manifests_stay_valid_with_the_peers_that_the_document_adds(tmp_path: Path) -> None:
    (peers,) = re.findall(
        r"```yaml\n(- namespaceSelector:.*?)```", (ROOT / "docs/deployment.md").read_text("utf-8"), re.S
    )
    policy = copy.deepcopy(NETWORK_POLICY)
    policy["spec"]["ingress"][0]["from"] += yaml.safe_load(peers)
    assert len(policy["spec"]["ingress"][0]["from"]) == 3
    manifest = tmp_path / "relay.yaml"
    manifest.write_text(yaml.safe_dump(policy))
    command = [str(TOOLS / "kubernetes-validate"), "--strict", str(manifest)]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode != 0,
    reason="docker compose is not installed",
)
def test_docker_compose_reads_its_file() -> None:
    command = ["docker", "compose", "-f", str(DEPLOY / "docker/compose.yaml"), "--profile", "gpu", "config", "--quiet"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_compose_builds_what_there_is_and_leaves_time_to_drain() -> None:
    for name in ("demo", "server"):
        service = COMPOSE["services"][name]
        context = (DEPLOY / "docker" / service["build"]["context"]).resolve()
        assert context == ROOT
        assert (context / service["build"]["dockerfile"]).is_file()
        assert float(service["stop_grace_period"].removesuffix("s")) > DRAIN_S
        assert service["deploy"]["resources"]["limits"]["memory"]


def test_every_port_is_published_to_its_own_machine_unless_an_address_is_given() -> None:
    published = {name: port for name, service in COMPOSE["services"].items() for port in service["ports"]}
    assert sorted(published) == ["demo", "prometheus", "server"]
    for port in published.values():
        assert re.match(r"127\.0\.0\.1:|\$\{ADDRESS:-127\.0\.0\.1\}:", port)


def test_only_servers_that_ask_for_keys_can_be_published_beyond_their_machine() -> None:
    published = {name: port for name, service in COMPOSE["services"].items() for port in service["ports"]}
    assert [name for name, port in published.items() if "ADDRESS" in port] == ["server"]
    assert "--insecure" in COMMANDS["demo"]
    for name in ("server", "compose", "kubernetes"):
        assert "--insecure" not in COMMANDS[name]


def test_prometheus_asks_every_server_at_the_port_of_its_numbers() -> None:
    (job,) = PROMETHEUS["scrape_configs"]
    (group,) = job["static_configs"]
    servers = [name for name, service in COMPOSE["services"].items() if "build" in service]
    assert sorted(group["targets"]) == sorted(f"{name}:9100" for name in servers)
    assert "./prometheus.yml:/etc/prometheus/prometheus.yml:ro" in COMPOSE["services"]["prometheus"]["volumes"]


def test_a_pod_has_time_for_its_pause_and_the_drain() -> None:
    pause = float(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["terminationGracePeriodSeconds"] >= pause + DRAIN_S + 5


def test_a_pod_gets_connections_by_its_health_and_is_restarted_for_a_dead_port_only() -> None:
    assert CONTAINER["readinessProbe"]["httpGet"]["path"] == "/healthz"
    assert CONTAINER["startupProbe"]["httpGet"]["path"] == "/healthz"
    assert "httpGet" not in CONTAINER["livenessProbe"]  # /healthz is 503 while the policy loads
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert ports == {"policy": 8000, "metrics": 9100}


def test_a_pod_has_a_gpu_limits_and_no_rights() -> None:
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert CONTAINER["resources"]["limits"]["memory"]
    assert POD["securityContext"]["runAsNonRoot"]
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    mounted = {mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert mounted == {volume["name"] for volume in POD["volumes"]}


def test_the_service_finds_the_pods() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"] == labels == DEPLOYMENT["spec"]["selector"]["matchLabels"]
    assert [port["targetPort"] for port in SERVICE["spec"]["ports"]] == ["policy"]


def test_the_policy_of_the_network_lets_clients_to_the_server_and_monitoring_to_the_numbers_and_nobody_else() -> None:
    policy = NETWORK_POLICY["spec"]
    assert policy["podSelector"] == DEPLOYMENT["spec"]["selector"]
    assert "Ingress" in policy["policyTypes"]
    allowed = {port["port"]: rule["from"] for rule in policy["ingress"] for port in rule["ports"]}
    assert all(rule["from"] and rule["ports"] for rule in policy["ingress"])  # without one it would hold for everybody
    assert allowed == {
        8000: [{"podSelector": {"matchLabels": {"relay-client": "true"}}}],
        9100: [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
    }
    assert sorted(allowed) == sorted(port["containerPort"] for port in CONTAINER["ports"])


def test_no_image_comes_without_a_version() -> None:
    images = [service["image"] for service in COMPOSE["services"].values() if "image" in service]
    images += [CONTAINER["image"], *(the_only(dockerfile, "FROM") for dockerfile in DOCKERFILES)]
    for image in images:
        assert ":" in image
        assert not image.endswith(":latest")


@pytest.mark.torch
def test_the_demos_command_answers_for_health_and_numbers() -> None:
    policy, numbers = free_port(), free_port()
    replaced = {"0.0.0.0": "127.0.0.1", "9100": str(numbers)}
    command = [replaced.get(word, word) for word in COMMANDS["demo"]]
    server = subprocess.Popen(
        [sys.executable, "-m", "relay.cli.main", "serve", *command, "--port", str(policy)], stderr=subprocess.DEVNULL
    )
    try:
        _wait_for(f"http://127.0.0.1:{policy}/healthz")
        assert b"relay_open_connections" in _wait_for(f"http://127.0.0.1:{numbers}/metrics")
    finally:
        server.terminate()
        assert server.wait(30) == 0


def _wait_for(url: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(OSError), opener.open(url, timeout=5) as answer:
            return answer.read()
        time.sleep(0.1)
    raise TimeoutError(url)
