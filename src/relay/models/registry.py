"""The only list of model families; each is imported when it is asked for.

A family is a package with `engine.load` and `report.inspect`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from relay.engine.adapter_folders import AdapterChoice
from relay.engine.base import Engine, Progress
from relay.models.report import Report, Sample

NO_ADAPTERS = AdapterChoice()


@dataclass(frozen=True, slots=True)
class _Family:
    """A package of one family, and the options of `OWN_OPTIONS` that it takes."""

    package: str
    options: tuple[str, ...]


_PI0 = _Family("relay.models.pi0", ("config", "robot", "compile", "rtc_schedule", "rtc_max_guidance_weight"))
_GROOT = _Family("relay.models.groot", ("embodiment", "resize"))

_FAMILIES = {
    "demo": _PI0,
    "pi0": _PI0,
    "pi05": _PI0,
    "groot": _GROOT,
}

NAMES = tuple(_FAMILIES)

OWN_OPTIONS: Mapping[str, Any] = {
    "config": None,
    "robot": None,
    "compile": False,
    "embodiment": None,
    "resize": "exact",
    "rtc_schedule": "linear",
    "rtc_max_guidance_weight": 10.0,
}
"""Options that not every family takes, with the value of each that asks for nothing."""


class UnknownModel(ValueError):
    """A model name that no family answers to; the text lists those that exist."""


class ForeignOption(ValueError):
    """An option that the model's family doesn't take; the text lists those of its own."""


def load(
    name: str,
    *,
    checkpoint: Path | None,
    config: str | None = None,
    robot: str | None = None,
    embodiment: str | None = None,
    tokenizer: Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    num_steps: int | None = None,
    max_batch: int = 8,
    default_prompt: str | None = None,
    adapters: AdapterChoice = NO_ADAPTERS,
    graphs: str = "auto",
    compile: bool = False,
    decode: str = "auto",
    resize: str = "exact",
    rtc_schedule: str = "linear",
    rtc_max_guidance_weight: float = 10.0,
    progress: Progress = lambda phase, share: None,
) -> Engine:
    """Load a policy by its model name.

    Args:
        name: one of `NAMES`.
        checkpoint: the checkpoint folder; the demo has its own.
        config: one of the family's named configurations, for what the folder doesn't say.
        robot: a robot profile's name or YAML file.
        embodiment: which of the robots that the checkpoint was trained on, by its tag.
        tokenizer: a tokenizer file outside the checkpoint folder.
        device: a torch device, or `auto`.
        dtype: `float32`, `bfloat16`, or `auto`: bfloat16 on a GPU, float32 on a CPU.
        num_steps: default denoising steps; None keeps the checkpoint's.
        default_prompt: for observations without a prompt.
        adapters: LoRA adapters that requests may ask for.
        graphs: `auto` prepares fixed shapes as CUDA graphs on a GPU; `off`.
        compile: with graphs, whether small functions are compiled.
        decode: of JPEG frames: `auto`, `cpu` or `gpu`.
        resize: of frames: `exact`, as in training, or `fast`.
        rtc_schedule, rtc_max_guidance_weight: how real-time chunking guides; see `engine/chunking.py`.

    Raises:
        UnknownModel: with the known names.
        ForeignOption: one of `OWN_OPTIONS` is given that the family doesn't take.
        ValueError: a checkpoint that cannot be loaded faithfully.
    """
    folder = checkpoint_folder(name, checkpoint)
    given = {
        "config": config,
        "robot": robot,
        "compile": compile,
        "embodiment": embodiment,
        "resize": resize,
        "rtc_schedule": rtc_schedule,
        "rtc_max_guidance_weight": rtc_max_guidance_weight,
    }
    check_options(name, given)
    family = _FAMILIES[name]
    return import_module(f"{family.package}.engine").load(
        name,
        folder,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        num_steps=num_steps,
        max_batch=max_batch,
        default_prompt=default_prompt,
        adapters=adapters,
        graphs=graphs,
        decode=decode,
        progress=progress,
        **{option: given[option] for option in family.options},
    )


def inspect(
    name: str | None,
    *,
    checkpoint: Path,
    config: str | None = None,
    robot: str | None = None,
    embodiment: str | None = None,
    tokenizer: Path | None = None,
    sample: Sample | None = None,
) -> Report:
    """What is known about a checkpoint without loading it; reads no weights.

    Args:
        name: one of `NAMES`; None takes the family that knows the folder.
        sample: an observation to show what becomes of one; None shows none.

    Raises:
        UnknownModel: with the known names.
        ForeignOption: one of `OWN_OPTIONS` is given that the family doesn't take.
    """
    given = {"config": config, "robot": robot, "embodiment": embodiment}
    if name is not None:
        check_options(name, given)
        return _inspected(_FAMILIES[name], name, checkpoint, given, tokenizer, sample)
    reports: list[Report] = []
    for family in dict.fromkeys(_FAMILIES.values()):
        report = _inspected(family, None, checkpoint, given, tokenizer, sample)
        if report.model is not None:
            check_options(report.model, given)
            return report
        reports.append(report)
    return reports[0]


def _inspected(
    family: _Family,
    name: str | None,
    checkpoint: Path,
    given: Mapping[str, Any],
    tokenizer: Path | None,
    sample: Sample | None,
) -> Report:
    own = {option: value for option, value in given.items() if option in family.options}
    return import_module(f"{family.package}.report").inspect(
        name, checkpoint, tokenizer=tokenizer, sample=sample, **own
    )


def check_options(name: str, given: Mapping[str, Any]) -> None:
    """Refuse options that the model's family doesn't take; loads nothing.

    Args:
        given: values by the names of `OWN_OPTIONS`.

    Raises:
        UnknownModel: with the known names.
        ForeignOption: naming the option, and those that this model takes.
    """
    own = _FAMILIES[_known(name)].options
    for option, value in given.items():
        if option not in own and value != OWN_OPTIONS[option]:
            takes = ", ".join(map(_flag, own))
            raise ForeignOption(f"{_flag(option)} is not an option of {name}; its own are {takes}")


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def checkpoint_folder(name: str, checkpoint: Path | None) -> Path:
    """The folder that a model is loaded from; loads nothing, so that a typing error shows at once.

    Raises:
        UnknownModel: with the known names.
        ValueError: no folder is given, or it isn't there.
    """
    _known(name)
    if checkpoint is None:
        if name != "demo":
            raise ValueError(f"{name} needs --checkpoint DIR")
        return Path(str(files("relay.demo").joinpath("weights")))
    if not checkpoint.is_dir():
        raise ValueError(f"checkpoint {checkpoint} is not a folder")
    return checkpoint


def built_in_adapters(name: str, checkpoint: Path | None) -> Mapping[str, Path]:
    """Folders of the LoRA adapters that come with a model, by name; none for a checkpoint of one's own."""
    if name != "demo" or checkpoint is not None:
        return {}
    configs = sorted(checkpoint_folder(name, None).glob("adapters/*/adapter_config.json"))
    return {config.parent.name: config.parent for config in configs}


def _known(name: str) -> str:
    if name not in _FAMILIES:
        near = get_close_matches(name, NAMES, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise UnknownModel(f"model {name!r} is not known{hint}; known are {', '.join(NAMES)}")
    return name
