"""API keys and certificates that are read again while a server runs: what changes, for whom, and what a fault does."""

from __future__ import annotations

import hashlib
import logging
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from fake_policy import NO_PROXY, ask, observation, running
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from relay.protocol.msgpack_numpy import unpack
from relay.server.api_keys import ApiKeys
from relay.server.app import Server
from relay.server.credentials import CredentialFiles, Credentials
from relay.server.tls import certificate_sha256

ALICE, BOB, CAROL = "alice-0123456789", "bob-0123456789ab", "carol-0123456789"
URL = "wss://gpu-box.example:8443"
VLLM = "/v1/realtime/robot/openpi"


class Folder:
    """Files of credentials, which may be replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.authority = trustme.CA()
        self.keys, self.cert, self.key = path / "keys.txt", path / "cert.pem", path / "key.pem"
        self.direct_cert, self.direct_key = path / "direct_cert.pem", path / "direct_key.pem"

    def write_keys(self, *keys: str) -> None:
        self.keys.write_text("\n".join(keys))
        self.keys.chmod(0o600)

    def issue(self, cert: Path, key: Path) -> str:
        """A new certificate and its key in these files; returns its digest."""
        issued = self.authority.issue_cert("localhost", "127.0.0.1")
        issued.cert_chain_pems[0].write_to_path(str(cert))
        issued.private_key_pem.write_to_path(str(key))
        return certificate_sha256(cert)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.delenv("RELAY_API_KEYS", raising=False)
    return Folder(tmp_path)


@asynccontextmanager
async def serving(files: CredentialFiles, **settings: Any) -> AsyncIterator[Server]:
    now = files.read()
    credentials = {name: getattr(now, name) for name in ("api_keys", "tls", "direct_tls", "direct_cert_sha256")}
    async with running(reread=files.read, **credentials, **settings) as server:
        yield server


def with_key(key: str) -> dict[str, Any]:
    return {"additional_headers": {"Authorization": f"Api-Key {key}"}}


def dial(server: Server, path: str = "/", port: int | None = None, *, tls: bool = False, **options: Any) -> connect:
    if tls:
        options["ssl"] = context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the tests compare digests themselves
    scheme = "wss" if tls else "ws"
    return connect(f"{scheme}://127.0.0.1:{port or server.port}{path}", **NO_PROXY, **options)


async def lets_in(server: Server, key: str) -> bool:
    try:
        async with dial(server, **with_key(key)):
            return True
    except InvalidStatus:
        return False


async def answers(websocket: ClientConnection) -> bool:
    return "actions" in await ask(websocket, observation())


async def shown_by(server: Server, port: int | None = None, **options: Any) -> str:
    """The digest of the certificate that newcomers meet."""
    async with dial(server, port=port, tls=True, **options) as websocket:
        secured: ssl.SSLObject = websocket.transport.get_extra_info("ssl_object")
        return hashlib.sha256(secured.getpeercert(binary_form=True) or b"").hexdigest()


async def test_keys_that_are_read_again_hold_for_newcomers(folder: Folder) -> None:
    folder.write_keys(ALICE)
    async with serving(CredentialFiles(folder.keys)) as server:
        folder.write_keys(BOB)
        assert (await lets_in(server, ALICE), await lets_in(server, BOB)) == (True, False)
        await server.reread_credentials()
        assert (await lets_in(server, ALICE), await lets_in(server, BOB)) == (False, True)


async def test_whoever_came_with_a_key_that_is_gone_stays_connected(folder: Folder) -> None:
    folder.write_keys(ALICE)
    async with serving(CredentialFiles(folder.keys)) as server, dial(server, **with_key(ALICE)) as websocket:
        await websocket.recv()
        folder.write_keys(BOB)
        await server.reread_credentials()
        assert await answers(websocket)


async def test_newcomers_meet_the_new_certificate_and_open_connections_stay(folder: Folder) -> None:
    before = folder.issue(folder.cert, folder.key)
    async with serving(CredentialFiles(None, folder.cert, folder.key)) as server, dial(server, tls=True) as websocket:
        await websocket.recv()
        assert await shown_by(server) == before
        after = folder.issue(folder.cert, folder.key)
        await server.reread_credentials()
        assert await shown_by(server) == after != before
        assert await answers(websocket)


def damage(folder: Folder, what: str) -> None:
    match what:
        case "no certificate":
            folder.cert.unlink()
        case "another key":
            folder.issue(folder.path / "other.pem", folder.key)
        case "nothing in the keys' file":
            folder.write_keys("# none")
        case "half a key":
            folder.write_keys(BOB, CAROL[:5])


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("no certificate", "--tls-cert '.*cert.pem' cannot be read"),
        ("another key", "--tls-key '.*' is not the key of --tls-cert '.*'"),
        ("nothing in the keys' file", "'.*keys.txt' holds no API key"),
        ("half a key", "'.*keys.txt', line 2: the API key has 5 characters"),
    ],
)
async def test_if_one_file_is_wrong_all_stays_as_it_was_and_the_log_says_why(
    folder: Folder, what: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = folder.issue(folder.cert, folder.key)
    folder.write_keys(ALICE)
    async with serving(CredentialFiles(folder.keys, folder.cert, folder.key)) as server:
        folder.write_keys(BOB)
        folder.issue(folder.cert, folder.key)
        damage(folder, what)
        await server.reread_credentials()
        assert await shown_by(server, **with_key(ALICE)) == before
        with pytest.raises(InvalidStatus):
            await shown_by(server, **with_key(BOB))
    (error,) = [record for record in caplog.records if record.name == "relay.server.credentials"]
    assert error.levelno == logging.ERROR
    assert error.getMessage().startswith("API keys and certificates stay as they were: ")
    assert error.exc_info is None
    assert re.search(says, error.getMessage())


async def test_after_a_fault_the_next_reading_counts(folder: Folder) -> None:
    folder.write_keys(ALICE)
    async with serving(CredentialFiles(folder.keys)) as server:
        folder.write_keys("short")
        await server.reread_credentials()
        folder.write_keys(BOB)
        await server.reread_credentials()
        assert await lets_in(server, BOB)


@pytest.mark.parametrize("left", [ApiKeys(), None], ids=["no keys", "an error"])
async def test_a_reading_of_ones_own_cannot_open_the_server_to_everybody(
    left: ApiKeys | None, caplog: pytest.LogCaptureFixture
) -> None:
    def reread() -> Credentials:
        if left is None:
            raise RuntimeError("the vault is shut")
        return Credentials(left)

    keys = ApiKeys(frozenset({hashlib.sha256(ALICE.encode()).digest()}))
    async with running(api_keys=keys, reread=reread) as server:
        await server.reread_credentials()
        assert (await lets_in(server, ALICE), await lets_in(server, BOB)) == (True, False)
    (error,) = [record for record in caplog.records if record.name == "relay.server.credentials"]
    assert error.levelno == logging.ERROR
    assert (error.exc_info is not None) == (left is None)  # where it was raised, if nobody foresaw it


async def test_the_direct_ports_certificate_and_the_announced_digest_change_together(folder: Folder) -> None:
    before = folder.issue(folder.direct_cert, folder.direct_key)
    main = folder.issue(folder.cert, folder.key)
    files = CredentialFiles(None, folder.cert, folder.key, folder.direct_cert, folder.direct_key, True)
    async with serving(files, direct_url=URL, direct_port=0) as server:
        assert await announced_and_met(server) == (before, before)
        after = folder.issue(folder.direct_cert, folder.direct_key)
        await server.reread_credentials()
        assert await announced_and_met(server) == (after, after)
        assert after != before
        assert await shown_by(server) == main


async def test_the_main_certificate_stays_that_of_a_direct_port_without_its_own(folder: Folder) -> None:
    folder.issue(folder.cert, folder.key)
    files = CredentialFiles(None, folder.cert, folder.key, direct_fingerprint=True)
    async with serving(files, direct_url=URL, direct_port=0) as server:
        after = folder.issue(folder.cert, folder.key)
        await server.reread_credentials()
        assert await announced_and_met(server) == (after, after)


async def announced_and_met(server: Server) -> tuple[str, str]:
    """The digest in the server's offer, and that of the certificate at the direct port."""
    async with dial(server, VLLM, tls=True) as websocket:
        metadata = unpack(await websocket.recv())
        ticket = {"additional_headers": {"X-Relay-Ticket": metadata["direct_ticket"]}}
        return metadata["direct_cert_sha256"], await shown_by(server, server.direct_port, **ticket)


@pytest.mark.parametrize(("left", "opens"), [(ALICE, True), (BOB, False)])
async def test_a_ticket_opens_only_while_its_key_does(folder: Folder, left: str, opens: bool) -> None:
    folder.write_keys(ALICE)
    async with serving(CredentialFiles(folder.keys), direct_url=URL) as server:
        async with dial(server, VLLM, **with_key(ALICE)) as websocket:
            ticket = unpack(await websocket.recv())["direct_ticket"]
        folder.write_keys(left)
        await server.reread_credentials()
        came = True
        try:
            async with dial(server, VLLM, additional_headers={"X-Relay-Ticket": ticket}):
                pass
        except InvalidStatus:
            came = False
        assert came == opens


@pytest.mark.parametrize("later", [(ALICE, BOB), (BOB,)], ids=["a second key", "another key"])
async def test_from_a_second_tenant_on_nobody_gets_tracebacks(folder: Folder, later: tuple[str, ...]) -> None:
    folder.write_keys(ALICE)
    async with serving(CredentialFiles(folder.keys)) as server:
        async with dial(server, **with_key(ALICE)) as websocket, dial(server, **with_key(ALICE)) as other:
            await websocket.recv()
            await other.recv()
            assert "Traceback" in await ask(other, observation(do="raise"))
            folder.write_keys(*later)
            await server.reread_credentials()
            assert "Traceback" not in await ask(websocket, observation(do="raise"))
        async with dial(server, **with_key(BOB)) as websocket:
            await websocket.recv()
            assert "Traceback" not in await ask(websocket, observation(do="raise"))


async def test_the_same_key_read_again_leaves_a_server_with_one_tenant(folder: Folder) -> None:
    folder.write_keys(ALICE)
    async with serving(CredentialFiles(folder.keys)) as server:
        await server.reread_credentials()
        async with dial(server, **with_key(ALICE)) as websocket:
            await websocket.recv()
            assert "Traceback" in await ask(websocket, observation(do="raise"))


async def test_without_files_nothing_is_read_and_nothing_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="relay.server.credentials")
    async with running() as server:
        await server.reread_credentials()
    assert "read again" not in caplog.text
