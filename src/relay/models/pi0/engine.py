"""The π0 / π0.5 engine: observations to action chunks, in the network's units or in those of the checkpoint's robot.

`prepare` runs on any thread and is CPU work only; `infer` runs on the device thread and answers all its rows together.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relay.engine.adapter_folders import AdapterChoice
from relay.engine.adapter_store import AdapterStore
from relay.engine.base import Chunk, Failure, Note, PolicySpec, Progress, Work
from relay.engine.chunking import Chunking
from relay.engine.decode import DECODERS, choose_decoder
from relay.engine.device import choose_device
from relay.engine.fast_path import TOLERANCES, checked
from relay.engine.frames import Decode
from relay.engine.graphs import graph_budget
from relay.models.pi0.adapters import read_adapter, with_changes
from relay.models.pi0.assemble import assemble
from relay.models.pi0.checkpoint import load_checkpoint
from relay.models.pi0.config import Pi0Config
from relay.models.pi0.fixed_shapes import FixedShapes
from relay.models.pi0.model import Pi0
from relay.models.pi0.resident import ResidentAdapters
from relay.models.pi0.self_check import check_batch, fixed_distance
from relay.models.pi0.shapes import ShapePlan
from relay.models.pi0.tokenizer import PromptTokenizer
from relay.models.pi0.transforms import Pi0Prepared, prepare
from relay.models.pi0.units import RobotUnits
from relay.models.pi0.weights import CheckpointError
from relay.protocol.images import Codec, decode_frame, encode_frame
from relay.protocol.messages import Observation, Options

NO_ADAPTERS = AdapterChoice()
LEROBOTS_CHUNKING = Chunking()
OPTIONS = frozenset({"num_steps", "seed", "noise", "prev_actions", "inference_delay", "execution_horizon"})

REUSE_BYTES = 64 * 2**20
"""Device memory for the tokens of frames that may come again: 64 frames at full size."""

logger = logging.getLogger(__name__)


def load(
    name: str,
    folder: Path,
    *,
    config: str | None,
    robot: str | None,
    tokenizer: Path | None,
    device: str,
    dtype: str,
    num_steps: int | None,
    max_batch: int,
    default_prompt: str | None,
    adapters: AdapterChoice,
    graphs: str,
    compile: bool,
    decode: str,
    rtc_schedule: str,
    rtc_max_guidance_weight: float,
    progress: Progress,
) -> Pi0Engine:
    """Load a checkpoint folder and make it ready to warm up."""
    for option, value, choices in (("graphs", graphs, ("auto", "off")), ("decode", decode, DECODERS)):
        if value not in choices:
            raise CheckpointError(f"--{option} must be {' or '.join(choices)}, got {value!r}")
    chunking = Chunking(cast(Any, rtc_schedule), rtc_max_guidance_weight)
    place = choose_device(device)
    replayed = graphs == "auto" and place.type == "cuda"
    if compile and not replayed:
        raise CheckpointError("--compile goes with CUDA graphs: it needs a GPU and --graphs auto")
    precision = dtype if dtype != "auto" else "bfloat16" if place.type == "cuda" else "float32"
    if precision not in ("float32", "bfloat16"):
        raise CheckpointError(f"--dtype must be auto, float32 or bfloat16, got {dtype!r}")
    checkpoint = load_checkpoint(
        folder,
        config=config,
        robot=robot,
        tokenizer=tokenizer,
        device=place,
        dtype=getattr(torch, precision),
        progress=progress,
        family="pi0" if name == "pi0" else "pi05",
    )
    if num_steps is not None and not 1 <= num_steps <= 50:
        raise CheckpointError(f"--num-steps must be between 1 and 50, got {num_steps}")
    if num_steps is not None:
        checkpoint.model.config = replace(checkpoint.model.config, num_steps=num_steps)
    if place.type == "cpu" and max_batch == 1 and _parameters(checkpoint.model) < _ONE_THREAD_BELOW:
        torch.set_num_threads(1)
    profile, normalization = checkpoint.profile, checkpoint.normalization
    if adapters.any:
        progress("loading adapters", 0.0)
    return Pi0Engine(
        name,
        checkpoint.model,
        checkpoint.tokenizer,
        adapters=adapters,
        robot=RobotUnits(profile, normalization) if profile and normalization else None,
        model_units=normalization is None,
        metadata=checkpoint.metadata,
        max_batch=max_batch,
        default_prompt=default_prompt,
        graphs=replayed,
        compile=compile,
        decode=decode,
        chunking=chunking,
    )


_ONE_THREAD_BELOW = 50_000_000
"""Parameters below which single rows gain nothing from a second CPU thread (measured: 25 ms with one and with two),
while threads that wait for each other make them five times slower as soon as another process shares the cores."""


def _parameters(model: Pi0) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


class Pi0Engine:
    """One loaded network with its prompt tokenizer.

    Args:
        robot: keys and units of the robot that is served; without one, model format only.
        model_units: without a robot, whether vLLM-Omni's keys are taken for model format (see `units.py`).
        metadata: the checkpoint's own, for OpenPI's handshake.
        adapters: those that requests may ask for.
        graphs: prepare fixed shapes at warm-up and replay them, as CUDA graphs where the device has them.
        compile: with graphs, have the small functions between matrix products compiled.
        decode: what decodes JPEG frames, as in `choose_decoder`.
        reuse_bytes: with graphs, device memory for tokens of frames that may come again; 0 computes everything anew.
        chunking: how requests are guided that bring what is left of their previous chunk.

    Attributes:
        model: the network.
        fixed: its prepared shapes, from warm-up on; None without them.
        remarks: sentences on what runs otherwise than it could, for the log and the health check.
        unprepared: how many batches fitted no prepared shape, and ran without.
    """

    def __init__(
        self,
        name: str,
        model: Pi0,
        tokenizer: PromptTokenizer,
        *,
        robot: RobotUnits | None = None,
        model_units: bool = True,
        metadata: Mapping[str, Any] | None = None,
        max_batch: int = 8,
        default_prompt: str | None = None,
        adapters: AdapterChoice = NO_ADAPTERS,
        graphs: bool = False,
        compile: bool = False,
        decode: str = "cpu",
        reuse_bytes: int = REUSE_BYTES,
        chunking: Chunking = LEROBOTS_CHUNKING,
    ) -> None:
        self.remarks: list[str] = []
        self.unprepared = 0
        self._graphs, self._compile, self._decode_choice, self._reuse_bytes = graphs, compile, decode, reuse_bytes
        self._decode: Decode = decode_frame
        self.fixed: FixedShapes | None = None
        base = model
        self._adapters = AdapterStore(adapters, lambda folder: read_adapter(folder, base))
        self._merged = adapters.merged
        if self._merged:
            (adapter,) = self._adapters.adapters
            model = with_changes(model, adapter.source)
        # A merged adapter is in the weights: nothing is asked for beside it.
        self._resident = ResidentAdapters(
            model, lambda: () if self._merged else self._adapters.adapters, adapters.memory_bytes
        )
        self.model, self._tokenizer = model, tokenizer
        self._robot, self._model_units = robot, model_units
        self._default_prompt, self._chunking = default_prompt, chunking
        config = model.config
        self.spec = PolicySpec(
            model=name,
            cameras=config.cameras,
            state_dim=config.action_dim,
            action_horizon=config.action_horizon,
            action_dim=config.action_dim,
            num_steps=config.num_steps,
            max_batch=max_batch,
            image_resolution=(config.vision.image_size, config.vision.image_size),
            metadata={**(metadata or {}), **({"robot": robot.contract} if robot else {})},
            handshake=_handshake(config, robot),
            supported_options=OPTIONS | ({"adapter"} if adapters.any else set()),
        )

    def prepare(self, observation: Observation, options: Options) -> Pi0Prepared:
        """Validate, decode, resize and tokenize."""
        prepared = prepare(
            observation,
            options,
            self.model.config,
            self._tokenizer,
            robot=self._robot,
            model_units=self._model_units,
            default_prompt=self._default_prompt,
            decode=self._decode,
            identify=self.fixed is not None and self._reuse_bytes > 0,
            chunking=self._chunking,
        )
        chosen = self._adapters.choose(options.adapter)
        if chosen is None:
            return prepared
        name, adapter = chosen
        notes = tuple(Note(f"adapter {name} {text}") for text in adapter.notes)
        return replace(prepared, adapter=None if self._merged else adapter, notes=(*prepared.notes, *notes))

    def batch_key(self, prepared: Pi0Prepared) -> Hashable:
        """Rows of any number of cameras, prompt length, steps, seeds, adapters and left-overs share a batch.

        Except with adapters that need a network of their own.
        """
        return prepared.adapter if prepared.adapter and prepared.adapter.alone else None

    def infer(self, batch: Sequence[Work]) -> Sequence[Chunk | Failure]:
        """Actions float32 for every row: (action_horizon, action_dim), or the robot's own width in its units."""
        chunks: dict[int, Chunk] = {}
        for numbers in self._resident.groups([work.prepared.adapter for work in batch]):
            rows = [batch[number] for number in numbers]
            actions = self._sample(rows).numpy()  # (rows, horizon, action_dim)
            for number, work, answer in zip(numbers, rows, actions, strict=True):
                chunks[number] = Chunk(self._in_callers_units(answer, work.prepared))
        return [chunks[number] for number in range(len(batch))]

    @property
    def adapters(self) -> Sequence[str]:
        """The names that requests may ask for."""
        return self._adapters.names

    def load_adapter(self, name: str, folder: Path) -> None:
        """Hold one more adapter, or another one under a name; any thread, requests go on."""
        self._adapters.load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Hold an adapter no more; any thread, requests that have it are answered."""
        self._adapters.unload(name)

    def rescan_adapters(self) -> None:
        """Look through the adapters' folders again; any thread, requests go on."""
        self._adapters.rescan()

    def action_scale(self, prepared: Pi0Prepared) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What the network's 0 is in the units of this row's answer, and how long its 1 is; each per dimension.

        All conversions are affine. Comparisons need it: a robot's dimensions have different units.
        """
        ends = np.stack([np.zeros(self.spec.action_dim, np.float32), np.ones(self.spec.action_dim, np.float32)])
        zero, one = self._in_callers_units(ends, prepared).astype(np.float64)
        return zero, np.abs(one - zero)

    def warm_up(self, progress: Progress) -> None:
        """Run or capture every shape once, so that kernels are chosen and tables made before the first request."""
        device = self.model.action_in.weight.device
        self._decode, remark = choose_decoder(self._decode_choice, device)
        self.remarks += [remark] if remark else []
        self._touch_preparation()
        if self._graphs:
            self.fixed = self._prepare_shapes(progress)
        sizes = range(1, 2 if self.fixed else self.spec.max_batch + 1)
        for rows in sizes:
            progress("warming up", rows / len(sizes))
            actions = self.model.sample_actions(assemble(self.model, *check_batch(self.model.config, rows)))
            if not actions.isfinite().all():
                raise CheckpointError("this checkpoint gives actions that are not finite: its weights are damaged")
        self._warm_up_adapters(progress)
        for remark in self.remarks:
            logger.warning("%s", remark)

    def _warm_up_adapters(self, progress: Progress) -> None:
        """Bring as many adapters to the device as it holds, so that their first requests need not wait for that."""
        held = () if self._merged else self._adapters.names
        (row,), noise = check_batch(self.model.config, 1)
        for done, name in enumerate(held):
            progress("warming up adapters", done / len(held))
            if not self._plain(([replace(row, adapter=self._adapters.get(name))]), noise).isfinite().all():
                raise CheckpointError(f"adapter {name} gives actions that are not finite: its weights are damaged")

    def _prepare_shapes(self, progress: Progress) -> FixedShapes | None:
        """The fast path, if it can be had and gives what the plain one gives; else a remark why not."""
        for compile in (True, False) if self._compile else (False,):
            fixed, remarks = checked(
                "compiled functions" if compile else "prepared shapes",
                lambda compile=compile: self._captured(progress, compile=compile),
                lambda fixed: fixed_distance(fixed, self.model, self._resident),
                TOLERANCES[self.model.token_embedding.dtype],
            )
            self.remarks += remarks
            if fixed is not None:
                return fixed
        return None

    def _captured(self, progress: Progress, *, compile: bool) -> FixedShapes:
        device = self.model.action_in.weight.device
        fixed = FixedShapes(
            self.model,
            ShapePlan.of(self.model.config, self.spec.max_batch, self._shortest_prompt()),
            capture=device.type == "cuda",
            fuse=compile,
            reuse_bytes=self._reuse_bytes,
            budget_bytes=graph_budget(device),
            resident=self._resident,
        )
        fixed.prepare(progress)
        return fixed

    def _sample(self, batch: Sequence[Work]) -> Tensor:
        """(rows, horizon, action_dim) float32 on the CPU; the device has caught up."""
        rows: list[Pi0Prepared] = [work.prepared for work in batch]
        noise = torch.stack([self._noise(work.options) for work in batch])
        if self.fixed is not None:
            actions = self.fixed.sample(rows, noise)
            if actions is not None:
                return actions
            self.unprepared += 1
        return self._plain(rows, noise)

    def _plain(self, rows: Sequence[Pi0Prepared], noise: Tensor) -> Tensor:
        """As `_sample`, without prepared shapes; with adapters, whatever they change."""
        adapters, images = [row.adapter for row in rows], [len(row.images) for row in rows]
        network, inputs = self._resident.apply(assemble(self.model, rows, noise), adapters, images)
        return network.sample_actions(inputs).cpu()

    def _touch_preparation(self) -> None:
        """Decoders and tokenizer load on first use. In model format, which needs no robot."""
        config = self.model.config
        for codec in (Codec.JPEG_Q90, Codec.LOSSLESS):
            frame = encode_frame(np.zeros((64, 64, 3), np.uint8), codec)
            images = dict.fromkeys(config.cameras, frame)
            observation = {"image": images, "state": [0.0] * config.state_dim, "prompt": "warm up"}
            prepare(observation, Options(), config, self._tokenizer, decode=self._decode)

    def _shortest_prompt(self) -> int:
        """Tokens of a prompt of one letter, with a state of one digit per value where it holds the state."""
        return len(self._tokenizer("a", np.full(self.model.config.state_dim, -0.99)).tokens)

    def free_memory(self) -> None:
        """Forget frames that may come again, and give the allocator's unused blocks back, which may be too small."""
        if self.fixed is not None:
            self.fixed.forget()
        self._resident.forget()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _in_callers_units(self, actions: NDArray[np.float32], prepared: Pi0Prepared) -> NDArray[np.float32]:
        """One row's actions in the units that its observation came in."""
        if self._robot is None or prepared.robot_state is None:
            return actions.copy()
        return self._robot.to_robot(actions, prepared.robot_state)

    def _noise(self, options: Options) -> Tensor:
        """Starting noise (action_horizon, action_dim) float32, drawn on the CPU for this row alone.

        So it does not depend on the batch or the device. All dimensions are drawn, the padding ones too.
        """
        if options.noise is not None:
            return torch.tensor(options.noise, dtype=torch.float32)  # a copy: the request's bytes are read-only
        generator = torch.Generator()
        if options.seed is None:
            generator.seed()
        else:
            generator.manual_seed(options.seed)
        return torch.randn(self.model.config.action_horizon, self.model.config.action_dim, generator=generator)


def _handshake(config: Pi0Config, robot: RobotUnits | None) -> dict[str, Any]:
    """The `policy_server_config` of vllm-omni: vllm_omni/deploy/{pi0,pi05}.yaml, with this checkpoint's sizes."""
    handshake: dict[str, Any] = {
        "image_resolution": [config.vision.image_size, config.vision.image_size],
        "n_external_cameras": 1,
        "needs_wrist_camera": True,
        "needs_stereo_camera": False,
        "needs_session_id": False,
        "action_space": robot.action_space if robot else "joint_position",
        "action_horizon": config.action_horizon,
        "action_dim": config.action_dim,
        "max_cameras": len(config.cameras),
    }
    if config.family == "pi05":
        handshake["max_action_dim"] = config.action_dim
    return handshake
