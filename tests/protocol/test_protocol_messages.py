"""Requests as the server reads them, replies as clients receive them."""

import re
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay.protocol.errors import InvalidPayload, ObservationError, ProtocolError
from relay.protocol.messages import Infer, Options, Reset, decode_request, encode_bare, encode_reply
from relay.protocol.msgpack_numpy import pack, unpack

NOISE = np.zeros((50, 32), np.float32)
CHUNKING = {"prev_actions": np.ones((20, 7), np.float32), "inference_delay": 3, "execution_horizon": 10}


def decode(**fields: Any) -> Infer:
    request = decode_request(pack({"state": [0.5], "prompt": "pick", **fields}))
    assert isinstance(request, Infer)
    return request


# ---- frames that are no request -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        ("hello", "text frame; a request is one binary MessagePack message"),
        ("", "text frame"),
        (b"", "empty frame; a request is one binary MessagePack message"),
        (b"\xc1", "byte 0: the reserved code 0xc1"),
        (b'{"state": 1}', "byte 1: 11 bytes after the end of the message"),
        (pack([1, 2]), "the message is a list of 2 items; a request is a map"),
        (pack(np.zeros(2)), "the message is an array of shape (2,) and dtype float64; a request is a map"),
        (pack(None), "the message is nil; a request is a map"),
        (msgpack.packb({1: 2}), "byte 1: map keys must be text or bytes, got an integer"),
        (pack({b"\xff": 2}), "key '\\ufffd' is not UTF-8"),
        (pack({"endpoint": "status"}), "endpoint is 'status'; expected 'infer' or 'reset'"),
        (pack({"endpoint": None}), "endpoint is nil; expected 'infer' or 'reset'"),
        (pack({"endpoint": ["reset"]}), "endpoint is a list of 1 items"),
        (pack({"endpoint": np.zeros(2)}), "endpoint is an array of shape (2,)"),
    ],
)
def test_frames_that_are_no_request_are_invalid_payload(frame: bytes | str, complaint: str):
    with pytest.raises(InvalidPayload, match=re.escape(complaint)):
        decode_request(frame)


# ---- endpoint and keys --------------------------------------------------------------------------------------------


def test_a_message_without_endpoint_is_an_observation():
    request = decode()
    assert request.observation == {"state": [0.5], "prompt": "pick"}
    assert request.options == Options()
    assert request.session_id == "default"
    assert not request.endpoint_named


@pytest.mark.parametrize("endpoint", ["infer", b"infer"])
def test_a_named_endpoint_is_noted_and_leaves_the_observation(endpoint: str | bytes):
    request = decode(endpoint=endpoint)
    assert request.endpoint_named
    assert "endpoint" not in request.observation


@pytest.mark.parametrize("fields", [{"endpoint": "reset"}, {b"endpoint": b"reset"}, {"endpoint": "reset", "seed": "x"}])
def test_reset_ignores_every_other_key(fields: dict[Any, Any]):
    assert decode_request(pack(fields)) == Reset()


def test_keys_sent_as_bytes_are_text_in_the_observation():
    request = decode_request(
        pack({b"state": [0.5], b"image": {b"front": b"\xff\xd8\xff"}, b"seed": 7, b"session_id": b"a"})
    )
    assert request == Infer({"state": [0.5], "image": {"front": b"\xff\xd8\xff"}}, Options(seed=7), "a")


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"state": [1], b"state": [2]}, "state is given twice, as text and as bytes"),
        ({"image": {"front": b"", b"front": b""}}, "image['front'] is given twice"),
    ],
)
def test_a_key_given_as_text_and_as_bytes_is_refused(fields: dict[Any, Any], complaint: str):
    with pytest.raises(ObservationError, match=re.escape(complaint)):
        decode_request(pack(fields))


def test_transport_keys_leave_the_observation():
    request = decode(
        seed=1,
        num_steps=5,
        num_inference_steps=5,
        sampling_params={"num_inference_steps": 5},
        adapter_dir="fold",
        deadline_ms=40,
        session_id="left",
        executed_actions=np.ones((3, 7), np.float32),
        **CHUNKING,
    )
    assert set(request.observation) == {"state", "prompt"}


# ---- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, -(2**63), 2**64 - 1, np.int64(7), np.uint8(7)])
def test_integer_seeds_are_taken(seed: Any):
    taken = decode(seed=seed).options.seed
    assert taken == seed
    assert type(taken) is int


@pytest.mark.parametrize(
    "fields",
    [
        {"num_steps": 5},
        {"num_inference_steps": 5},
        {"sampling_params": {"num_inference_steps": 5}},
        {"num_steps": np.int32(5), "num_inference_steps": 5, "sampling_params": {b"num_inference_steps": 5}},
        {"num_steps": 5, "num_inference_steps": None},
    ],
    ids=str,
)
def test_the_three_names_of_num_steps_mean_the_same(fields: dict[str, Any]):
    assert decode(**fields).options.num_steps == 5


def test_other_sampling_params_stay_for_the_engine_to_report():
    request = decode(sampling_params={"num_inference_steps": 5, "guidance_scale": 2.0})
    assert request.options.num_steps == 5
    assert request.observation["sampling_params"] == {"guidance_scale": 2.0}


@pytest.mark.parametrize("name", ["fold-towel", "a", "v1.2_b", "x" * 64, b"fold", "..a"])
def test_adapter_names_are_taken(name: str | bytes):
    assert decode(adapter_dir=name).options.adapter == (name.decode() if isinstance(name, bytes) else name)


@pytest.mark.parametrize(("deadline", "taken"), [(40, 40.0), (0.5, 0.5), (np.float32(2.5), 2.5), (np.int64(3), 3.0)])
def test_deadlines_are_milliseconds(deadline: Any, taken: float):
    assert decode(deadline_ms=deadline).options.deadline_ms == taken


def test_noise_of_the_largest_magnitude_is_taken():
    noise = np.full((50, 32), -1000, np.float32)
    assert decode(noise=noise).options.noise is not None


def test_noise_is_taken_as_it_is():
    noise = np.random.default_rng(0).normal(size=(50, 32)).astype(np.float32)
    taken = decode(noise=noise).options.noise
    assert taken is not None
    assert taken.tobytes() == noise.tobytes()


def test_the_three_chunking_keys_are_taken_together():
    options = decode(**CHUNKING).options
    assert options.prev_actions is not None
    np.testing.assert_array_equal(options.prev_actions, CHUNKING["prev_actions"])
    assert (options.inference_delay, options.execution_horizon) == (3, 10)


@pytest.mark.parametrize("name", ["prev_actions", "executed_actions"])
def test_actions_in_float64_become_float32(name: str):
    actions = np.ones((4, 7))
    options = decode(**(CHUNKING if name == "prev_actions" else {}) | {name: actions}).options
    taken = getattr(options, name)
    assert taken.dtype == np.float32
    np.testing.assert_array_equal(taken, actions)


def test_no_action_executed_yet_is_a_valid_report():
    taken = decode(executed_actions=np.zeros((0, 7), np.float32)).options.executed_actions
    assert taken is not None
    assert taken.shape == (0, 7)


@pytest.mark.parametrize(
    "name",
    ["seed", "num_steps", "num_inference_steps", "sampling_params", "adapter_dir", "noise", "deadline_ms", *CHUNKING],
)
def test_nil_means_not_given(name: str):
    request = decode(**{name: None})
    assert request.options == Options()
    assert name not in request.observation


NAN = np.full((2, 3), np.nan, np.float32)

REFUSED_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"seed": True}, "seed is True; expected an integer from -2^63 to 2^64 - 1"),
    ({"seed": np.bool_(True)}, "seed is True; expected an integer"),
    ({"seed": 1.0}, "seed is 1.0; expected an integer"),
    ({"seed": "7"}, "seed is '7'; expected an integer"),
    ({"seed": [7]}, "seed is a list of 1 items; expected an integer"),
    ({"seed": np.array(7)}, "seed is an array of shape () and dtype int64; expected an integer"),
    ({"num_steps": 0}, "num_steps is 0; expected a positive integer"),
    ({"num_steps": -1}, "num_steps is -1; expected a positive integer"),
    ({"num_steps": True}, "num_steps is True; expected a positive integer"),
    ({"num_steps": 2.0}, "num_steps is 2.0; expected a positive integer"),
    ({"num_inference_steps": "5"}, "num_inference_steps is '5'; expected a positive integer"),
    (
        {"sampling_params": {"num_inference_steps": 0}},
        "sampling_params['num_inference_steps'] is 0; expected a positive integer",
    ),
    ({"sampling_params": [5]}, "sampling_params is a list of 1 items; expected a map"),
    (
        {"num_steps": 5, "num_inference_steps": 10},
        "num_steps is 5 and num_inference_steps is 10; they mean the same, so give one",
    ),
    ({"adapter_dir": ""}, "adapter_dir is ''; expected the name of an adapter"),
    ({"adapter_dir": "."}, "adapter_dir is '.'; expected the name"),
    ({"adapter_dir": ".."}, "adapter_dir is '..'; expected the name"),
    ({"adapter_dir": "../secret"}, "adapter_dir is '../secret'; expected the name"),
    ({"adapter_dir": "/etc/passwd"}, "adapter_dir is '/etc/passwd'; expected the name"),
    ({"adapter_dir": "a\\b"}, "adapter_dir is 'a\\\\b'; expected the name"),
    ({"adapter_dir": "fold\n"}, "adapter_dir is 'fold\\n'; expected the name"),
    ({"adapter_dir": "hub:org/name"}, "adapter_dir is 'hub:org/name'; expected the name"),
    ({"adapter_dir": "é"}, "adapter_dir is '\\xe9'; expected the name"),
    ({"adapter_dir": "x" * 65}, "adapter_dir is 'xxx"),
    ({"adapter_dir": 3}, "adapter_dir is 3; expected the name of an adapter this server holds"),
    ({"noise": NOISE, "seed": 1}, "seed and noise are both given"),
    ({"noise": [[0.5]]}, "noise is a list of 1 items; expected a float32 array of shape (action_horizon, action_dim)"),
    ({"noise": NOISE[0]}, "noise is an array of shape (32,) and dtype float32; expected a float32 array"),
    ({"noise": NOISE.astype(np.float64)}, "noise is an array of shape (50, 32) and dtype float64; expected a float32"),
    ({"noise": NAN}, "noise[0, 0] is nan; expected finite numbers"),
    (
        {"noise": NOISE - 1e30},
        "noise[0, 0] is -1e+30; expected a normal draw, of which none is beyond 10; magnitudes up",
    ),
    ({"deadline_ms": 0}, "deadline_ms is 0; expected a positive number of milliseconds"),
    ({"deadline_ms": -1.5}, "deadline_ms is -1.5; expected a positive number"),
    ({"deadline_ms": float("nan")}, "deadline_ms is nan; expected a positive number"),
    ({"deadline_ms": float("inf")}, "deadline_ms is inf; expected a positive number"),
    ({"deadline_ms": True}, "deadline_ms is True; expected a positive number"),
    ({"deadline_ms": "50"}, "deadline_ms is '50'; expected a positive number"),
    ({"inference_delay": 1}, "prev_actions, execution_horizon missing; real-time chunking takes all of prev_actions"),
    (CHUNKING | {"prev_actions": None}, "prev_actions missing; real-time chunking takes all of"),
    (CHUNKING | {"prev_actions": np.zeros((0, 7), np.float32)}, "prev_actions has no rows; when nothing is left"),
    (CHUNKING | {"prev_actions": np.zeros(7, np.float32)}, "prev_actions is an array of shape (7,)"),
    (CHUNKING | {"prev_actions": np.full((1, 2), 1e300)}, "prev_actions[0, 0] is 1e+300; expected finite numbers"),
    (CHUNKING | {"inference_delay": -1}, "inference_delay is -1; expected an integer of 0 or more (control steps)"),
    (CHUNKING | {"inference_delay": 0.13}, "inference_delay is 0.13; expected an integer of 0 or more (control steps)"),
    (CHUNKING | {"execution_horizon": 0}, "execution_horizon is 0; expected an integer of 1 or more"),
    ({"executed_actions": np.zeros((2, 3), np.int64)}, "executed_actions is an array of shape (2, 3) and dtype int64"),
    ({"executed_actions": NAN}, "executed_actions[0, 0] is nan"),
]


@pytest.mark.parametrize(("fields", "complaint"), REFUSED_OPTIONS, ids=[text for _, text in REFUSED_OPTIONS])
def test_options_that_are_not_acceptable_are_named(fields: dict[str, Any], complaint: str):
    with pytest.raises(ObservationError, match=f"^{re.escape(complaint)}") as caught:
        decode(**fields)
    assert len(str(caught.value)) < 250
    assert "\n" not in str(caught.value)


# ---- sessions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "session_id"),
    [
        ("arm-left", "arm-left"),
        (b"arm-left", "arm-left"),
        (7, "7"),
        (-1, "-1"),
        (np.int64(7), "7"),
        (["arm"], "arm"),
        ([b"arm"], "arm"),
        (np.array([7]), "7"),
        (np.array(7), "7"),
        (np.array([[7]]), "7"),
        ([np.array([7])], "7"),
        (None, "default"),
        ("", "default"),
        (b"", "default"),
        ([], "default"),
        ([""], "default"),
        (np.zeros(0, np.int64), "default"),
        ("x" * 256, "x" * 256),
    ],
    ids=str,
)
def test_session_ids_are_compared_as_text(value: Any, session_id: str):
    request = decode(session_id=value)
    assert request.session_id == session_id
    assert "session_id" not in request.observation


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (True, "session_id is True; expected text, bytes or an integer"),
        (1.5, "session_id is 1.5; expected text, bytes or an integer"),
        (["a", "b"], "session_id is a list of 2 items; expected text"),
        ([np.array([1, 2])], "session_id is a list of 1 items; expected text"),
        (np.zeros(5_000_000, np.uint8), "session_id is an array of shape (5000000,)"),
        (np.array([1, 2]), "session_id is an array of shape (2,) and dtype int64; expected text"),
        (np.array([0.5]), "session_id is an array of shape (1,) and dtype float64; expected text"),
        ({"id": 1}, "session_id is a map of 1 items; expected text"),
        (b"\xff", "session_id is '\\ufffd', which is not UTF-8"),
        ("x" * 257, "session_id has 257 characters; at most 256 are accepted"),
    ],
)
def test_other_session_ids_are_refused(value: Any, complaint: str):
    with pytest.raises(ObservationError, match=f"^{re.escape(complaint)}"):
        decode(session_id=value)


# ---- replies ------------------------------------------------------------------------------------------------------


def test_the_openpi_reply_holds_actions_and_timings_and_nothing_else():
    reply = encode_reply(
        encode_bare(np.ones((2, 3), np.float32)), {"infer_ms": 20.5}, {"infer_ms": 21.0, "parse_ms": 0.25}
    )
    assert reply.hex() == (
        "83a7616374696f6e7384c40b5f5f6e6461727261795f5fc3c40464617461c418" + 6 * "0000803f" + "c4056474797065a33c6634"
        "c4057368617065920203ad706f6c6963795f74696d696e6781a8696e6665725f6d73cb4034800000000000"
        "ad7365727665725f74696d696e6782a8696e6665725f6d73cb4035000000000000a870617273655f6d73cb3fd0000000000000"
    )


def test_notes_are_in_the_reply_when_there_are_any():
    reply = encode_reply(encode_bare(np.ones((2, 3), np.float32)), {}, {}, ["prompt truncated"])
    assert unpack(reply)["notes"] == ["prompt truncated"]


def test_timings_are_plain_floats():
    fields = msgpack.unpackb(encode_reply(encode_bare(np.ones((1, 1))), {"infer_ms": np.float32(1.5)}, {"parse_ms": 2}))
    assert fields["policy_timing"] == {"infer_ms": 1.5}
    assert type(fields["server_timing"]["parse_ms"]) is float


@pytest.mark.parametrize(
    "actions",
    [
        np.ones((2, 3)),
        np.ones((2, 3), ">f4"),
        np.asfortranarray(np.ones((2, 3), np.float32)),
        np.ones((4, 3), "f4")[::2],
    ],
    ids=["float64", "big-endian", "Fortran", "slice"],
)
def test_actions_are_little_endian_float32_in_c_order(actions: Any):
    fields = msgpack.unpackb(encode_bare(actions))
    assert fields == {
        b"__ndarray__": True,
        b"data": np.ones((2, 3), "<f4").tobytes(),
        b"dtype": "<f4",
        b"shape": [2, 3],
    }


def test_action_groups_are_a_map_of_arrays():
    groups = {"eef_9d": np.ones((1, 40, 9), np.float32), "gripper_position": np.zeros((1, 40, 1))}
    bare = unpack(encode_bare(groups))
    assert {name: (part.shape, part.dtype) for name, part in bare.items()} == {
        "eef_9d": ((1, 40, 9), np.float32),
        "gripper_position": ((1, 40, 1), np.float32),
    }
    np.testing.assert_equal(unpack(encode_reply(encode_bare(groups), {}, {}))["actions"], bare)


# ---- fuzz ---------------------------------------------------------------------------------------------------------

ODD_VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(
        [np.zeros((2, 2), np.float32), np.array([]), np.array(1), np.int64(1), np.float16(1), [[]], {}, NAN]
    )
)
NAMES = [
    "endpoint", "session_id", "seed", "noise", "num_steps", "num_inference_steps", "sampling_params", "adapter_dir",
    "deadline_ms", "executed_actions", "state", *CHUNKING, b"seed", b"session_id", b"num_steps",
]  # fmt: skip


@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(
        st.sampled_from(NAMES),
        ODD_VALUES | st.lists(ODD_VALUES, max_size=2) | st.dictionaries(st.sampled_from(NAMES), ODD_VALUES, max_size=2),
        max_size=4,
    )
)
def test_any_request_is_decoded_or_refused(fields: dict[Any, Any]):
    try:
        request = decode_request(pack(fields))
    except ProtocolError:
        return
    assert isinstance(request, (Infer, Reset))
