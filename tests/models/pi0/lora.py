"""Adapters for tests: random ones over chosen tensors, folders of PEFT, and trees of openpi's JAX training.

Nothing here uses the code under test to make a change: a JAX tree's effective weights are worked out with the einsums
of openpi's own layers (openpi: src/openpi/models/lora.py), and PEFT's by the formula of its documentation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import Tensors, tiny_tensors
from torch import Tensor

LANGUAGE = "paligemma_with_expert.paligemma.model.language_model.layers."
EXPERT = "paligemma_with_expert.gemma_expert.model.layers."
VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model."

EXPERT_ATTENTION = [f"{EXPERT}{layer}.self_attn.{part}_proj" for layer in range(3) for part in "qv"]
"""What lerobot adapts by default, without the heads."""


def random_factors(family: str, modules: Sequence[str], *, rank: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """`lora_A` and `lora_B` of these linear layers under PEFT's names, large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    base = tiny_tensors(family)
    tensors: dict[str, Tensor] = {}
    for module in modules:
        outputs, inputs = base[module + ".weight"].shape
        tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / (2 * rank**0.5)
    return tensors


def write_peft(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    prefix: str = "base_model.model.model.",
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A folder as PEFT saves it; `alpha / r` is 8 / 4 unless `config` says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **(config or {})}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merged_by_hand(family: str, tensors: Mapping[str, Tensor], *, scale: float = 2.0) -> Tensors:
    """The checkpoint that training would have given without LoRA: every tensor with its change in it, in float32."""
    merged = Tensors({name: tensor.float() for name, tensor in tiny_tensors(family).items()})
    for name, tensor in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            product = torch.einsum("or,ri->oi", tensors[f"{module}.lora_B.weight"].double(), tensor.double())
            merged[module + ".weight"] += scale * product.float()
        elif ".lora_" not in name:
            merged[name] = tensor.float()
    return merged


def jax_tree(family: str, *, ranks: Mapping[str, int], seed: int = 0) -> tuple[dict[str, Tensor], Tensors]:
    """LoRA leaves by their JAX names for both towers, and the PyTorch checkpoint that they amount to.

    The effective weights are read off the layers' own einsums: fed with unit vectors, they return their matrix.
    """
    generator = torch.Generator().manual_seed(seed)
    base = tiny_tensors(family)
    leaves: dict[str, Tensor] = {}
    merged = Tensors({name: tensor.float() for name, tensor in base.items()})

    def leaf(name: str, *shape: int) -> Tensor:
        leaves[name] = torch.randn(3, *shape, generator=generator) * 0.3 / shape[-1] ** 0.5
        return leaves[name]

    for tower, suffix, layers in (("language", "", LANGUAGE), ("expert", "_1", EXPERT)):
        if tower not in ranks:
            continue
        r = ranks[tower]
        width = base[f"{layers}0.mlp.up_proj.weight"].shape[1]
        mlp = base[f"{layers}0.mlp.up_proj.weight"].shape[0]
        heads, channels = 8, 16
        attention, ffn = "PaliGemma/llm/layers/attn/", f"PaliGemma/llm/layers/mlp{suffix}/"
        q_a = leaf(f"{attention}q_einsum{suffix}/lora_a", heads, width, r)
        q_b = leaf(f"{attention}q_einsum{suffix}/lora_b", heads, r, channels)
        kv_a = leaf(f"{attention}kv_einsum{suffix}/lora_a", 2, 1, width, r)
        kv_b = leaf(f"{attention}kv_einsum{suffix}/lora_b", 2, 1, r, channels)
        o_a = leaf(f"{attention}attn_vec_einsum{suffix}/lora_a", heads, channels, r)
        o_b = leaf(f"{attention}attn_vec_einsum{suffix}/lora_b", heads, r, width)
        gate_a = leaf(f"{ffn}gating_einsum_lora_a", 2, width, r)
        gate_b = leaf(f"{ffn}gating_einsum_lora_b", 2, r, mlp)
        down_a = leaf(f"{ffn}linear_lora_a", mlp, r)
        down_b = leaf(f"{ffn}linear_lora_b", r, width)
        units, hidden = torch.eye(width)[None], torch.eye(mlp)[None]  # (1, tokens, features)
        attended = torch.eye(heads * channels).view(1, heads * channels, heads, channels)
        for layer in range(3):
            name = f"{layers}{layer}."
            # openpi's queries: BTD,NDH->BTNH becomes BTD,NDL->BTNL and BTNL,NLH->BTNH.
            inner = torch.einsum("btd,ndl->btnl", units, q_a[layer])
            q = torch.einsum("btnl,nlh->btnh", inner, q_b[layer])[0]  # (D, N, H)
            merged[name + "self_attn.q_proj.weight"] += q.reshape(width, -1).T
            # Keys and values: BSD,2KDH->2BSKH becomes BSD,2KDL->2BSKL and 2BSKL,2KLH->2BSKH.
            inner = torch.einsum("bsd,ckdl->cbskl", units, kv_a[layer])
            k, v = torch.einsum("cbskl,cklh->cbskh", inner, kv_b[layer])[:, 0, :, 0]  # (D, H) each
            merged[name + "self_attn.k_proj.weight"] += k.T
            merged[name + "self_attn.v_proj.weight"] += v.T
            # Outputs: BTNH,NHD->BTD becomes BTNH,NHL->BTL and BTL,NLD->BTD: both sum over the heads.
            inner = torch.einsum("btnh,nhl->btl", attended, o_a[layer])
            o = torch.einsum("btl,nld->btd", inner, o_b[layer])[0]  # (N * H, D)
            merged[name + "self_attn.o_proj.weight"] += o.T
            for i, part in enumerate(("gate", "up")):
                change = torch.einsum(
                    "btr,rf->btf", torch.einsum("btd,dr->btr", units, gate_a[layer, i]), gate_b[layer, i]
                )
                merged[f"{name}mlp.{part}_proj.weight"] += change[0].T
            change = torch.einsum("btr,rd->btd", torch.einsum("btf,fr->btr", hidden, down_a[layer]), down_b[layer])
            merged[name + "mlp.down_proj.weight"] += change[0].T
    return leaves, merged
