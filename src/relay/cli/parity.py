"""`relay parity`: our actions beside those that a reference implementation gave for the same input and noise."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from relay.cli.extras import missing_for_models
from relay.cli.reference_file import Recorded, Reference, read_reference

if TYPE_CHECKING:
    from relay.engine.base import Engine, Prepared
    from relay.models.report import Report

Actions: TypeAlias = "NDArray[np.float64] | Mapping[str, NDArray[np.float64]]"
"""(horizon, dimensions), or such an array for each action group."""


@dataclass(frozen=True)
class Parity:
    """Compare this engine with recorded inputs, noise and actions of the reference.

    Ends with code 0 if every value is within the tolerance, 1 if one is not, 2 if nothing could be compared.
    """

    checkpoint: Path
    """Folder of the checkpoint that the reference was recorded with."""

    reference: Path
    """The recording, .npz or .safetensors; docs/parity.md tells how to make one."""

    config: str | None = None
    """openpi's configuration that the checkpoint was trained with, such as pi05_droid, where the folder doesn't say."""

    robot: str | None = None
    """Robot profile, by name or as a YAML file; by default the configuration's or the checkpoint's own."""

    embodiment: str | None = None
    """For groot: which of the robots that the checkpoint was trained on, by its tag; needed where it knows several."""

    tokenizer: Path | None = None
    """Tokenizer file, where the checkpoint folder has none."""

    device: str = "auto"
    """Torch device, such as cpu or cuda:1; auto takes a GPU where there is one."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32 or bfloat16; only float32 shows small mistakes."""

    tolerance: float | None = None
    """Largest distance of any value, in standard deviations of the reference's actions; by default what rounding alone
    explains: 1e-4 where both compute in float32."""

    def run(self) -> int:
        missing = missing_for_models("comparing")
        if missing:
            return _fail(missing)
        from relay.protocol.errors import ObservationError

        try:
            reference = read_reference(self.reference)
            report = self._inspect()
            tolerance = self._tolerance(report, reference)
            engine = self._load(report)
            comparison = compare(engine, reference)
        except (ObservationError, ValueError, OSError) as error:
            return _fail(str(error))
        return _tell(comparison, reference, tolerance, self.dtype)

    def _inspect(self) -> Report:
        from relay.models import registry

        report = registry.inspect(
            None,
            checkpoint=self.checkpoint,
            config=self.config,
            robot=self.robot,
            embodiment=self.embodiment,
            tokenizer=self.tokenizer,
        )
        if report.problems or report.model is None:
            raise ValueError("\n".join(report.problems) or f"{self.checkpoint} is no checkpoint of a known model")
        return report

    def _load(self, report: Report) -> Engine:
        from relay.models import registry

        assert report.model is not None
        return registry.load(
            report.model,
            checkpoint=self.checkpoint,
            config=self.config,
            robot=self.robot,
            embodiment=self.embodiment,
            tokenizer=self.tokenizer,
            device=self.device,
            dtype=self.dtype,
            max_batch=1,
        )

    def _tolerance(self, report: Report, reference: Reference) -> float:
        if self.tolerance is not None:
            if not self.tolerance > 0:
                raise ValueError(f"--tolerance must be above 0, got {self.tolerance}")
            return self.tolerance
        if (reference.dtype, self.dtype) not in report.tolerances:
            raise ValueError(
                f"how far {report.model} in {self.dtype} may be from a reference in {reference.dtype} has not been "
                "measured: give --tolerance, or compare in float32"
            )
        return report.tolerances[reference.dtype, self.dtype]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All samples' differences.

    Attributes:
        names, units: of the action's dimensions.
        differences: (samples, horizon, dimensions), in the units that the actions have.
        distances: the same in standard deviations of the reference, all of them in the network's units.
        remarks: what a client would have been told.
    """

    names: tuple[str, ...]
    units: tuple[str, ...]
    differences: NDArray[np.float64]
    distances: NDArray[np.float64]
    remarks: tuple[str, ...] = ()


def compare(engine: Engine, reference: Reference) -> Comparison:
    """Run every sample through the engine, one by one.

    Robots' dimensions have different units, so distances are taken where they have none: in the network's own.

    Raises:
        ObservationError: an observation or its noise is not one of this checkpoint's.
        ValueError: the actions have other shapes.
    """
    differences: list[NDArray[np.float64]] = []
    in_network: list[NDArray[np.float64]] = []
    scales: list[NDArray[np.float64]] = []
    remarks: dict[str, None] = {}
    answered: Actions = np.zeros(0)
    for index, sample in enumerate(reference.samples):
        prepared, answer = _run(engine, sample)
        remarks |= dict.fromkeys(note.text for note in prepared.notes)
        remarks |= dict.fromkeys(f"ignored: {key}" for key in prepared.ignored)
        if _shapes(answer) != _shapes(sample.actions):
            raise ValueError(
                f"sample {index}: the reference's actions are {_told(sample.actions)}, ours {_told(answer)}: another "
                "robot's, or in other units" + (f" than {reference.units} units" if reference.units else "")
            )
        ours, theirs = _joined(answer, answer), _joined(sample.actions, answer)
        zero, scale = _scale(engine, prepared, ours.shape)
        differences.append(ours - theirs)
        in_network.append((theirs - zero) / scale)
        scales.append(scale)
        answered = answer
    deviation = float(np.std(in_network))
    if deviation == 0:
        raise ValueError("all actions of the reference are the same; nothing can be compared with it")
    every = np.stack(differences)  # (samples, horizon, dimensions)
    names, units = _dimensions(engine, every.shape[-1])
    names = _group_names(answered) or names
    return Comparison(names, units, every, every / (np.stack(scales) * deviation), tuple(remarks))


def _run(engine: Engine, sample: Recorded) -> tuple[Prepared, Actions]:
    """One sample the way of a request: what `prepare` made of it, and our actions."""
    from relay.engine.base import Chunk, Work
    from relay.protocol.messages import Options

    options = Options(noise=sample.noise, num_steps=sample.num_steps)
    prepared = engine.prepare(sample.observation, options)
    (answer,) = engine.infer([Work(prepared, options)])
    if not isinstance(answer, Chunk):
        raise ValueError(f"the engine failed: {answer.error}")
    if not isinstance(answer.actions, Mapping):
        return prepared, np.asarray(answer.actions, np.float64)
    groups = {name: np.asarray(part, np.float64) for name, part in answer.actions.items()}
    return prepared, {name: part.reshape(part.shape[-2:]) for name, part in groups.items()}  # (horizon, k) each


def _shapes(actions: Actions) -> object:
    return {name: part.shape for name, part in actions.items()} if isinstance(actions, Mapping) else actions.shape


def _told(actions: Actions) -> str:
    if isinstance(actions, Mapping):
        return ", ".join(f"{name} {part.shape}" for name, part in actions.items())
    return str(actions.shape)


def _joined(actions: Actions, like: Actions) -> NDArray[np.float64]:
    """All groups side by side, (horizon, dimensions), in the order of `like`."""
    if isinstance(actions, Mapping):
        return np.concatenate([actions[name] for name in like], axis=-1)
    return actions


def _group_names(actions: Actions) -> tuple[str, ...]:
    """Names of all groups' dimensions; none where there are no groups."""
    if not isinstance(actions, Mapping):
        return ()
    return tuple(f"{name}[{index}]" for name, part in actions.items() for index in range(part.shape[-1]))


def _scale(
    engine: Engine, prepared: Prepared, shape: tuple[int, ...]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What the network's 0 and 1 are in the units of the actions, where the engine can tell; (horizon, dimensions)."""
    scale_of = getattr(engine, "action_scale", None)
    zero, scale = scale_of(prepared) if scale_of else (np.zeros(shape), np.ones(shape))
    return np.broadcast_to(zero, shape), np.broadcast_to(scale, shape)


def _dimensions(engine: Engine, width: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names and units from the robot's contract, where the actions are its own."""
    robot: dict[str, Any] = engine.spec.metadata.get("robot", {})
    told = robot.get("actions", [])
    if len(told) != width:
        return tuple(f"action_{index}" for index in range(width)), ("",) * width
    units = tuple(f"{action['scale']:g} {action['unit']}" if "scale" in action else action["unit"] for action in told)
    return tuple(action["name"] for action in told), units


def _tell(comparison: Comparison, reference: Reference, tolerance: float, dtype: str) -> int:
    from rich.console import Console
    from rich.table import Table

    versions = ", ".join(f"{name} {version}" for name, version in reference.versions.items())
    print(f"reference: {reference.source}{f' ({versions})' if versions else ''}, computed in {reference.dtype}")
    print(f"compared: {len(reference.samples)} samples, this engine in {dtype}")
    absolute, distances = np.abs(comparison.differences), np.abs(comparison.distances)
    table = Table("dimension", "unit", "max |difference|", "mean", "max / deviation", "")
    for i, name in enumerate(comparison.names):
        worst = distances[..., i].max()
        table.add_row(
            name,
            comparison.units[i],
            f"{absolute[..., i].max():.3g}",
            f"{absolute[..., i].mean():.3g}",
            f"{worst:.2e}",
            "" if worst <= tolerance else "above",
        )
    for remark in comparison.remarks:
        print(f"note: {remark}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    worst = float(distances.max())
    within = worst <= tolerance
    where = np.unravel_index(np.argmax(distances), distances.shape)
    place = f"sample {where[0]}, step {where[1]}, {comparison.names[where[2]]}"
    print(f"largest distance: {worst:.2e} standard deviations ({place}), mean {distances.mean():.2e}")
    print(f"tolerance: {tolerance:g}; {'within' if within else 'above'}")
    if "bfloat16" in (reference.dtype, dtype):
        print("bfloat16 hides small mistakes: compare in float32 to find them")
    return 0 if within else 1


def _fail(message: str) -> int:
    print(f"relay parity: {message}", file=sys.stderr)
    return 2
