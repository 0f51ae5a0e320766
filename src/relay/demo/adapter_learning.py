"""A LoRA adapter of the demo policy while it is trained, and its copy on disk as PEFT writes it.

Written after "LoRA" (arXiv 2106.09685). The policy is frozen; every linear layer of its two transformers has a pair of
thin factors, and losses flow through weights that have their product added. Knows no data and no schedule.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call

from relay.demo.learning import Batch, Learner
from relay.engine.peft import CONFIG_FILE, WEIGHTS_FILE
from relay.models.pi0.model import Pi0
from relay.models.pi0.weights import packing, split

RANK = 8
ALPHA = 16
TARGETS = r".*\.(language_model|gemma_expert\.model)\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
"""The modules that are adapted, in openpi's names: attention and MLP of the language model and the action expert."""

_SCALE = ALPHA / RANK


class AdapterLearner(nn.Module):
    """The frozen policy with an adapter in training and the auxiliary heads.

    Args:
        policy: the base.
        generator: fills A; B begins at zero, so that training begins with the base's own answers.
    """

    def __init__(self, policy: Pi0, generator: torch.Generator) -> None:
        super().__init__()
        self.learner = Learner(policy.requires_grad_(False))
        self._packed = [p for p in packing(policy.config) if any(is_target(source) for source in p.sources)]
        self._names = [source for packed in self._packed for source in packed.sources]
        weights = [w for packed in self._packed for w in split(policy.get_parameter(packed.name), packed)]
        self.a = nn.ParameterList(
            torch.randn(RANK, w.shape[1], generator=generator) / math.sqrt(w.shape[1]) for w in weights
        )
        self.b = nn.ParameterList(torch.zeros(w.shape[0], RANK) for w in weights)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The losses of `Learner`, with the adapter's changes in the weights."""
        return functional_call(self.learner, {f"policy.{n}": w for n, w in self.merged().items()}, (batch,))

    def merged(self) -> dict[str, Tensor]:
        """Each adapted matrix with its change, by its name in the network; gradients flow to the factors."""
        changes = {name: _SCALE * (b @ a) for name, a, b in zip(self._names, self.a, self.b, strict=True)}
        return {
            packed.name: self.learner.policy.get_parameter(packed.name)
            + torch.cat([changes[source] for source in packed.sources])
            for packed in self._packed
        }

    def save(self, folder: Path) -> None:
        """Write the adapter as PEFT does, in bfloat16."""
        tensors = {
            f"base_model.model.{name.removesuffix('.weight')}.lora_{kind}.weight": factor.detach().to(torch.bfloat16)
            for kind, factors in (("A", self.a), ("B", self.b))
            for name, factor in zip(self._names, factors, strict=True)
        }
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        config = {
            "peft_type": "LORA",
            "base_model_name_or_path": "relay-demo",
            "r": RANK,
            "lora_alpha": ALPHA,
            "target_modules": TARGETS,
            "bias": "none",
            "inference_mode": True,
        }
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def is_target(name: str) -> bool:
    """Whether a tensor of this name, openpi's, is the weight of a module that is adapted."""
    return name.endswith(".weight") and re.fullmatch(TARGETS, name.removesuffix(".weight")) is not None
