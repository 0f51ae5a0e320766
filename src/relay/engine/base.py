"""The interface between the server and a loaded policy. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from relay.protocol.messages import Actions, Observation, Options

Progress = Callable[[str, float], None]
"""Called with a phase ("loading weights") and the share done, 0 to 1; shown on `/healthz` and the terminal."""


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """What a policy takes and gives, fixed when it is loaded.

    Attributes:
        model: the name in the metadata, such as `pi05`.
        cameras: image keys, in the order the model expects them.
        state_dim: width of `state` in model format; 0 if the policy takes none.
        action_horizon: steps in a chunk.
        action_dim: width of an action.
        num_steps: default number of denoising steps.
        max_batch: most rows that `infer` accepts at once.
        image_resolution: (height, width) that frames are resized to.
        supported_options: names of the fields of `Options` that `infer` honours; a request with any other is refused.
        metadata: further keys for the OpenPI handshake, merged over the six standard ones.
        handshake: the family's vLLM-Omni handshake (`policy_server_config`); empty takes what the other fields tell.
        untold: names of the fields above whose values mean nothing; the handshakes leave them out.
    """

    model: str
    cameras: tuple[str, ...]
    state_dim: int
    action_horizon: int
    action_dim: int
    num_steps: int
    max_batch: int = 8
    image_resolution: tuple[int, int] = (224, 224)
    supported_options: frozenset[str] = frozenset({"num_steps", "seed", "noise"})
    metadata: Mapping[str, Any] = field(default_factory=dict)
    handshake: Mapping[str, Any] = field(default_factory=dict)
    untold: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Note:
    """A remark for the caller; each is told once per session.

    Attributes:
        text: one sentence, safe to show to the sender.
        must_be_told: where no note can travel, the request is refused with this text instead.
        about: what makes two notes the same, for texts that hold a value of the moment; by default the text.
    """

    text: str
    must_be_told: bool = False
    about: str = ""


@runtime_checkable
class Prepared(Protocol):
    """A validated observation ready for the device; each engine has its own type."""

    @property
    def notes(self) -> Sequence[Note]:
        """What the caller should know, such as a truncated prompt or a camera that is masked."""
        ...

    @property
    def ignored(self) -> Sequence[str]:
        """Keys of the observation that mean nothing to this policy; logged once per connection."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """One row of a device batch.

    Attributes:
        prepared: what `Engine.prepare` made of the observation.
        options: what the request asks for besides.
        session: what `StatefulEngine.open_session` made for its session; None for engines without sessions.
    """

    prepared: Any
    options: Options
    session: Any = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row's answer: actions as the caller expects them, float32, own memory."""

    actions: Actions
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """One row's error; the other rows of the batch are unaffected."""

    error: Exception


class Engine(Protocol):
    """A model loaded on a device.

    It may have `remarks`, sentences on what runs otherwise than it could; `/healthz` shows those it has after warm-up.

    One that holds caches on the device may have a method `free_memory()` besides, which lets go of them: it is called
    in the device thread after a batch that ran out of memory, before its rows are tried one by one.
    """

    @property
    def spec(self) -> PolicySpec: ...

    def prepare(self, observation: Observation, options: Options) -> Prepared:
        """Validate, map units, decode, resize and tokenize; CPU only, any thread, no shared state.

        Raises:
            ObservationError: naming the field, what came and what is expected.
        """
        ...

    def batch_key(self, prepared: Any) -> Hashable:
        """Requests with equal keys may share a device batch."""
        ...

    def infer(self, batch: Sequence[Work]) -> Sequence[Chunk | Failure]:
        """Answer every row, in order; device thread only."""
        ...

    def warm_up(self, progress: Progress) -> None:
        """Compile, capture and touch every prepared shape, so that no request pays for it; device thread only."""
        ...


class StatefulEngine(Engine, Protocol):
    """An engine that remembers a session's earlier observations; the server asks whether it has these methods.

    The requests of one session reach `infer` one at a time and in their order. `infer` changes a session only for rows
    that it answers with finite actions: a request that failed has left no trace, and may be run again.
    """

    def open_session(self) -> Any:
        """The memory of a session that starts fresh: a cheap object, filled by `infer`; event loop's thread."""
        ...

    def close_session(self, session: Any) -> None:
        """Free what the session holds; device thread, between batches."""
        ...


class AdaptingEngine(Engine, Protocol):
    """An engine that holds LoRA adapters by name; the server asks whether it has these methods.

    All of them may be called from any thread while requests run. A request keeps the adapter that it was prepared with.
    """

    @property
    def adapters(self) -> Sequence[str]:
        """The names that requests may ask for."""
        ...

    def load_adapter(self, name: str, folder: Path) -> None:
        """Hold one more adapter, or another one under a name.

        Raises:
            ValueError: it cannot be used; what was held before stays.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """Hold an adapter no more.

        Raises:
            ValueError: it isn't held, or must stay.
        """
        ...

    def rescan_adapters(self) -> None:
        """Bring what is held in line with the folders it was loaded from; what cannot be loaded is logged."""
        ...
