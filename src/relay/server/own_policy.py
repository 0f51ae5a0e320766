"""Any object with `infer(observation)` as a policy to serve: one row a batch, no sessions.

Knows what such a policy sees and how its answers are read; the server around it is that of every engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from relay.engine.base import Chunk, Failure, Note, PolicySpec, Progress, Work
from relay.protocol.errors import ObservationError
from relay.protocol.image_header import image_header, is_image_file
from relay.protocol.images import decode_images, is_image_key
from relay.protocol.limits import MAX_DECODED_BYTES
from relay.protocol.messages import Actions, Observation, Options
from relay.protocol.msgpack_numpy import pack
from relay.protocol.wording import child_path, shown
from relay.server import app
from relay.server.settings import ServerSettings
from relay.side_by_side import side_by_side

logger = logging.getLogger(__name__)


class OwnPolicy(Protocol):
    """What can be served: `infer`, and if it likes `spec`, a `PolicySpec`, or `metadata`, a map."""

    def infer(self, observation: dict[str, Any], /) -> Any:
        """The next actions, `(horizon, dim)`, as one array, named groups of arrays, or either under `actions`.

        Called for one observation at a time, always in the same thread, which is not the main one.

        Raises:
            ObservationError: the observation is not acceptable; the sender reads the text.
            Exception: anything else fails this request only, and its sender reads of an internal error.
        """
        ...


def serve(
    policy: OwnPolicy, *, metadata: Mapping[str, Any] | None = None, settings: ServerSettings | None = None
) -> None:
    """Serve a policy of your own until SIGTERM or SIGINT, then finish what is running and return.

    Args:
        policy: `infer` gets a dict of its own with the keys that the client sent, `session_id` and `endpoint` taken
            out. Frames under image keys are decoded to `(H, W, 3)` uint8 RGB; arrays may be read-only. Options of the
            request are among the keys if `policy.spec.supported_options` names them; others are refused.
        metadata: what clients read on connecting, for a policy without `spec`; by default its `metadata`, as openpi's
            policies have it.
        settings: address and bounds; by default 127.0.0.1:8000.

    Raises:
        TypeError: for a policy without `infer`, a `spec` that is none, or metadata that cannot be sent.
        SystemExit: with a message and code 1, if the address cannot be bound.
    """
    engine = OwnEngine(policy, metadata)
    app.serve(lambda progress: engine, settings)


@dataclass(frozen=True, slots=True)
class Seen:
    """An observation as `OwnPolicy.infer` gets it."""

    observation: dict[str, Any]
    notes: Sequence[Note] = ()
    ignored: Sequence[str] = ()


class OwnEngine:
    """The engine around one `OwnPolicy`; arguments and errors as in `serve`."""

    def __init__(self, policy: OwnPolicy, metadata: Mapping[str, Any] | None = None) -> None:
        if not callable(getattr(policy, "infer", None)):
            raise TypeError(f"{type(policy).__name__} cannot be served: it has no method infer(observation)")
        self._policy = policy
        self._left_out: set[str] = set()
        self.spec = _spec(policy, metadata)

    def prepare(self, observation: Observation, options: Options) -> Seen:
        """Decode the frames and add the options."""
        size = sum(_decoded_bytes(value, key) for key, value in observation.items() if is_image_key(key))
        if size > MAX_DECODED_BYTES:
            raise ObservationError(
                f"the encoded frames hold {size >> 20} MiB of pixels; at most {MAX_DECODED_BYTES >> 20} MiB are taken"
            )
        return Seen(decode_images(observation, side_by_side) | self._asked(options))

    def batch_key(self, prepared: Seen) -> str:
        """All alike: `spec.max_batch` keeps each in a batch of its own."""
        return "own"

    def infer(self, batch: Sequence[Work]) -> Sequence[Chunk | Failure]:
        """Ask the policy, row by row; what it raises is for the worker, who knows a lost device from a bad row."""
        return [Chunk(self._actions(self._policy.infer(work.prepared.observation))) for work in batch]

    def warm_up(self, progress: Progress) -> None:
        """Nothing: what a first observation would be is not known here."""

    def _asked(self, options: Options) -> dict[str, Any]:
        """The options of a request that the policy takes, by the keys that clients send them under."""
        given = {option.name: getattr(options, option.name) for option in fields(options)}
        return {
            "adapter_dir" if name == "adapter" else name: value
            for name, value in given.items()
            if value is not None and name in self.spec.supported_options
        }

    def _actions(self, answer: Any) -> Actions:
        groups = answer
        if isinstance(answer, Mapping) and "actions" in answer:
            self._log_left_out(cast("Mapping[str, Any]", answer))
            groups = cast("Mapping[str, Any]", answer)["actions"]
        if not isinstance(groups, Mapping):
            return self._chunk(groups)
        if not groups:
            raise TypeError("infer returned an empty map; expected actions")
        return {str(name): _rows(group, str(name)) for name, group in cast("Mapping[Any, Any]", groups).items()}

    def _chunk(self, actions: Any) -> NDArray[np.float32]:
        rows = _rows(actions, "actions")
        width = self.spec.action_dim
        if "action_dim" not in self.spec.untold and rows.shape[1] != width:
            raise TypeError(f"infer returned actions of shape {rows.shape}; this policy's spec says (horizon, {width})")
        return rows

    def _log_left_out(self, answer: Mapping[str, Any]) -> None:
        """Once for each key: openpi's policies return their state and timings too, which no client waits for."""
        fresh = answer.keys() - self._left_out - {"actions"}
        if fresh:
            self._left_out |= fresh
            logger.info(
                "only 'actions' is sent of what infer returns; left out: %s", ", ".join(sorted(map(str, fresh)))
            )


def _spec(policy: OwnPolicy, metadata: Mapping[str, Any] | None) -> PolicySpec:
    kind = type(policy).__name__
    spec = getattr(policy, "spec", None)
    if spec is not None:
        if not isinstance(spec, PolicySpec):
            raise TypeError(f"{kind}.spec is {shown(spec)}; expected a relay.server.PolicySpec")
        if metadata is not None:
            raise TypeError(f"{kind} has a spec, whose own metadata is what clients read; leave metadata out")
        return replace(spec, max_batch=1)
    told: Any = getattr(policy, "metadata", {}) if metadata is None else metadata
    if not isinstance(told, Mapping):
        raise TypeError(f"metadata is {shown(told)}; expected a map")
    further = dict(cast("Mapping[str, Any]", told))
    pack(further)  # raises now what would fail for every client
    standard: dict[str, Any] = {
        name: _standard(name, further.pop(name, None), blank) for name, blank in _STANDARD.items()
    }
    untold = frozenset(name for name, value in standard.items() if value is None)
    values: dict[str, Any] = {**_STANDARD, "model": kind} | {k: v for k, v in standard.items() if v is not None}
    return PolicySpec(**values, max_batch=1, supported_options=frozenset(), metadata=further, untold=untold - {"model"})


_STANDARD: Final[Mapping[str, Any]] = {
    "model": "",
    "cameras": (),
    "state_dim": 0,
    "action_horizon": 0,
    "action_dim": 0,
    "num_steps": 0,
}
"""The standard keys of OpenPI's metadata and blanks for them; an untold one is left out, as openpi's server does."""


def _standard(name: str, value: Any, blank: Any) -> Any:
    """The caller's value, in the type of its blank; None if there is none."""
    if isinstance(value, list):
        value = tuple(cast("list[Any]", value))
    if value is None or (isinstance(value, type(blank)) and not isinstance(value, bool)):
        return value
    expected = {str: "text", tuple: "a list of names", int: "an integer"}[type(blank)]
    raise TypeError(f"metadata['{name}'] is {shown(value)}; expected {expected}")


def _decoded_bytes(value: Any, name: str) -> int:
    """Memory that the encoded frames in a value take once decoded, from their headers."""
    if isinstance(value, bytes):
        return image_header(value, name).decoded_bytes if is_image_file(value) else 0
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        parts = cast("dict[Any, Any]", value).items()
    elif isinstance(value, list):
        parts = enumerate(cast("list[Any]", value))
    else:
        return 0
    return sum(_decoded_bytes(part, child_path(name, key)) for key, part in parts)


def _rows(value: Any, name: str) -> NDArray[np.float32]:
    """A copy, since a policy may use its array again."""
    array: NDArray[Any] = np.asarray(value)
    if array.dtype.kind not in "biuf" or array.ndim != 2 or array.size == 0:
        raise TypeError(f"infer returned {name} as {shown(array)}; expected numbers of shape (horizon, dim)")
    with np.errstate(over="ignore"):  # what becomes infinite is refused by the worker
        return np.array(array, np.float32)
