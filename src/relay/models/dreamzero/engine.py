"""The DreamZero engine: one robot's episode at a time, each request going on from what its session has seen.

`prepare` runs on any thread and is CPU work only; `infer` runs on the device thread. A session changes when its
request is answered and at no other time.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relay.engine.adapter_folders import AdapterChoice
from relay.engine.base import Chunk, Failure, PolicySpec, Progress, Work
from relay.engine.decode import DECODERS, choose_decoder
from relay.engine.device import choose_device
from relay.engine.frames import Decode
from relay.engine.weights import CheckpointError
from relay.engine.worker import NonFiniteActions, lacks_memory
from relay.models.dreamzero.checkpoint import Checkpoint, load_checkpoint
from relay.models.dreamzero.footprint import free_memory
from relay.models.dreamzero.handshake import handshake
from relay.models.dreamzero.model import Imagined, Seen, Steps
from relay.models.dreamzero.observation import camera_keys, state_key
from relay.models.dreamzero.preview import resting_state
from relay.models.dreamzero.schedule import COMPUTED, STEPS, DynamicSteps, FixedSteps
from relay.models.dreamzero.sessions import DreamZeroSession, Residents, Snapshot
from relay.models.dreamzero.transforms import DreamZeroPrepared, prepare
from relay.models.dreamzero.units import to_robot
from relay.protocol.images import Codec, decode_frame, encode_frame
from relay.protocol.messages import Observation, Options

OPTIONS = frozenset({"num_steps", "seed", "noise"})
SCHEDULES = ("fixed", "dynamic")
EVALUATIONS = 8
"""Passes of the network for a chunk, where nothing else is said; the reference's own."""

REFERENCE_SEED = 1140
"""Of the video's noise where a request brings that of the actions; the reference draws all noise with it."""

NO_ADAPTERS = AdapterChoice()

_MARGIN = 0.05
"""Share of the free memory that sessions leave alone besides what an inference works in."""

_MOST_RESIDENTS = 16
"""Sessions on the device by default, though more may fit: requests run one after the other, so that no device answers
as many robots in time, and those that went away leave theirs behind."""

_NOT_TOLD = ("model", "cameras", "state_dim", "action_horizon", "action_dim", "num_steps")

_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)


def load(
    name: str,
    folder: Path,
    *,
    embodiment: str | None,
    cameras: str | None,
    schedule: str,
    session_memory: float | None,
    tokenizer: Path | None,
    device: str,
    dtype: str,
    num_steps: int | None,
    max_batch: int,
    default_prompt: str | None,
    adapters: AdapterChoice,
    graphs: str,
    decode: str,
    progress: Progress,
) -> DreamZeroEngine:
    """Load a checkpoint folder and make it ready to warm up.

    `max_batch` is not used: every robot has frames and a memory of its own, so requests run one after the other.
    """
    for option, value, choices in (
        ("schedule", schedule, SCHEDULES),
        ("graphs", graphs, ("auto", "off")),
        ("decode", decode, DECODERS),
        ("dtype", dtype, ("auto", "float32", "bfloat16")),
    ):
        if value not in choices:
            raise CheckpointError(f"--{option} must be {' or '.join(choices)}, got {value!r}")
    if num_steps is not None and num_steps not in COMPUTED:
        raise CheckpointError(f"--num-steps of {name} must be {_either(COMPUTED)}, got {num_steps}")
    if num_steps is not None and schedule == "dynamic":
        raise CheckpointError(
            "--num-steps and --schedule dynamic exclude each other: the network itself tells when it rests"
        )
    if session_memory is not None and not math.isfinite(session_memory):
        raise CheckpointError(f"--session-memory must be a number of GB, got {session_memory}")
    if adapters.any:
        raise CheckpointError(
            f"{name} takes no LoRA adapters yet: leave --adapter and --adapter-root out, or merge one into the weights"
        )
    place = choose_device(device)
    precision = dtype if dtype != "auto" else "bfloat16" if place.type == "cuda" else "float32"
    checkpoint = load_checkpoint(
        folder,
        embodiment=embodiment,
        cameras=cameras,
        tokenizer=tokenizer,
        device=place,
        dtype=getattr(torch, precision),
        progress=progress,
    )
    return DreamZeroEngine(
        name,
        checkpoint,
        evaluations=num_steps or EVALUATIONS,
        dynamic=schedule == "dynamic",
        session_memory=None if session_memory is None else int(session_memory * 1e9),
        default_prompt=default_prompt,
        decode=decode,
        graphs_wanted=graphs == "auto" and place.type == "cuda",
    )


class DreamZeroEngine:
    """One loaded network and the sessions of its robots.

    Args:
        evaluations: passes of the network for requests that don't say.
        dynamic: such requests let the network rest where it changes little, and `evaluations` is not used.
        session_memory: most bytes on the device for keys and values of sessions; None takes what is free after warm-up,
            for 16 of them at most.
        decode: what decodes JPEG frames, as in `choose_decoder`.
        graphs_wanted: the device has CUDA graphs and they were not turned off; this engine has none yet, and says so.

    Attributes:
        model: the network.
        residents: the sessions that are on the device.
        remarks: sentences on what runs otherwise than it could, for the log and the health check.

    Raises:
        CheckpointError: `session_memory` is too little for one session.
    """

    def __init__(
        self,
        name: str,
        checkpoint: Checkpoint,
        *,
        evaluations: int = EVALUATIONS,
        dynamic: bool = False,
        session_memory: int | None = None,
        default_prompt: str | None = None,
        decode: str = "cpu",
        graphs_wanted: bool = False,
    ) -> None:
        self.model, self._tokenizer, self._recipe = checkpoint.model, checkpoint.tokenizer, checkpoint.recipe
        self._camera_set, self._footprint = checkpoint.camera_set, checkpoint.footprint
        one = self._footprint.session
        if session_memory is not None and session_memory < one:
            raise CheckpointError(
                f"--session-memory {session_memory / 1e9:g}: one session takes {_enough(one)} GB; give at least that"
            )
        self.residents = Residents(one, session_memory)
        self._dynamic = dynamic
        self._default_prompt = default_prompt
        self._decode_choice = decode
        self._decode: Decode = decode_frame
        self.remarks: list[str] = []
        if dynamic:
            self.remarks.append(
                "--schedule dynamic: the network rests where it changes little, so actions are not exact"
            )
        if graphs_wanted:
            self.remarks.append(f"{name} runs without CUDA graphs: every request launches its kernels one by one")
        told = handshake(self._recipe)
        self.spec = PolicySpec(
            model=name,
            cameras=self._recipe.cameras,
            state_dim=sum(part.width for part in self._recipe.state),
            action_horizon=self._recipe.horizon,
            action_dim=self._recipe.action_dim,
            num_steps=STEPS if dynamic else evaluations,
            max_batch=1,
            image_resolution=self._recipe.views.received,
            supported_options=OPTIONS,
            metadata=told,
            handshake=told,
            untold=frozenset(_NOT_TOLD),
        )

    def prepare(self, observation: Observation, options: Options) -> DreamZeroPrepared:
        """Validate, decode, crop, resize, stitch, tokenize and scale."""
        return prepare(
            observation,
            options,
            self._recipe,
            self._tokenizer,
            camera_set=self._camera_set,
            default_prompt=self._default_prompt,
            decode=self._decode,
        )

    def batch_key(self, prepared: DreamZeroPrepared) -> Hashable:
        """Rows never share a pass, so it doesn't matter."""
        return None

    def open_session(self) -> DreamZeroSession:
        """An episode that begins with the next observation."""
        return DreamZeroSession()

    def close_session(self, session: DreamZeroSession) -> None:
        """Free what it holds on the device."""
        self.residents.forget(session)
        session.restore(Snapshot())

    def infer(self, batch: Sequence[Work]) -> Sequence[Chunk | Failure]:
        """Actions (horizon, action_dim) float32 in the robot's units, one row after the other.

        A row without a session is an episode of one observation.
        """
        return [self._answer(work) for work in batch]

    def action_scale(self, prepared: DreamZeroPrepared) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What the network's 0 is in the units of this row's answer, and how long its 1 is there.

        Both (horizon, action_dim). Comparisons need it: a robot's dimensions have different units.
        """
        shape = (self._recipe.horizon, self._recipe.action_width)
        zero, one = (
            to_robot(np.full(shape, value, np.float32), prepared.robot_state, self._recipe).astype(np.float64)
            for value in (0, 1)
        )
        return zero, np.abs(one - zero)

    def warm_up(self, progress: Progress) -> None:
        """Go through one window, so that kernels are chosen before the first request; then see how many fit."""
        self._decode, remark = choose_decoder(self._decode_choice, self.model.device)
        self.remarks += [remark] if remark else []
        prepared = self._touch_preparation()
        config = self.model.config
        calls = 1 + config.window_frames // config.block_frames if self.model.device.type == "cuda" else 2
        session = self.open_session()
        for number in range(calls):
            progress("warming up", number / calls)
            answer = self._answer(Work(prepared, Options(seed=0), session))
            if isinstance(answer, Failure):
                if isinstance(answer.error, NonFiniteActions):
                    raise CheckpointError(
                        "this checkpoint gives actions that are not finite: its weights are damaged"
                    ) from answer.error
                raise answer.error
        self.close_session(session)
        self._set_limit()
        for remark in self.remarks:
            logger.warning("%s", remark)

    def _set_limit(self) -> None:
        """By default as many sessions as are of use may take what is free, but for what a pass needs and a margin."""
        self._give_back()
        free = free_memory(self.model.device)
        residents = self.residents
        most = _MOST_RESIDENTS * residents.session_bytes
        room = most if free is None else int(free * (1 - _MARGIN)) - self._footprint.work
        if residents.limit is None:
            residents.limit = min(max(room, residents.session_bytes), most)
        elif free is not None and residents.limit > room:
            self.remarks.append(
                f"--session-memory {residents.limit / 1e9:g}: only {room / 1e9:.3g} GB are free for sessions"
            )
        logger.info("%s has room for %d sessions at a time", self.model.device, residents.most)

    def _answer(self, work: Work) -> Chunk | Failure:
        """One row, with its session's memory; a failure leaves that as it was."""
        prepared: DreamZeroPrepared = work.prepared
        session: DreamZeroSession = self.open_session() if work.session is None else work.session
        try:
            self.residents.admit(session)
            imagined = self._with_room(session, lambda: self._imagine(session, prepared, work.options))
            actions = imagined.actions.float().cpu().numpy()
            if not np.isfinite(actions).all():
                raise NonFiniteActions("the network's actions are not finite; such a chunk is not sent to a robot")
            chunk = Chunk(to_robot(actions, prepared.robot_state, self._recipe))
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # the error outlives the row, its tensors need not
            return Failure(error)
        finally:
            if work.session is None:
                self.residents.forget(session)
        session.remember(imagined.episode, prepared.pictures)
        return chunk

    def _imagine(self, session: DreamZeroSession, prepared: DreamZeroPrepared, options: Options) -> Imagined:
        memory = session.memory
        clip = session.recent.clip(prepared.pictures)
        seen = Seen(torch.from_numpy(clip), torch.from_numpy(prepared.state), prepared.prompt)
        if self.model.begins_anew(memory.episode, seen):
            seen = seen._replace(frames=seen.frames[-1:])  # the network itself would take the oldest of eight
        return self.model.infer(memory, seen, self._noise(options), self._steps(prepared.num_steps))

    def _with_room(self, session: DreamZeroSession, run: Callable[[], _Result]) -> _Result:
        """Run once more, with all other sessions set aside, if the device has no room after all."""
        try:
            return run()
        except Exception as error:
            if not lacks_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
        count = self.residents.evict_all_but(session)
        self._give_back()
        logger.warning("the device ran out of memory: %d other sessions were set aside", count)
        return run()

    def _steps(self, asked: int | None) -> Steps:
        """Which steps run the network: as many as a request asks for, always the same ones."""
        if asked is None and self._dynamic:
            return DynamicSteps()
        return FixedSteps(asked or self.spec.num_steps)

    def _noise(self, options: Options) -> tuple[Tensor, Tensor]:
        """Starting noise of video (1, channels, frames, height, width) and actions (1, horizon, action_width).

        Drawn as the reference draws it: bfloat16 on the device, from two generators with one seed. A request that
        brings the actions' noise gets the reference's own for the video, so that it knows all of its start.
        """
        config, recipe = self.model.config, self._recipe
        height, width = config.video_size or recipe.views.picture
        latent = (height // config.video.space, width // config.video.space)
        video = (1, config.dit.out_channels, config.block_frames, *latent)
        if options.noise is not None:
            return self._drawn(video, REFERENCE_SEED), torch.tensor(options.noise)[None]
        return self._drawn(video, options.seed), self._drawn((1, recipe.horizon, recipe.action_width), options.seed)

    def _drawn(self, shape: tuple[int, ...], seed: int | None) -> Tensor:
        device = self.model.device
        generator = torch.Generator(device)
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).float()

    def _touch_preparation(self) -> DreamZeroPrepared:
        """Decoders, resizing and tokenizer load on first use; returns a row of black frames."""
        recipe = self._recipe
        black = np.zeros((*recipe.views.received, 3), np.uint8)
        state = {state_key(part): resting_state(recipe)[part.key] for part in recipe.state}
        rows: list[DreamZeroPrepared] = []
        for codec in (Codec.JPEG_Q90, Codec.LOSSLESS):
            frames = dict.fromkeys(camera_keys(recipe, self._camera_set).values(), encode_frame(black, codec))
            rows.append(self.prepare({**frames, **state, "prompt": "warm up"}, Options()))
        return rows[0]

    def _give_back(self) -> None:
        """Return the allocator's unused blocks to the device."""
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()


def _enough(count: int) -> str:
    """Bytes in GB with three digits, rounded up, so that whoever gives that number gives enough."""
    unit = 10 ** max(len(str(count)) - 3, 0)
    return f"{-(-count // unit) * unit / 1e9:g}"


def _either(numbers: Iterable[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}"
