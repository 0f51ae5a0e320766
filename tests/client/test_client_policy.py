"""`Policy` over connections that need no network."""

from __future__ import annotations

import dataclasses
import io
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_servers import ACTIONS, METADATA, FakeConnection

from relay.client import exchange
from relay.client.connection import Greeting
from relay.client.policy import Policy
from relay.protocol import msgpack_numpy
from relay.protocol.images import Codec
from relay.protocol.options import CHUNKING_KEYS

FRAME = np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8)
OBSERVATION = {"image": {"base_0_rgb": FRAME}, "state": np.zeros(3, np.float32), "prompt": "pick up the fork"}
REPLY = {"actions": ACTIONS, "policy_timing": {"infer_ms": 4.5}, "server_timing": {"infer_ms": 5.0, "parse_ms": 0.2}}
VLLM_URL = "ws://robot.example/pi05/v1/realtime/robot/openpi"

Opener = Callable[..., tuple[Policy, FakeConnection]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opener:
    """Open a policy on a fake connection: by default our own server, which answers with `answers` in order."""

    def open_policy(
        *answers: Any,
        relay: bool = True,
        metadata: Any = METADATA,
        headers: dict[str, str] | None = None,
        url: str = "ws://robot.example/",
        **options: Any,
    ) -> tuple[Policy, FakeConnection]:
        first = metadata if isinstance(metadata, (str, bytes)) else msgpack_numpy.pack(metadata)
        connection = FakeConnection(Greeting(url, relay, headers or {}, first), list(answers))
        monkeypatch.setattr("relay.client.policy.connect_when_ready", lambda *_: connection)
        return Policy(url, **options), connection

    return open_policy


def jpeg_of(frame: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=95)
    return file.getvalue()


# ---- replies


def test_infer_returns_actions_and_timings(opened: Opener) -> None:
    policy, _ = opened(REPLY)
    result = policy.infer(OBSERVATION)
    np.testing.assert_array_equal(result["actions"], ACTIONS)
    assert result["policy_timing"] == {"infer_ms": 4.5}
    assert result["server_timing"] == {"infer_ms": 5.0, "parse_ms": 0.2}


def test_actions_are_a_read_only_view(opened: Opener) -> None:
    policy, _ = opened(REPLY)
    actions = policy.infer(OBSERVATION)["actions"]
    assert not actions.flags.writeable
    assert not actions.flags.owndata


def test_a_bare_array_becomes_actions(opened: Opener) -> None:
    policy, _ = opened(ACTIONS)
    result = policy.infer(OBSERVATION)
    assert list(result) == ["actions"]
    np.testing.assert_array_equal(result["actions"], ACTIONS)


def test_named_groups_on_the_vllm_path_become_actions(opened: Opener) -> None:
    policy, _ = opened({"eef_9d": ACTIONS, "gripper_position": ACTIONS[:, :1]}, url=VLLM_URL)
    assert set(policy.infer(OBSERVATION)["actions"]) == {"eef_9d", "gripper_position"}


def test_a_text_frame_raises_its_text(opened: Opener) -> None:
    traceback = "Traceback (most recent call last):\n  ...\nValueError: state has 7 values"
    policy, _ = opened(traceback)
    with pytest.raises(RuntimeError) as error:
        policy.infer(OBSERVATION)
    assert str(error.value) == traceback


def test_an_error_map_raises_and_the_connection_stays_usable(opened: Opener) -> None:
    policy, _ = opened({"type": "error", "message": "Internal inference error"}, ACTIONS, url=VLLM_URL)
    with pytest.raises(RuntimeError, match=r"^Internal inference error$"):
        policy.infer(OBSERVATION)
    np.testing.assert_array_equal(policy.infer(OBSERVATION)["actions"], ACTIONS)


def test_an_error_map_is_recognised_on_any_path(opened: Opener) -> None:
    policy, _ = opened({"type": "error", "message": "no"})
    with pytest.raises(RuntimeError, match=r"^no$"):
        policy.infer(OBSERVATION)


def test_a_reply_that_cannot_be_decoded_is_an_error(opened: Opener) -> None:
    policy, _ = opened(b"\xc1")
    with pytest.raises(RuntimeError, match="reply cannot be decoded"):
        policy.infer(OBSERVATION)


def test_a_hostile_dtype_is_refused_not_dereferenced(opened: Opener) -> None:
    hostile = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "|O", b"shape": [1]}
    policy, _ = opened({"actions": hostile})
    with pytest.raises(RuntimeError, match="dtype"):
        policy.infer(OBSERVATION)


def test_a_reply_that_is_no_map_is_an_error(opened: Opener) -> None:
    policy, _ = opened([1, 2])
    with pytest.raises(RuntimeError, match="a list; expected a map"):
        policy.infer(OBSERVATION)


# ---- greeting


def test_metadata_is_what_the_server_sent(opened: Opener) -> None:
    policy, _ = opened()
    assert policy.get_server_metadata() == METADATA


def test_changing_the_returned_metadata_changes_nothing(opened: Opener) -> None:
    policy, _ = opened()
    policy.get_server_metadata().clear()
    assert policy.get_server_metadata() == METADATA


def test_a_json_refusal_in_place_of_metadata_says_why(opened: Opener) -> None:
    refusal = '{"type": "error", "error": "Robot policy not available", "code": "unsupported"}'
    with pytest.raises(RuntimeError, match=r"^Robot policy not available$"):
        opened(metadata=refusal)


def test_a_plain_refusal_in_place_of_metadata_says_why(opened: Opener) -> None:
    with pytest.raises(RuntimeError, match=r"^go away$"):
        opened(metadata="go away")


def test_an_error_map_in_place_of_metadata_says_why(opened: Opener) -> None:
    with pytest.raises(RuntimeError, match=r"^no weights$"):
        opened(metadata={"type": "error", "message": "no weights"})


@pytest.mark.parametrize("frame", [b"\xc1", msgpack_numpy.pack([1])], ids=["not MessagePack", "not a map"])
def test_a_first_frame_that_is_no_metadata_is_an_error(opened: Opener, frame: bytes) -> None:
    with pytest.raises(RuntimeError, match=r"robot\.example/ is no policy server"):
        opened(metadata=frame)


def test_the_connection_is_closed_when_the_greeting_is_refused(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[FakeConnection] = []
    monkeypatch.setattr(FakeConnection, "close", lambda self: closed.append(self))
    with pytest.raises(RuntimeError):
        opened(metadata="no")
    assert len(closed) == 1


# ---- frames


def test_frames_are_sent_as_jpeg_by_default(opened: Opener) -> None:
    policy, connection = opened(REPLY)
    policy.infer(OBSERVATION)
    assert policy.codec is Codec.JPEG_Q90
    assert connection.sent[0]["image"]["base_0_rgb"].startswith(b"\xff\xd8\xff")


def test_raw_frames_are_sent_as_arrays(opened: Opener) -> None:
    policy, connection = opened(REPLY, codec=Codec.RAW)
    policy.infer(OBSERVATION)
    assert policy.codec is Codec.RAW
    np.testing.assert_array_equal(connection.sent[0]["image"]["base_0_rgb"], FRAME)


def test_the_observation_is_left_as_it_was(opened: Opener) -> None:
    policy, _ = opened(REPLY)
    policy.infer(OBSERVATION)
    assert OBSERVATION["image"]["base_0_rgb"] is FRAME  # pyright: ignore[reportIndexIssue, reportCallIssue, reportArgumentType]


@pytest.mark.parametrize("codec", [Codec.JPEG_Q90, Codec.LOSSLESS, Codec.RAW])
def test_the_callers_jpeg_passes_through(opened: Opener, codec: Codec) -> None:
    policy, connection = opened(REPLY, codec=codec)
    jpeg = jpeg_of(FRAME)
    policy.infer({**OBSERVATION, "image": {"base_0_rgb": jpeg}})
    assert connection.sent[0]["image"]["base_0_rgb"] == jpeg


def test_a_stock_server_gets_arrays(opened: Opener) -> None:
    policy, connection = opened(REPLY, relay=False, metadata={})
    policy.infer(OBSERVATION)
    assert policy.codec is None
    np.testing.assert_array_equal(connection.sent[0]["image"]["base_0_rgb"], FRAME)


@pytest.mark.parametrize("server", [{}, {"relay": False, "metadata": {}}], ids=["relay", "stock"])
def test_the_frames_of_an_observation_are_converted_side_by_side(
    server: dict[str, Any], opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[int] = []

    def side_by_side(work: Any, items: Any) -> list[Any]:
        shared.append(len(items))
        return [work(item) for item in items]

    monkeypatch.setattr(exchange, "side_by_side", side_by_side)
    policy, _ = opened(REPLY, codec=Codec.LOSSLESS, **server)
    frame = np.zeros((224, 224, 3), np.uint8)
    value = jpeg_of(frame) if server else frame
    policy.infer({**OBSERVATION, "image": {"front": value, "wrist": value}})
    assert shared == [2]


def test_a_stock_server_gets_the_callers_jpeg_decoded(opened: Opener) -> None:
    policy, connection = opened(REPLY, relay=False, metadata={})
    jpeg = jpeg_of(FRAME)
    policy.infer({**OBSERVATION, "image": {"base_0_rgb": jpeg}})
    expected = np.asarray(Image.open(io.BytesIO(jpeg)))
    np.testing.assert_array_equal(connection.sent[0]["image"]["base_0_rgb"], expected)


def test_one_log_line_says_that_frames_go_as_arrays(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "relay.client")
    policy, _ = opened(REPLY, REPLY, relay=False, metadata={})
    policy.infer(OBSERVATION)
    policy.infer(OBSERVATION)
    assert len(caplog.records) == 1
    assert "frames are sent as arrays" in caplog.text


def test_arrays_that_were_asked_for_are_no_news(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    opened(relay=False, metadata={}, codec=Codec.RAW)
    assert caplog.records == []


def test_the_documented_metadata_is_proof_of_a_server_that_takes_jpeg(opened: Opener) -> None:
    policy, connection = opened(REPLY, relay=False)
    policy.infer(OBSERVATION)
    assert policy.codec is Codec.JPEG_Q90
    assert isinstance(connection.sent[0]["image"]["base_0_rgb"], bytes)


def test_a_codec_that_the_server_does_not_list_gives_way_to_arrays(
    opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    policy, connection = opened(REPLY, headers={"relay-codecs": "jpeg, png"}, codec=Codec.LOSSLESS)
    policy.infer(OBSERVATION)
    assert policy.codec is None
    assert isinstance(connection.sent[0]["image"]["base_0_rgb"], np.ndarray)
    assert "LOSSLESS" in caplog.text


@pytest.mark.parametrize(("codec", "hint"), [("JPEG_Q95", "Codec.JPEG_Q95"), ("lossles", "Codec.LOSSLESS")])
def test_a_codec_of_another_type_is_refused_with_the_nearest_name(opened: Opener, codec: str, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        opened(codec=codec)


# ---- options and limits

OPTIONS = {
    "num_steps": 5,
    "num_inference_steps": 5,
    "sampling_params": {"num_inference_steps": 5},
    "seed": 7,
    "noise": ACTIONS,
    "adapter_dir": "bus-table",
    "deadline_ms": 100,
    "prev_actions": ACTIONS,
    "inference_delay": 2,
    "execution_horizon": 3,
    "executed_actions": ACTIONS,
}


CHUNKING = {name: OPTIONS[name] for name in CHUNKING_KEYS}


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in CHUNKING])
def test_a_stock_server_is_never_sent_an_option_it_would_ignore(opened: Opener, name: str) -> None:
    policy, connection = opened(relay=False, metadata={})
    with pytest.raises(ValueError, match=f"'{name}' would be ignored: a stock OpenPI server"):
        policy.infer({**OBSERVATION, name: OPTIONS[name]})
    assert connection.sent == []


@pytest.mark.parametrize("name", OPTIONS)
def test_our_server_is_sent_every_option(opened: Opener, name: str) -> None:
    policy, connection = opened(REPLY)
    policy.infer({**OBSERVATION, name: OPTIONS[name]})
    np.testing.assert_equal(connection.sent[0][name], OPTIONS[name])


def test_a_server_known_by_its_metadata_is_sent_the_documented_options_only(opened: Opener) -> None:
    policy, connection = opened(REPLY, relay=False)
    policy.infer({**OBSERVATION, "num_steps": 5, "adapter_dir": "bus-table"})
    with pytest.raises(ValueError, match="'seed' would be ignored"):
        policy.infer({**OBSERVATION, "seed": 7})
    assert len(connection.sent) == 1


def greeted(kind: str) -> dict[str, Any]:
    """How a server of this kind is opened."""
    return {
        "stock": {"relay": False, "metadata": {}},
        "hosted": {"relay": False},
        "vllm": {"relay": False, "metadata": {"action_horizon": 4}, "url": VLLM_URL},
        "relay without it": {"headers": {"relay-options": "noise, num_steps, seed"}},
        "relay with it": {"headers": {"relay-options": f"noise, seed, {', '.join(CHUNKING)}"}},
        "relay that was loading": {},
    }[kind]


@pytest.mark.parametrize("kind", ["stock", "hosted", "vllm", "relay without it"])
def test_a_server_that_knows_no_real_time_chunking_is_asked_without_it(
    opened: Opener, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy, connection = opened(ACTIONS, ACTIONS, **greeted(kind))
    notes: list[tuple[str, ...]] = []
    for _ in range(2):
        asked = {**OBSERVATION, **CHUNKING}
        np.testing.assert_array_equal(policy.infer(asked)["actions"], ACTIONS)
        assert asked.keys() > CHUNKING.keys()  # the caller's map is left alone
        assert policy.last is not None
        notes.append(policy.last.notes)
    assert not any(key in sent for sent in connection.sent for key in CHUNKING)
    said = "prev_actions, inference_delay, execution_horizon are not sent: real-time chunking is nothing that"
    assert [len(told) for told in notes] == [1, 0]
    assert notes[0][0].startswith(said)
    assert caplog.text.count(said) == 1


@pytest.mark.parametrize("kind", ["relay with it", "relay that was loading"])
def test_a_server_of_ours_is_sent_what_is_left_over(opened: Opener, kind: str) -> None:
    policy, connection = opened(REPLY, **greeted(kind))
    policy.infer({**OBSERVATION, **CHUNKING})
    np.testing.assert_equal({key: connection.sent[0][key] for key in CHUNKING}, CHUNKING)
    assert policy.last is not None
    assert policy.last.notes == ()


def test_beside_a_left_over_other_options_are_still_refused(opened: Opener) -> None:
    policy, connection = opened(**greeted("stock"))
    with pytest.raises(ValueError, match=r"^'seed' would be ignored"):
        policy.infer({**OBSERVATION, **CHUNKING, "seed": 7})
    assert connection.sent == []


def test_a_vllm_omni_server_is_sent_a_seed(opened: Opener) -> None:
    policy, connection = opened(ACTIONS, relay=False, metadata={"action_horizon": 4}, url=VLLM_URL)
    policy.infer({**OBSERVATION, "seed": 7})
    assert connection.sent[0]["seed"] == 7


@pytest.mark.parametrize(
    "limit",
    [{"headers": {"relay-max-payload": "1000"}}, {"metadata": {"max_payload_bytes": 1000}}],
    ids=["in the headers", "in the metadata"],
)
def test_an_observation_over_the_stated_limit_is_refused_before_sending(opened: Opener, limit: dict[str, Any]) -> None:
    policy, connection = opened(codec=Codec.RAW, **limit)
    with pytest.raises(ValueError, match="takes at most 1,000"):
        policy.infer(OBSERVATION)
    assert connection.sent == []


def test_without_a_stated_limit_64_mib_hold(opened: Opener) -> None:
    policy, connection = opened(codec=Codec.RAW)
    with pytest.raises(ValueError, match="67,108,864"):
        policy.infer({"state": np.zeros(64 * 1024 * 1024, np.uint8)})
    assert connection.sent == []


def test_a_stated_limit_that_is_no_number_is_logged(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    opened(headers={"relay-max-payload": "plenty"})
    assert "'plenty'" in caplog.text


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_timeout_must_be_positive(opened: Opener, timeout: float) -> None:
    policy, _ = opened()
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        policy.infer(OBSERVATION, timeout=timeout)


def test_the_timeout_reaches_the_connection(opened: Opener) -> None:
    policy, connection = opened(REPLY, REPLY)
    policy.infer(OBSERVATION, timeout=1.5)
    policy.infer(OBSERVATION)
    assert connection.timeouts == [1.5, None]


# ---- reset


@pytest.mark.parametrize("answer", ["reset successful", {"status": "reset successful"}], ids=["text", "map"])
@pytest.mark.parametrize(
    "server",
    [{}, {"url": VLLM_URL}, {"url": VLLM_URL, "relay": False, "metadata": {}}],
    ids=["our server", "our server, vLLM path", "vLLM-Omni"],
)
def test_reset_is_sent_and_its_answer_awaited(opened: Opener, answer: Any, server: dict[str, Any]) -> None:
    policy, connection = opened(answer, **server)
    policy.reset()
    assert connection.sent == [{"endpoint": "reset"}]


def test_reset_sends_nothing_to_a_stock_server(opened: Opener) -> None:
    policy, connection = opened(relay=False, metadata={})
    policy.reset()
    assert connection.sent == []


@pytest.mark.parametrize(
    ("answer", "says"),
    [("Traceback: no", "Traceback: no"), ({"type": "error", "message": "no"}, "no"), (ACTIONS, "did not confirm")],
    ids=["text", "error map", "actions"],
)
def test_another_answer_to_reset_is_an_error(opened: Opener, answer: Any, says: str) -> None:
    policy, _ = opened(answer)
    with pytest.raises(RuntimeError, match=says):
        policy.reset()


# ---- last


def test_last_is_none_before_the_first_call(opened: Opener) -> None:
    policy, _ = opened()
    assert policy.last is None


def test_last_has_notes_sizes_and_timings(opened: Opener) -> None:
    policy, _ = opened({**REPLY, "notes": ["prompt truncated"]})
    policy.infer(OBSERVATION)
    last = policy.last
    assert last is not None
    assert last.notes == ("prompt truncated",)
    assert last.bytes_received == len(msgpack_numpy.pack({**REPLY, "notes": ["prompt truncated"]}))
    assert last.bytes_sent > 500
    assert min(last.encode_ms, last.round_trip_ms, last.decode_ms) >= 0
    assert last.age_ms == pytest.approx(last.encode_ms + last.round_trip_ms + last.decode_ms)


def test_last_cannot_be_changed(opened: Opener) -> None:
    policy, _ = opened(REPLY)
    policy.infer(OBSERVATION)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.last.late_replies = 3  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def is_fresh(policy: Policy, session_id: Any = None) -> bool | None:
    policy.infer({**OBSERVATION, "session_id": session_id})
    assert policy.last is not None
    return policy.last.session_fresh


def test_the_first_observation_of_each_session_is_fresh(opened: Opener) -> None:
    policy, _ = opened(*[REPLY] * 4)
    assert [is_fresh(policy, name) for name in ("left", "right", "left", "right")] == [True, True, False, False]


@pytest.mark.parametrize("same", ["default", b"default", ""], ids=repr)
def test_session_ids_are_compared_as_the_server_does(opened: Opener, same: Any) -> None:
    policy, _ = opened(REPLY, REPLY)
    assert [is_fresh(policy), is_fresh(policy, same)] == [True, False]


def test_reset_makes_the_next_observation_fresh(opened: Opener) -> None:
    policy, _ = opened(REPLY, "reset successful", REPLY)
    assert is_fresh(policy) is True
    policy.reset()
    assert is_fresh(policy) is True


def test_a_failed_first_observation_leaves_the_session_unseen(opened: Opener) -> None:
    policy, _ = opened({"type": "error", "message": "no"}, REPLY, url=VLLM_URL)
    with pytest.raises(RuntimeError):
        policy.infer(OBSERVATION)
    assert is_fresh(policy) is True


def test_a_request_that_timed_out_has_opened_the_session(opened: Opener) -> None:
    policy, _ = opened(TimeoutError("no reply"), REPLY)
    with pytest.raises(TimeoutError):
        policy.infer(OBSERVATION)
    assert is_fresh(policy) is False


def test_a_stock_server_has_no_sessions_to_be_fresh(opened: Opener) -> None:
    policy, _ = opened(REPLY, relay=False, metadata={})
    assert is_fresh(policy) is None


# ---- use


def test_a_second_thread_is_told_the_rule(opened: Opener) -> None:
    policy, connection = opened()
    entered, leave = threading.Event(), threading.Event()

    def slow(message: bytes, timeout: float | None) -> bytes:
        entered.set()
        assert leave.wait(10)
        return msgpack_numpy.pack(REPLY)

    connection.request = slow  # type: ignore[method-assign]
    busy = threading.Thread(target=policy.infer, args=(OBSERVATION,))
    busy.start()
    assert entered.wait(10)
    try:
        with pytest.raises(RuntimeError, match="one thread at a time"):
            policy.infer(OBSERVATION)
        with pytest.raises(RuntimeError, match="one thread at a time"):
            policy.reset()
    finally:
        leave.set()
        busy.join()


def test_threads_may_take_turns(opened: Opener) -> None:
    policy, _ = opened(REPLY, REPLY)
    policy.infer(OBSERVATION)
    results: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: results.append(policy.infer(OBSERVATION)))
    thread.start()
    thread.join()
    assert len(results) == 1


def test_a_policy_is_usable_after_an_error(opened: Opener) -> None:
    policy, _ = opened(TimeoutError("no reply"), REPLY)
    with pytest.raises(TimeoutError):
        policy.infer(OBSERVATION)
    np.testing.assert_array_equal(policy.infer(OBSERVATION)["actions"], ACTIONS)


def test_leaving_the_with_block_closes_the_connection(opened: Opener) -> None:
    policy, connection = opened()
    with policy as entered:
        assert entered is policy
        assert not connection.closed
    assert connection.closed


def test_a_policy_does_not_cross_a_fork(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, _ = opened(REPLY)
    monkeypatch.setattr("relay.client.exchange.os.getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="before a fork"):
        policy.infer(OBSERVATION)


def test_closing_a_forks_copy_leaves_the_connection_to_the_process_that_opened_it(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, connection = opened(REPLY)
    with monkeypatch.context() as forked:
        forked.setattr("relay.client.exchange.os.getpid", lambda: -1)
        policy.close()
    assert not connection.closed
    policy.close()
    assert connection.closed
