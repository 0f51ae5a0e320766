"""Write the adapters in `tests/data/pi0/adapters` with the PEFT library, and what PEFT itself makes of the weights.

    python write_peft.py FOLDER

Runs where peft is installed (0.21 when the files were made) and knows nothing of `relay`. The network is a tree of
empty modules with linear layers at the ends, under the names of openpi's PyTorch port: PEFT needs no more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

DATA = Path(__file__).parents[2] / "data" / "pi0"
EXPERT = "paligemma_with_expert.gemma_expert.model.layers."
LANGUAGE = "paligemma_with_expert.paligemma.model.language_model.layers."
VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model.encoder.layers."

LEROBOTS_TARGETS = (
    r"(.*\.gemma_expert\..*\.self_attn\.(q|v)_proj"
    r"|model\.(state_proj|action_in_proj|action_out_proj|action_time_mlp_in|action_time_mlp_out))"
)

ADAPTERS: dict[str, dict[str, Any]] = {
    # As lerobot makes them: the policy's attribute `model` is the network, alpha is left at PEFT's 8.
    "expert": {"policy": True, "r": 4, "target_modules": LEROBOTS_TARGETS},
    "wide": {
        "policy": False,
        "r": 4,
        "lora_alpha": 12,
        "use_rslora": True,
        "target_modules": [
            f"{LANGUAGE}1.mlp.down_proj",
            f"{LANGUAGE}1.mlp.up_proj",
            f"{LANGUAGE}2.self_attn.v_proj",
            f"{EXPERT}0.self_attn.o_proj",
            f"{EXPERT}0.input_layernorm.dense",
            f"{VISION}0.self_attn.k_proj",
            "time_mlp_in",
        ],
        "rank_pattern": {"mlp.down_proj": 2, "time_mlp_in": 3},
        "alpha_pattern": {r"layers\.\d+\.mlp\.up_proj": 5},
        "modules_to_save": ["action_out_proj"],
    },
}


def main(folder: Path) -> None:
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        torch.manual_seed(seed)
        write(folder / name, **settings)


def write(folder: Path, *, policy: bool, **settings: Any) -> None:
    """Train nothing: give every factor random values, save the adapter, then let PEFT merge it."""
    network = modules()
    if policy:
        outer = torch.nn.Module()
        outer.model = network
        network = outer
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    adapted = get_peft_model(network, LoraConfig(**settings))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"] = sorted(config["target_modules"]) if not policy else config["target_modules"]
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    merged = adapted.merge_and_unload().state_dict()
    changed = {name: tensor for name, tensor in merged.items() if not torch.equal(tensor, before[name])}
    save_file(
        {name.removeprefix("model."): t.contiguous() for name, t in changed.items()}, folder / "merged.safetensors"
    )


def modules() -> torch.nn.Module:
    """The golden π0.5's linear layers."""
    root = torch.nn.Module()
    tensors = load_file(DATA / "pi05_tiny.safetensors")
    for name, tensor in tensors.items():
        *parents, attribute = name.split(".")
        if attribute != "weight" or tensor.ndim != 2 or "embed" in name:
            continue
        bias = tensors.get(".".join([*parents, "bias"]))
        linear = torch.nn.Linear(tensor.shape[1], tensor.shape[0], bias=bias is not None)
        linear.weight.data = tensor.float()
        if bias is not None:
            linear.bias.data = bias.float()
        node = root
        for parent in parents[:-1]:
            if not hasattr(node, parent):
                node.add_module(parent, torch.nn.Module())
            node = getattr(node, parent)
        node.add_module(parents[-1], linear)
    return root


if __name__ == "__main__":
    main(Path(sys.argv[1]))
