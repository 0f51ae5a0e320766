"""Where API keys come from, and what is refused as one."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from relay.server import api_keys
from relay.server.api_keys import ApiKeys, read_api_keys

ALICE, BOB = "alice-0123456789", "bob/0123456789+ab="


def write(folder: Path, text: str | bytes, mode: int = 0o600) -> Path:
    file = folder / "keys"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    file.chmod(mode)
    return file


def test_a_file_holds_one_key_a_line_beside_comments_and_blank_lines(tmp_path: Path):
    keys = read_api_keys(write(tmp_path, f"# the lab\n{ALICE}\n\n  {BOB}  \r\n# end"), {})
    assert len(keys) == 2
    assert keys.holds(ALICE)
    assert keys.holds(BOB)
    assert not keys.holds("# the lab")


@pytest.mark.parametrize("separator", [",", "\n", ", ", ",\n"])
def test_the_environment_separates_keys_by_commas_or_line_breaks(separator: str):
    keys = read_api_keys(environment={"RELAY_API_KEYS": f"{ALICE}{separator}{BOB}"})
    assert (len(keys), keys.holds(ALICE), keys.holds(BOB)) == (2, True, True)


def test_file_and_environment_add_up_and_the_same_key_counts_once(tmp_path: Path):
    file = write(tmp_path, f"{ALICE}\n{BOB}")
    keys = read_api_keys(file, {"RELAY_API_KEYS": f"{BOB},carol-0123456789"})
    assert len(keys) == 3
    assert keys.holds("carol-0123456789")


def test_without_file_and_environment_there_are_no_keys():
    assert not read_api_keys(environment={})


@pytest.mark.parametrize("wrong", ["", ALICE[:-1], ALICE + " ", ALICE.upper(), "ключ", "\udcff\udcfe"])
def test_what_is_not_a_key_is_not_held(wrong: str):
    assert not read_api_keys(environment={"RELAY_API_KEYS": ALICE}).holds(wrong)


def test_only_digests_are_kept():
    keys = read_api_keys(environment={"RELAY_API_KEYS": ALICE})
    assert ALICE.encode() not in b"".join(keys.digests)
    assert all(len(digest) == 32 for digest in keys.digests)
    assert repr(keys) == "ApiKeys()"


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch):
    compared: list[bytes] = []
    keys = read_api_keys(environment={"RELAY_API_KEYS": ",".join(f"key-number-{n:08}" for n in range(50))})

    def compare(digest: bytes, given: bytes) -> bool:
        compared.append(digest)
        return digest == given

    monkeypatch.setattr(api_keys.hmac, "compare_digest", compare)
    assert keys.holds("key-number-00000007")
    assert sorted(compared) == sorted(keys.digests)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no API key"),
        ("# later\n\n", "holds no API key"),
        (f"{ALICE}\nshort", "line 2: the API key has 5 characters; at least 16 are needed"),
        (f"# the lab\nalice: {ALICE}", "line 2: an API key is printable ASCII without spaces and commas"),
        (f"{ALICE},{BOB}", "line 1: an API key is printable ASCII"),
        ("Schlüssel-0123456789", "line 1: an API key is printable ASCII"),
        (b"\xff\xfe\x00\x01 0123456789012345", "line 1: an API key is printable ASCII"),
    ],
)
def test_a_fault_in_the_file_names_the_line_but_not_the_key(tmp_path: Path, text: str | bytes, says: str):
    file = write(tmp_path, text)
    with pytest.raises(ValueError, match="API key") as caught:
        read_api_keys(file, {})
    assert str(file) in str(caught.value)
    assert says in str(caught.value)
    assert "0123456789" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("", "RELAY_API_KEYS holds no API key"),
        (f"{ALICE},x", "RELAY_API_KEYS, key 2: the API key has 1 characters"),
        ("two words 0123456789", "RELAY_API_KEYS, key 1: an API key is printable ASCII"),
    ],
)
def test_a_fault_in_the_environment_names_its_place(value: str, says: str):
    with pytest.raises(ValueError, match=says):
        read_api_keys(environment={"RELAY_API_KEYS": value})


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"the API keys in '.*nokeys' cannot be read: No such file"):
        read_api_keys(tmp_path / "nokeys", {})


def test_a_folder_is_no_file_of_keys(tmp_path: Path):
    with pytest.raises(ValueError, match=r"the API keys in '.*' cannot be read: "):
        read_api_keys(tmp_path, {})


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_can_read_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
):
    read_api_keys(write(tmp_path, ALICE, mode), {})
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * warned
    assert ("can be read by other users" in caplog.text) == warned


def test_no_keys_hold_nothing():
    assert not ApiKeys().holds("")
