"""Where a parameter of the encoders stands in a DreamZero checkpoint.

The checkpoint keeps the names of Wan's own modules; `encoders.py` builds those of `transformers` and `diffusers`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HEAD = "action_head."


@dataclass(frozen=True, slots=True)
class Stored:
    """The tensor in the checkpoint, and which of its equal parts along the first axis if it holds several.

    A shape may differ in axes of length 1.
    """

    name: str
    part: int = 0
    parts: int = 1


def stored_as(parameter: str) -> Stored:
    """Where `text.*`, `image.*` or `video.*` comes from."""
    encoder, name = parameter.split(".", 1)
    return {"text": _text, "image": _image, "video": _video}[encoder](name.split(".", 1)[1])


def _text(name: str) -> Stored:
    if name == "shared.weight":
        return Stored(HEAD + "text_encoder.token_embedding.weight")
    if name == "encoder.final_layer_norm.weight":
        return Stored(HEAD + "text_encoder.norm.weight")
    block, rest = _matched(r"encoder\.block\.(\d+)\.layer\.(.*)\.weight", name)
    return Stored(f"{HEAD}text_encoder.blocks.{block}.{_UMT5[rest]}.weight")


_UMT5 = {
    **{f"0.SelfAttention.{part}": f"attn.{part}" for part in "qkvo"},
    "0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
    "0.layer_norm": "norm1",
    "1.DenseReluDense.wi_0": "ffn.gate.0",
    "1.DenseReluDense.wi_1": "ffn.fc1",
    "1.DenseReluDense.wo": "ffn.fc2",
    "1.layer_norm": "norm2",
}


def _image(name: str) -> Stored:
    name = name.removeprefix("vision_model.")  # so called before transformers 5
    visual = HEAD + "image_encoder.model.visual."
    if name in _CLIP_TOP:
        return Stored(visual + _CLIP_TOP[name])
    layer, rest = _matched(r"encoder\.layers\.(\d+)\.(.*)", name)
    module, kind = rest.rsplit(".", 1)
    block = f"{visual}transformer.{layer}."
    if module.startswith("self_attn.") and module != "self_attn.out_proj":
        return Stored(f"{block}attn.to_qkv.{kind}", "qkv".index(module[len("self_attn.")]), 3)
    return Stored(f"{block}{_CLIP_BLOCK[module]}.{kind}")


_CLIP_TOP = {
    "embeddings.class_embedding": "cls_embedding",
    "embeddings.patch_embedding.weight": "patch_embedding.weight",
    "embeddings.position_embedding.weight": "pos_embedding",
    "pre_layrnorm.weight": "pre_norm.weight",
    "pre_layrnorm.bias": "pre_norm.bias",
    "post_layernorm.weight": "post_norm.weight",
    "post_layernorm.bias": "post_norm.bias",
}
_CLIP_BLOCK = {
    "self_attn.out_proj": "attn.proj",
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.2",
}


def _video(name: str) -> Stored:
    return Stored(HEAD + "vae.model." + _wan(name))


def _wan(name: str) -> str:
    """Of the encoder alone, in either version: flat blocks in Wan 2.1, blocks of blocks in 2.2."""
    for ours, theirs in _WAN_TOP.items():
        if name.startswith(ours):
            return theirs + name[len(ours) :]
    if name.startswith("encoder.mid_block.attentions.0."):
        return "encoder.middle.1." + name.split(".", 4)[4]
    if name.startswith("encoder.mid_block.resnets."):
        _, _, _, number, rest = name.split(".", 4)
        return f"encoder.middle.{2 * int(number)}.{_residual(rest)}"
    block, rest = _matched(r"encoder\.down_blocks\.(\d+)\.(.*)", name)
    inside = f"encoder.downsamples.{block}."
    nested = re.fullmatch(r"resnets\.(\d+)\.(.*)", rest)
    if nested:
        return f"{inside}downsamples.{nested[1]}.{_residual(nested[2])}"
    if rest.startswith("downsampler."):
        return f"{inside}downsamples.2.{rest.removeprefix('downsampler.')}"
    return inside + _residual(rest)


_WAN_TOP = {
    "quant_conv.": "conv1.",
    "encoder.conv_in.": "encoder.conv1.",
    "encoder.norm_out.": "encoder.head.0.",
    "encoder.conv_out.": "encoder.head.2.",
}
_WAN_RESIDUAL = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}


def _residual(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    return f"{_WAN_RESIDUAL.get(module, module)}.{kind}"


def _matched(pattern: str, name: str) -> tuple[str, ...]:
    found = re.fullmatch(pattern, name)
    if found is None:
        raise KeyError(name)
    return found.groups()
