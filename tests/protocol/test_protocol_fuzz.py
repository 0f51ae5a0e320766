"""The messages of past failures, a few hundred fresh ones, and whether the fuzzer would notice."""

from __future__ import annotations

import itertools
import random
import sys
import time
from pathlib import Path
from typing import Any

import fuzz_messages
import msgpack
import pytest
from fuzz_messages import CORPUS, Failure, check, kept, messages, structures
from hypothesis import HealthCheck, given, settings

from relay.protocol.msgpack_numpy import pack

LONGEST_CALL_S = 0.15
"""Three times what the fuzzer allows: other processes share the caches."""


@pytest.mark.parametrize("file", sorted(CORPUS.iterdir()), ids=lambda file: file.stem)
def test_messages_of_past_failures_are_read_or_refused_in_time(file: Path):
    check(kept(file), longest_s=LONGEST_CALL_S)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(structures())
def test_requests_that_are_nearly_right_are_read_or_refused(structure: dict[Any, Any]):
    check(msgpack.packb(structure), longest_s=LONGEST_CALL_S)


def test_damaged_observations_are_read_or_refused():
    chance = random.Random(0)
    observations = fuzz_messages.valid_observations(chance)
    damaged = [fuzz_messages.damaged(chance.choice(observations), observations, chance) for _ in range(500)]
    outcomes = {check(message, longest_s=LONGEST_CALL_S).outcome for message in damaged}
    assert outcomes == {"read", "InvalidPayload", "ObservationError"}


def test_the_same_seed_makes_the_same_messages():
    first, again, other = (list(itertools.islice(messages(seed), 200)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


# ---- the fuzzer itself --------------------------------------------------------------------------------------------


def test_the_undamaged_observations_are_read():
    outcomes = [check(message).outcome for message in fuzz_messages.valid_observations(random.Random(0))]
    assert outcomes.count("read") > len(outcomes) / 2
    assert "InvalidPayload" not in outcomes


def test_a_foreign_exception_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    def unpack(message: bytes) -> Any:
        raise KeyError("state")

    monkeypatch.setattr(fuzz_messages, "unpack", unpack)
    with pytest.raises(Failure, match="unpack raised KeyError: 'state'"):
        check(pack({"state": [0.5]}))


def test_a_slow_call_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    def unpack(message: bytes) -> Any:
        until = time.thread_time() + 0.06
        while time.thread_time() < until:
            pass

    monkeypatch.setattr(fuzz_messages, "unpack", unpack)
    with pytest.raises(Failure, match=r"unpack took \d+ ms"):
        check(pack({"state": [0.5]}))


def test_what_fails_is_kept_and_can_be_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(fuzz_messages, "CORPUS", tmp_path / "corpus")
    report = fuzz_messages.Report(3, fuzz_messages.Counter(read=3), 0.001, b"slow", "it ended with -11", b"\xc1")
    assert fuzz_messages._tell([report], 1.0) == 1
    (file,) = (tmp_path / "corpus").iterdir()
    assert kept(file) == b"\xc1"
    assert f"--replay {file}" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["fuzz_messages.py", "--replay", str(file)])
    assert fuzz_messages.main() == 0
    assert "InvalidPayload" in capsys.readouterr().out


def test_a_message_that_ends_the_process_is_known(tmp_path: Path):
    file = tmp_path / "0"
    file.write_bytes(fuzz_messages._HEADER.pack(41, 3) + b"abcd")
    assert fuzz_messages._being_read(file) == (41, b"abc")
