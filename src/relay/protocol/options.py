"""What a request asks for besides its observation: the transport keys, checked once and taken out of it.

It knows no model: how many denoising steps, which adapters and what width are the engine's to check.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from relay.protocol.errors import ObservationError
from relay.protocol.limits import MAX_SESSION_ID_CHARS
from relay.protocol.wording import as_text, quoted, shown


@dataclass(frozen=True, slots=True)
class Options:
    """What a request asks for besides the observation; validated once, when the message is decoded.

    Attributes:
        num_steps: denoising steps; None means the engine's default.
        seed: starting-noise seed in [-2^63, 2^64); None draws a fresh one.
        noise: starting noise float32 in the model's own shape `(horizon, action_dim)`, magnitudes up to 1,000; never
            together with `seed`.
        adapter: name of a LoRA adapter the server holds.
        deadline_ms: how long the reply is still useful, counted from the arrival of the request.
        prev_actions, inference_delay, execution_horizon: real-time chunking; all three or none.
        executed_actions: float32 `(n, action_dim)` really executed since the last observation.
    """

    num_steps: int | None = None
    seed: int | None = None
    noise: NDArray[np.float32] | None = None
    adapter: str | None = None
    deadline_ms: float | None = None
    prev_actions: NDArray[np.float32] | None = None
    inference_delay: int | None = None
    execution_horizon: int | None = None
    executed_actions: NDArray[np.float32] | None = None


def take_options(observation: dict[str, Any]) -> Options:
    """Remove the transport keys from `observation` and return their values; a key with nil counts as absent.

    Raises:
        ObservationError: naming the key, what came and what is expected.
    """
    if _OPTION_KEYS.isdisjoint(observation):
        return _NONE
    seed = _take_seed(observation)
    noise = _take_noise(observation)
    if seed is not None and noise is not None:
        raise ObservationError("seed and noise are both given; noise is the start of the sampling, so leave seed out")
    prev_actions, inference_delay, execution_horizon = _take_chunking(observation)
    return Options(
        num_steps=_take_num_steps(observation),
        seed=seed,
        noise=noise,
        adapter=_take_adapter(observation),
        deadline_ms=_take_deadline(observation),
        prev_actions=prev_actions,
        inference_delay=inference_delay,
        execution_horizon=execution_horizon,
        executed_actions=_take_array(observation, "executed_actions", "(n, action_dim)"),
    )


OPTION_KEYS: Final = (
    "num_steps",
    "num_inference_steps",
    "sampling_params",
    "seed",
    "noise",
    "adapter_dir",
    "deadline_ms",
    "prev_actions",
    "inference_delay",
    "execution_horizon",
    "executed_actions",
)
"""Every key of a request that is an option and no part of what the robot sees."""

CHUNKING_KEYS: Final = ("prev_actions", "inference_delay", "execution_horizon")
"""Those of real-time chunking: all three or none."""

_OPTION_KEYS: Final = frozenset(OPTION_KEYS)

_NONE: Final = Options()


def take_session_id(observation: dict[str, Any]) -> str:
    """Remove `session_id` and return it as text; missing, nil or empty means `default`.

    Raises:
        ObservationError: for other types than text, bytes, an integer, or one of those in a list or array.
    """
    value = observation.pop("session_id", None)
    if value is None:
        return "default"
    name = _only_element(value)
    if isinstance(name, bytes):
        try:
            name = name.decode()
        except UnicodeDecodeError:
            raise ObservationError(f"session_id is {quoted(name)}, which is not UTF-8") from None
    number = _integer(name)
    if number is not None:
        name = str(number)
    if name is None:
        return "default"
    if not isinstance(name, str):
        raise ObservationError(f"session_id is {shown(value)}; expected text, bytes or an integer")
    if len(name) > MAX_SESSION_ID_CHARS:
        raise ObservationError(f"session_id has {len(name)} characters; at most {MAX_SESSION_ID_CHARS} are accepted")
    return name or "default"


def _only_element(value: Any) -> Any:
    """What a list or array of one element holds; nil for an empty one; other values as they are."""
    if isinstance(value, np.ndarray):
        array: Any = cast("NDArray[Any]", value)
        return array if array.size > 1 else next(array.flat, None)
    if isinstance(value, (list, tuple)):
        parts = cast("list[Any]", value)
        return parts if len(parts) > 1 else _only_element(next(iter(parts), None))
    return value


def _take_seed(observation: dict[str, Any]) -> int | None:
    value = observation.pop("seed", None)
    if value is None:
        return None
    seed = _integer(value)
    if seed is None or not -(2**63) <= seed < 2**64:
        raise ObservationError(f"seed is {shown(value)}; expected an integer from -2^63 to 2^64 - 1")
    return seed


MOST_NOISE: Final = 1000.0
"""Largest magnitude of a starting noise: a normal draw stays below 10, and networks in bfloat16 survive this one."""


def _take_noise(observation: dict[str, Any]) -> NDArray[np.float32] | None:
    noise = _take_array(observation, "noise", "(action_horizon, action_dim)", exact=True)
    if noise is not None and np.abs(noise).max(initial=0) > MOST_NOISE:
        row, column = np.argwhere(np.abs(noise) > MOST_NOISE)[0].tolist()
        raise ObservationError(
            f"noise[{row}, {column}] is {noise[row, column]:g}; expected a normal draw, of which none is beyond 10; "
            f"magnitudes up to {MOST_NOISE:g} are taken"
        )
    return noise


def _take_num_steps(observation: dict[str, Any]) -> int | None:
    """One value under any of its three names, or the same under several."""
    given = {name: observation.pop(name, None) for name in ("num_steps", "num_inference_steps")}
    sampling_params = observation.pop("sampling_params", None)
    if isinstance(sampling_params, dict):
        params = cast("dict[str, Any]", sampling_params).copy()
        given["sampling_params['num_inference_steps']"] = params.pop("num_inference_steps", None)
        if params:  # left for whoever reports the keys that a policy does not know
            observation["sampling_params"] = params
    elif sampling_params is not None:
        raise ObservationError(f"sampling_params is {shown(sampling_params)}; expected a map")
    found: dict[str, int] = {}
    for name, value in given.items():
        if value is None:
            continue
        steps = _integer(value)
        if steps is None or steps < 1:
            raise ObservationError(f"{name} is {shown(value)}; expected a positive integer")
        found[name] = steps
    if len(set(found.values())) > 1:
        values = " and ".join(f"{name} is {steps}" for name, steps in found.items())
        raise ObservationError(f"{values}; they mean the same, so give one")
    return next(iter(found.values()), None)


def _take_adapter(observation: dict[str, Any]) -> str | None:
    value = observation.pop("adapter_dir", None)
    if value is None:
        return None
    name = as_text(value)
    if not isinstance(name, str):
        raise ObservationError(f"adapter_dir is {shown(value)}; expected the name of an adapter this server holds")
    if not _ADAPTER_NAME.fullmatch(name) or name in (".", ".."):
        raise ObservationError(
            f"adapter_dir is {quoted(name)}; expected the name of an adapter this server holds "
            "(letters, digits, '.', '_' and '-', at most 64), not a path"
        )
    return name


_ADAPTER_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def _take_deadline(observation: dict[str, Any]) -> float | None:
    value = observation.pop("deadline_ms", None)
    if value is None:
        return None
    is_number = isinstance(value, _NUMBERS) and not isinstance(value, bool)
    deadline = float(value) if is_number else math.nan
    if not (math.isfinite(deadline) and deadline > 0):
        raise ObservationError(f"deadline_ms is {shown(value)}; expected a positive number of milliseconds")
    return deadline


_INTEGERS: Final[tuple[Any, ...]] = (int, np.integer)
_NUMBERS: Final[tuple[Any, ...]] = (int, float, np.integer, np.floating)


def _take_chunking(
    observation: dict[str, Any],
) -> tuple[NDArray[np.float32] | None, int | None, int | None]:
    given = {name: observation.get(name) is not None for name in CHUNKING_KEYS}
    together = ", ".join(CHUNKING_KEYS)
    if any(given.values()) and not all(given.values()):
        missing = ", ".join(name for name, is_given in given.items() if not is_given)
        raise ObservationError(f"{missing} missing; real-time chunking takes all of {together}, or none")
    prev_actions = _take_array(observation, "prev_actions", "(n, action_dim)")
    if prev_actions is not None and len(prev_actions) == 0:
        raise ObservationError(
            f"prev_actions has no rows; when nothing is left of the previous chunk, leave out {together}"
        )
    return (
        prev_actions,
        _take_count(observation, "inference_delay", least=0),
        _take_count(observation, "execution_horizon", least=1),
    )


def _take_count(observation: dict[str, Any], name: str, least: int) -> int | None:
    value = observation.pop(name, None)
    if value is None:
        return None
    count = _integer(value)
    if count is None or count < least:
        raise ObservationError(f"{name} is {shown(value)}; expected an integer of {least} or more (control steps)")
    return count


def _take_array(
    observation: dict[str, Any], name: str, shape: str, *, exact: bool = False
) -> NDArray[np.float32] | None:
    """A finite float32 matrix; `exact` refuses to convert other floats, whose rounding would change the result."""
    value = observation.pop(name, None)
    if value is None:
        return None
    expected = f"a float32 array of shape {shape}"
    if not isinstance(value, np.ndarray):
        raise ObservationError(f"{name} is {shown(value)}; expected {expected}")
    array = cast("NDArray[Any]", value)
    if array.ndim != 2 or array.dtype.kind != "f" or (exact and array.dtype != np.float32):
        raise ObservationError(f"{name} is {shown(array)}; expected {expected}")
    with np.errstate(over="ignore"):
        matrix = array.astype(np.float32, copy=False)
    if not np.isfinite(matrix).all():
        row, column = np.argwhere(~np.isfinite(matrix))[0].tolist()
        raise ObservationError(f"{name}[{row}, {column}] is {array[row, column]}; expected finite numbers")
    return matrix


def _integer(value: Any) -> int | None:
    """The value as an int; None for bool, float, text, lists and arrays."""
    return int(value) if isinstance(value, _INTEGERS) and not isinstance(value, bool) else None
