"""A DreamZero checkpoint folder on disk to a network with everything around it: prompts, statistics, cameras.

`inspection.py` finds out what the folder holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from relay.engine.base import Progress
from relay.engine.weights import CheckpointError
from relay.models.dreamzero.footprint import Footprint, check_room, footprint, free_memory
from relay.models.dreamzero.inspection import Inspection, inspect_checkpoint
from relay.models.dreamzero.model import DreamZero
from relay.models.dreamzero.prompts import NEGATIVE
from relay.models.dreamzero.recipe import Recipe
from relay.models.dreamzero.tokenizer import PromptTokenizer, load_vocabulary
from relay.models.dreamzero.weights import empty_network, load_network
from relay.protocol.errors import ObservationError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        camera_set: one of `observation.CAMERA_SETS`.
        footprint: what it and its sessions take on the device.
    """

    model: DreamZero
    tokenizer: PromptTokenizer
    recipe: Recipe
    camera_set: str
    footprint: Footprint


def load_checkpoint(
    folder: Path,
    *,
    embodiment: str | None = None,
    cameras: str | None = None,
    tokenizer: Path | None = None,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    free: Callable[[torch.device], int | None] = free_memory,
) -> Checkpoint:
    """Load a checkpoint folder.

    Args:
        embodiment: which of the robots it was trained on; by default the folder's own, or the only one.
        cameras: how clients number DROID's exteriors, one of `observation.CAMERA_SETS`.
        tokenizer: a tokenizer file elsewhere; by default the one in the folder.
        dtype: of all weights.
        free: tells how many bytes are free on a device.

    Raises:
        CheckpointError: naming what is missing or does not fit, and the remedy; before any weight is read.
    """
    found = inspect_checkpoint(folder, embodiment=embodiment, cameras=cameras, tokenizer=tokenizer)
    if found.problems:
        raise CheckpointError("\n".join(found.problems))
    assert found.config is not None
    assert found.tensors is not None
    assert found.recipe is not None
    progress("loading tokenizer", 0.0)  # before the weights, so that a wrong file shows at once
    prompts, negative = load_prompts(found)
    needed = footprint(found.config, dtype, empty_network(found.config, found.tensors.shapes, dtype))
    check_room(needed, free(device), str(device))
    network = load_network(found.config, found.tensors, device, dtype, progress)
    return Checkpoint(DreamZero(network, negative), prompts, found.recipe, found.camera_set, needed)


def load_prompts(found: Inspection) -> tuple[PromptTokenizer, tuple[int, ...]]:
    """The tokenizer of an inspection without problems, and the ids of the negative prompt.

    Raises:
        CheckpointError: the file is damaged or another model's, or leaves no room for an instruction.
    """
    assert found.config is not None
    assert found.recipe is not None
    assert found.prompts is not None
    assert found.tokenizer is not None
    vocabulary = load_vocabulary(found.tokenizer, found.config.text.vocab_size)
    prompts = PromptTokenizer(vocabulary, found.prompts.template, formalize=found.recipe.formalize)
    negative = PromptTokenizer(vocabulary, found.prompts.negative)
    try:
        prompts("a")
        return prompts, negative("")
    except ObservationError as error:
        raise CheckpointError(
            f"{found.tokenizer.name} does not fit the texts of prompts.json ({NEGATIVE} or {found.recipe.embodiment}): "
            f"{error}"
        ) from None
