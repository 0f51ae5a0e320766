"""Which of the known kinds of checkpoint a folder is, and its tensors under openpi's PyTorch names."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from relay.engine.orbax import OrbaxSource
from relay.engine.weights import INDEX_FILE, SINGLE_FILE, CheckpointError, SafetensorsSource, TensorSource
from relay.models.pi0.jax_adapters import JaxWithLora, has_lora
from relay.models.pi0.jax_names import from_jax
from relay.models.pi0.lerobot import CONFIG_FILE, is_lerobot
from relay.models.pi0.settings import SETTINGS_FILE

PARAMS_FOLDER, ASSETS_FOLDER = "params", "assets"

Format = Literal["relay", "openpi-jax", "openpi-pytorch", "lerobot"]


def recognise(folder: Path) -> Format:
    """The folder's format, by the files in it; where weights stand twice, safetensors win as in openpi.

    Raises:
        CheckpointError: there is no such folder, or no weights in it; with the folder that was probably meant.
    """
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint folder at {folder}")
    if _has_safetensors(folder):
        if is_lerobot(folder):
            return "lerobot"
        of_openpi = (folder / CONFIG_FILE).is_file() or (folder / ASSETS_FOLDER).is_dir()
        return "openpi-pytorch" if of_openpi else "relay"
    if (folder / PARAMS_FOLDER).is_dir():
        return "openpi-jax"
    around = [folder.parent, *sorted(folder.glob("*/")), *sorted(folder.glob("*/*/"))]
    meant = [place for place in around if _has_safetensors(place) or (place / PARAMS_FOLDER).is_dir()]
    if meant:
        raise CheckpointError(f"no weights in {folder}; did you mean {meant[-1]}?")
    return "relay"


def open_tensors(folder: Path, form: Format) -> TensorSource:
    """The folder's tensors; no tensor is read yet.

    Raises:
        CheckpointError: files are missing, damaged, or of a kind that is never read.
    """
    if form != "openpi-jax":
        return SafetensorsSource(folder)
    source = OrbaxSource(folder / PARAMS_FOLDER)
    return JaxWithLora(source, folder / SETTINGS_FILE) if has_lora(source) else from_jax(source)


def _has_safetensors(folder: Path) -> bool:
    return (
        (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file() or any(folder.glob("model-*.safetensors"))
    )
