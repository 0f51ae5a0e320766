"""`relay serve`'s flags about who may come: what they set, and that a fault in them ends it at once with code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme

from relay.cli.local_server import LocalServer
from relay.cli.main import main
from relay.server import app
from relay.server.settings import ServerSettings

KEY = "0123456789abcdef"


@pytest.mark.torch
def test_without_flags_the_server_is_for_this_machine(settings_of: Any) -> None:
    settings = settings_of()
    assert (settings.host, settings.insecure, settings.tls, len(settings.api_keys)) == ("127.0.0.1", False, None, 0)
    assert (settings.allowed_origins, settings.allowed_hosts, settings.tracebacks) == ((), (), True)


@pytest.mark.torch
def test_flags_that_may_be_repeated_add_up(settings_of: Any) -> None:
    settings = settings_of(
        *("--allowed-origin", "https://a.example", "--allowed-origin", "http://b.example:3000"),
        *("--allowed-host", "robots.example", "--allowed-host", "[::1]"),
    )
    assert settings.allowed_origins == ("https://a.example", "http://b.example:3000")
    assert settings.allowed_hosts == ("robots.example", "[::1]")


@pytest.mark.torch
def test_keys_come_from_the_file_and_from_the_environment(
    settings_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text(KEY)
    monkeypatch.setenv("RELAY_API_KEYS", "fedcba9876543210")
    settings = settings_of("--api-keys-file", str(file))
    assert settings.api_keys.holds(KEY)
    assert settings.api_keys.holds("fedcba9876543210")


@pytest.mark.torch
def test_bounds_and_switches(settings_of: Any) -> None:
    settings = settings_of("--max-connections", "7", "--max-queue", "9", "--no-tracebacks", "--insecure")
    assert (settings.max_connections, settings.max_queue) == (7, 9)
    assert (settings.tracebacks, settings.insecure) == (False, True)


@pytest.mark.torch
def test_certificate_and_key_make_tls(settings_of: Any, tmp_path: Path) -> None:
    issued = trustme.CA().issue_cert("localhost")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.cert_chain_pems[0].write_to_path(str(cert))
    issued.private_key_pem.write_to_path(str(key))
    assert settings_of("--tls-cert", str(cert), "--tls-key", str(key)).tls is not None


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--api-keys-file", "nowhere"], "the API keys in 'nowhere' cannot be read"),
        (["--tls-cert", "cert.pem"], "TLS takes a certificate and its key: --tls-key is missing"),
        (["--tls-cert", "nowhere", "--tls-key", "nowhere"], "--tls-cert 'nowhere' cannot be read"),
        (["--allowed-origin", "dash.example"], "allowed_origin is 'dash.example'; expected scheme://host"),
        (["--allowed-host", "a:80"], "allowed_host is 'a:80'; expected a name or an address without a port"),
        (["--max-queue", "0"], "max_queue must be at least 1, got 0"),
        (["--max-connections", "0"], "max_connections must be at least 1, got 0"),
    ],
)
def test_a_fault_is_named_and_ends_it_with_2(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "demo", *flags]) == 2
    assert f"relay serve: {says}" in capsys.readouterr().err


@pytest.mark.torch
def test_beyond_this_machine_without_a_key_it_ends_with_2_and_names_both_remedies() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RELAY_API_KEYS"}
    ended = subprocess.run(
        [sys.executable, "-m", "relay.cli.main", "serve", "demo", "--host", "0.0.0.0", "--port", "0"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        "relay: on 0.0.0.0 every machine that reaches this port could drive the policy: give API keys "
        "(--api-keys-file FILE or RELAY_API_KEYS), or --insecure if the network itself keeps strangers out"
    )


def test_a_server_of_a_commands_own_asks_for_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAY_API_KEYS", KEY)
    server = LocalServer([])
    server.command = [sys.executable, "-c", "import os, sys; print('RELAY_API_KEYS' in os.environ, file=sys.stderr)"]
    with server:
        server._process.wait(20)
        server._reader.join(20)
        assert server.last_words == "False"


@pytest.mark.torch
def test_a_file_of_several_policies_may_hold_them_and_they_hold_for_each_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\nfedcba9876543210\n")
    file = tmp_path / "serve.yaml"
    file.write_text(
        "models: {a: {model: demo}, b: {model: demo}}\n"
        "api_keys_file: keys\nallowed_origin: [https://a.example, https://b.example]\nmax_queue: 9\n"
    )
    served: list[Any] = []
    monkeypatch.setattr(app, "serve", lambda offers, settings: served.extend([settings, *map(_own, offers.values())]))
    assert main(["serve", str(file)]) == 0
    assert len(served) == 3
    for settings in served:
        assert settings.several_tenants
        assert settings.allowed_origins == ("https://a.example", "https://b.example")
        assert settings.max_queue == 9


def _own(offer: Any) -> ServerSettings:
    return offer.settings
