"""The only list of model families; each is imported when it is asked for.

A family is a package with `engine.load` and `report.inspect`.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.resources import files
from pathlib import Path

from relay.engine.adapter_folders import AdapterChoice
from relay.engine.base import Engine, Progress
from relay.models.report import Report, Sample

NO_ADAPTERS = AdapterChoice()

_FAMILIES = {
    "demo": "relay.models.pi0",
    "pi0": "relay.models.pi0",
    "pi05": "relay.models.pi0",
}

NAMES = tuple(_FAMILIES)


class UnknownModel(ValueError):
    """A model name that no family answers to; the text lists those that exist."""


def load(
    name: str,
    *,
    checkpoint: Path | None,
    config: str | None = None,
    robot: str | None = None,
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
        tokenizer: a tokenizer file outside the checkpoint folder.
        device: a torch device, or `auto`.
        dtype: `float32`, `bfloat16`, or `auto`: bfloat16 on a GPU, float32 on a CPU.
        num_steps: default denoising steps; None keeps the checkpoint's.
        default_prompt: for observations without a prompt.
        adapters: LoRA adapters that requests may ask for.
        graphs: `auto` prepares fixed shapes as CUDA graphs on a GPU; `off`.
        compile: with graphs, whether small functions are compiled.
        decode: of JPEG frames: `auto`, `cpu` or `gpu`.
        rtc_schedule, rtc_max_guidance_weight: how real-time chunking guides; see `engine/chunking.py`.

    Raises:
        UnknownModel: with the known names.
        ValueError: a checkpoint that cannot be loaded faithfully.
    """
    folder = checkpoint_folder(name, checkpoint)
    return import_module(f"{_FAMILIES[name]}.engine").load(
        name,
        folder,
        config=config,
        robot=robot,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        num_steps=num_steps,
        max_batch=max_batch,
        default_prompt=default_prompt,
        adapters=adapters,
        graphs=graphs,
        compile=compile,
        decode=decode,
        rtc_schedule=rtc_schedule,
        rtc_max_guidance_weight=rtc_max_guidance_weight,
        progress=progress,
    )


def inspect(
    name: str | None,
    *,
    checkpoint: Path,
    config: str | None = None,
    robot: str | None = None,
    tokenizer: Path | None = None,
    sample: Sample | None = None,
) -> Report:
    """What is known about a checkpoint without loading it; reads no weights.

    Args:
        name: one of `NAMES`; None takes the family that knows the folder.
        sample: an observation to show what becomes of one; None shows none.

    Raises:
        UnknownModel: with the known names.
    """
    families = dict.fromkeys(_FAMILIES.values()) if name is None else [_FAMILIES[_known(name)]]
    reports = [
        import_module(f"{family}.report").inspect(
            name, checkpoint, config=config, robot=robot, tokenizer=tokenizer, sample=sample
        )
        for family in families
    ]
    return next((report for report in reports if report.model is not None), reports[0])


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
