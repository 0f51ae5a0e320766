"""A GR00T checkpoint folder on disk to a network with everything around it: tokenizer and one embodiment's recipe.

`inspection.py` finds out what the folder holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from relay.engine.base import Progress
from relay.engine.weights import CheckpointError
from relay.models.groot.inspection import inspect_checkpoint
from relay.models.groot.model import Groot
from relay.models.groot.prompt import PromptTokenizer, load_tokenizer
from relay.models.groot.recipe import Recipe
from relay.models.groot.weights import load_weights


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        recipe: of the embodiment that is served.
        tags: all embodiments that the folder has statistics of.
        metadata: of the checkpoint's own, for clients.
        remarks: what the training side does besides, and this server doesn't.
    """

    model: Groot
    tokenizer: PromptTokenizer
    recipe: Recipe
    tags: tuple[str, ...]
    metadata: Mapping[str, Any]
    remarks: tuple[str, ...]


def load_checkpoint(
    folder: Path,
    *,
    embodiment: str | None,
    tokenizer: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> Checkpoint:
    """Load a checkpoint folder for one embodiment.

    Args:
        embodiment: which of the robots it was trained on; None takes the folder's own choice, or the only one.
        tokenizer: a tokenizer file elsewhere; by default the one in the folder.
        dtype: of the large matrices.

    Raises:
        CheckpointError: naming what is missing or does not fit, and the remedy.
    """
    found = inspect_checkpoint(folder, embodiment=embodiment, tokenizer=tokenizer)
    if found.problems:
        raise CheckpointError("\n".join(found.problems))
    assert found.config is not None
    assert found.recipe is not None
    assert found.tokenizer is not None
    assert found.tensors is not None
    progress("loading tokenizer", 0.0)  # before the weights, so that a wrong file shows at once
    prompts = load_tokenizer(found.tokenizer)
    slot = found.recipe.embodiment.slot
    model = load_weights(found.config, found.tensors, device, dtype, progress, slots=[slot])
    return Checkpoint(model, prompts, found.recipe, found.tags, found.settings.get("metadata", {}), found.remarks)
