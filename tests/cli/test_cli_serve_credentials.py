"""`relay serve` reads the files of its keys and certificates again: which, and that SIGHUP makes it do so."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import trustme
from websockets.exceptions import InvalidStatus

import relay
from relay.cli.local_server import LocalServer
from relay.server.tls import certificate_sha256

ALICE, BOB = "alice-0123456789", "bob-0123456789ab"


def write_keys(file: Path, *keys: str) -> None:
    file.write_text("\n".join(keys))
    file.chmod(0o600)


def issue(cert: Path, key: Path) -> None:
    issued = trustme.CA().issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(str(cert))
    issued.private_key_pem.write_to_path(str(key))


@pytest.mark.torch
def test_every_file_is_read_again(settings_of: Any, tmp_path: Path) -> None:
    keys, cert, key, direct_cert, direct_key = (tmp_path / name for name in ("keys", "c", "k", "dc", "dk"))
    write_keys(keys, ALICE)
    issue(cert, key)
    issue(direct_cert, direct_key)
    settings = settings_of(
        *("--api-keys-file", str(keys), "--tls-cert", str(cert), "--tls-key", str(key)),
        *("--direct-url", "wss://gpu-box.example:8443", "--direct-port", "8443", "--direct-fingerprint"),
        *("--direct-tls-cert", str(direct_cert), "--direct-tls-key", str(direct_key)),
    )
    write_keys(keys, BOB)
    issue(direct_cert, direct_key)
    fresh = settings.reread()
    assert (fresh.api_keys.holds(ALICE), fresh.api_keys.holds(BOB)) == (False, True)
    assert fresh.direct_cert_sha256 == certificate_sha256(direct_cert) != settings.direct_cert_sha256
    assert fresh.tls is not settings.tls
    assert fresh.direct_tls is not settings.direct_tls
    for file, option in ((key, "--tls-key"), (direct_key, "--direct-tls-key")):
        file.rename(f"{file}.gone")
        with pytest.raises(ValueError, match=f"^{option} '.*' cannot be read"):
            settings.reread()
        Path(f"{file}.gone").rename(file)


@pytest.mark.torch
def test_without_files_there_is_nothing_to_read_again(settings_of: Any) -> None:
    assert settings_of().reread is None


@pytest.mark.torch
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_sighup_lets_a_new_key_in_and_keeps_who_is_connected(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    write_keys(keys, ALICE)
    with LocalServer(["demo", "--api-keys-file", str(keys)]) as server:
        server.wait_until_ready(lambda phase: None)
        with relay.Policy(server.url, headers={"Authorization": f"Api-Key {ALICE}"}) as policy:
            write_keys(keys, BOB)
            server._process.send_signal(signal.SIGHUP)
            give_up = time.monotonic() + 30
            while not lets_in(server, BOB) and time.monotonic() < give_up:
                time.sleep(0.05)
            assert lets_in(server, BOB)
            assert not lets_in(server, ALICE)
            with pytest.raises(RuntimeError, match="is missing"):  # an answer, of the policy's
                policy.infer({})


def lets_in(server: LocalServer, key: str) -> bool:
    try:
        relay.Policy(server.url, headers={"Authorization": f"Api-Key {key}"}).close()
    except InvalidStatus:
        return False
    return True
