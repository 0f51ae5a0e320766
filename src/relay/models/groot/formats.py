"""Which kind of GR00T checkpoint a folder is, and the files in it. Reads `config.json`, nothing else.

Isaac-GR00T keeps the processor's files beside the weights in what it releases, and under `processor/` in what its
training writes. lerobot wraps the same network and has processor files of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from relay.engine.json_entries import read_json
from relay.engine.weights import CheckpointError
from relay.protocol.wording import shown

CONFIG_FILE = "config.json"
PROCESSOR_FILE = "processor_config.json"
STATISTICS_FILE = "statistics.json"
EMBODIMENTS_FILE = "embodiment_id.json"
PROCESSOR_FOLDER = "processor"
TOKENIZER_FILE = "tokenizer.json"

Format = Literal["isaac", "lerobot"]

_MODEL = "nvidia/GR00T-N1.7-3B"


def recognise(folder: Path) -> tuple[Format, dict[str, Any]]:
    """The folder's format, and what its `config.json` holds.

    Raises:
        CheckpointError: it is no folder of GR00T N1.7, with what it is instead, or the folders below it that are.
    """
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint folder at {folder}")
    if not (folder / CONFIG_FILE).is_file():
        below = [place.name for place in sorted(folder.glob("*/")) if is_groot(place)]
        if below:
            raise CheckpointError(
                f"{folder} is no checkpoint itself, but holds several: choose one of {', '.join(below)}, such as "
                f"{folder / below[0]}"
            )
        raise CheckpointError(f"no {CONFIG_FILE} in {folder}; a GR00T checkpoint has one beside its weights")
    config = read_json(folder / CONFIG_FILE)
    version = version_of(config)
    if version is None:
        told = config.get("type", config.get("model_type"))
        raise CheckpointError(f"{folder} is no GR00T checkpoint: its {CONFIG_FILE} says {shown(told)}")
    if version != "N1.7":
        instead = _INSTEAD.get(version, "Isaac-GR00T's own server")
        raise CheckpointError(
            f"this is a GR00T {version} checkpoint; only N1.7 is served: use {instead}, or fine-tune {_MODEL}"
        )
    return ("lerobot" if "type" in config else "isaac"), config


def version_of(config: Mapping[str, Any]) -> str | None:
    """`N1.5`, `N1.6`, `N1.7` and the like, from a `config.json`; None where it is not GR00T's."""
    if config.get("type") == "groot":  # lerobot: until 0.5.1 it was N1.5, which alone had a tokenizer's repository
        return "N1.5" if config.get("tokenizer_assets_repo") else "N1.7"
    architectures = config.get("architectures")
    names = [config.get("model_type"), *(architectures if isinstance(architectures, list) else [])]
    for name in names:
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match:
            return f"N{match[1]}.{match[2]}"
    return None


_NAME = re.compile(r"gr00t[-_]?n(\d)[-_.d]?(\d)", re.IGNORECASE)

_INSTEAD = {
    "N1.5": "Isaac-GR00T's server of that version or lerobot 0.5.1",
    "N1.6": "Isaac-GR00T's server of that version",
}


def is_groot(folder: Path) -> bool:
    """Whether the folder's `config.json` is that of some GR00T."""
    try:
        return (folder / CONFIG_FILE).is_file() and version_of(read_json(folder / CONFIG_FILE)) is not None
    except CheckpointError:
        return False


def processor_file(folder: Path, name: str) -> Path:
    """One of the processor's files, beside the weights or under `processor/`.

    Raises:
        CheckpointError: it is in neither place.
    """
    places = [folder / name, folder / PROCESSOR_FOLDER / name]
    for place in places:
        if place.is_file():
            return place
    raise CheckpointError(
        f"no {name} in {folder}, nor under {PROCESSOR_FOLDER}/; copy it from where the checkpoint was trained"
    )


def find_tokenizer(folder: Path) -> Path:
    """The tokenizer that lies in the folder.

    Raises:
        CheckpointError: there is none, with the places to get it from.
    """
    places = [folder / TOKENIZER_FILE, *(folder / name / TOKENIZER_FILE for name in ("tokenizer", PROCESSOR_FOLDER))]
    for place in places:
        if place.is_file():
            return place
    raise CheckpointError(
        f"no tokenizer in {folder}; put {TOKENIZER_FILE} of the Hugging Face repository nvidia/Cosmos-Reason2-2B or "
        "Qwen/Qwen3-VL-2B-Instruct there, or pass --tokenizer FILE"
    )
