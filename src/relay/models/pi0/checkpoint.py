"""A checkpoint folder on disk to a network with everything around it: tokenizer, statistics and robot.

Reads folders of openpi (JAX and PyTorch), of lerobot and our own; `inspection.py` finds out what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from relay.engine.base import Progress
from relay.engine.normalization import Normalization
from relay.engine.weights import CheckpointError
from relay.models.pi0.config import Family
from relay.models.pi0.inspection import Inspection as Inspection
from relay.models.pi0.inspection import complete_settings as complete_settings
from relay.models.pi0.inspection import inspect_checkpoint as inspect_checkpoint
from relay.models.pi0.model import Pi0
from relay.models.pi0.tokenizer import PromptTokenizer, load_vocabulary
from relay.models.pi0.weights import load_weights
from relay.robots.profile import RobotProfile


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        normalization: None where the checkpoint is declared to be served in model format only.
        profile: the robot it was trained on; None where none is named.
        metadata: of the checkpoint's own, for clients.
    """

    model: Pi0
    tokenizer: PromptTokenizer
    normalization: Normalization | None
    profile: RobotProfile | None
    metadata: Mapping[str, Any]


def load_checkpoint(
    folder: Path,
    *,
    config: str | None = None,
    robot: str | None = None,
    tokenizer: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    family: Family | None = None,
) -> Checkpoint:
    """Load a checkpoint folder.

    Args:
        config: one of openpi's configurations by name, for what openpi's folders don't say.
        robot: a robot profile's name or YAML file; by default the configuration's or the folder's own.
        tokenizer: a tokenizer file elsewhere; by default the one in the folder.
        dtype: of the large matrices; the rest stays float32.
        family: the one that is asked for; None takes the folder's.

    Raises:
        CheckpointError: naming what is missing or does not fit, and the remedy.
    """
    found = inspect_checkpoint(folder, config=config, robot=robot, tokenizer=tokenizer, family=family)
    if found.problems:
        raise CheckpointError("\n".join(found.problems))
    assert found.config is not None
    assert found.tensors is not None
    progress("loading tokenizer", 0.0)  # before the weights, so that a wrong file shows at once
    prompts = load_tokenizer(found)
    model = load_weights(found.config, found.tensors, device, dtype, progress)
    return Checkpoint(model, prompts, found.normalization, found.profile, found.metadata)


def load_tokenizer(found: Inspection) -> PromptTokenizer:
    """The tokenizer of an inspection without problems.

    Raises:
        CheckpointError: the file is damaged, or another model's tokenizer, or the state alone does not fit the prompt.
    """
    assert found.config is not None
    assert found.tokenizer is not None
    prompts = PromptTokenizer(
        load_vocabulary(found.tokenizer),
        found.config.max_token_len,
        found.config.state_in_prompt,
        raw=found.raw_prompt,
        vocabulary_size=found.config.vocab_size,
    )
    prompts.check(found.config.state_dim)
    return prompts
