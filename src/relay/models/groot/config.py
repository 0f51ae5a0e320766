"""What a GR00T N1.7 network is, as data: sizes, steps and slots, read from the checkpoint's own `config.json`.

Isaac-GR00T's configuration classes have defaults that differ from the released model, so nothing here has one: what a
file does not say is an error. The backbone's sizes are not in the file, which names a model of one shape only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relay.engine.json_entries import Entries
from relay.engine.weights import CheckpointError
from relay.protocol.wording import shown

COSMOS_REASON2: Mapping[str, Any] = {
    "text_config": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
    },
    "rope_theta": 5_000_000,
    "mrope_section": [24, 20, 20],
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4096,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 2048,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "image_token_id": 151_655,
}
"""The released backbone, nvidia/Cosmos-Reason2-2B, which has the sizes of Qwen3-VL-2B."""

RELEASED: Mapping[str, Any] = {
    "select_layer": 16,
    "backbone_embedding_dim": 2048,
    "hidden_size": 1024,
    "input_embedding_dim": 1536,
    "max_state_dim": 132,
    "max_action_dim": 132,
    "action_horizon": 40,
    "max_num_embodiments": 32,
    "max_seq_len": 1024,
    "num_inference_timesteps": 4,
    "num_timestep_buckets": 1000,
    "attend_text_every_n_blocks": 2,
    "state_history_length": 1,
    "use_vlln": True,
    "use_alternate_vl_dit": True,
    "add_pos_embed": True,
    "diffusion_model_cfg": {
        "num_layers": 32,
        "num_attention_heads": 32,
        "attention_head_dim": 48,
        "output_dim": 1024,
        "norm_type": "ada_norm",
        "interleave_self_attention": True,
        "positional_embeddings": None,
    },
    "vl_self_attention_cfg": {
        "num_layers": 4,
        "num_attention_heads": 32,
        "attention_head_dim": 64,
        "positional_embeddings": None,
    },
}
"""The released 3B model's values, for fine-tunes whose own configuration leaves them to their base model."""


@dataclass(frozen=True, slots=True)
class VisionSizes:
    """The vision tower: squares of `patch` pixels in, one token of `output_width` per `merge` x `merge` of them out.

    Attributes:
        positions: entries of the learned position table, a square grid.
        deepstack: blocks after which a merger hands image features to the first language layers.
    """

    width: int
    depth: int
    mlp: int
    heads: int
    patch: int
    merge: int
    frames: int
    output_width: int
    positions: int
    deepstack: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def token_side(self) -> int:
        """Pixels along a side of what becomes one token."""
        return self.patch * self.merge


@dataclass(frozen=True, slots=True)
class TextSizes:
    """The language model.

    Attributes:
        rope_sections: rotary frequencies of time, height and width.
        epsilon: of its RMS norms.
    """

    vocab_size: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_base: float
    rope_sections: tuple[int, int, int]
    epsilon: float


@dataclass(frozen=True, slots=True)
class StackSizes:
    """A stack of transformer blocks whose MLP is four times as wide as they are."""

    depth: int
    heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class GrootConfig:
    """Everything the network and its sampler need to know.

    Attributes:
        select_layer: language layers that are run; the features are what leaves the last of them.
        backbone_embedding_dim: width of these features.
        hidden_size: width inside the state encoder and the action decoder.
        input_embedding_dim: width of the diffusion transformer.
        max_state_dim, max_action_dim: widths of the model's states and actions, padding included.
        action_horizon: action steps that the network makes, whatever an embodiment uses of them.
        max_num_embodiments: slots of the per-embodiment maps.
        max_seq_len: rows of the action positions' table.
        num_steps: denoising steps when a request names none.
        num_timestep_buckets: times are whole numbers below this.
        attend_text_every_n_blocks: of the blocks that look at the observation, one in so many looks at its text.
        state_history_length: states in a row's state, flattened.
        dit, vl: the diffusion transformer, and the self-attention over the backbone's features.
        image_token_id: stands in a prompt wherever an image token goes.
    """

    select_layer: int
    backbone_embedding_dim: int
    hidden_size: int
    input_embedding_dim: int
    max_state_dim: int
    max_action_dim: int
    action_horizon: int
    max_num_embodiments: int
    max_seq_len: int
    num_steps: int
    num_timestep_buckets: int
    attend_text_every_n_blocks: int
    state_history_length: int
    dit: StackSizes
    vl: StackSizes
    vision: VisionSizes
    text: TextSizes
    image_token_id: int

    @property
    def state_width(self) -> int:
        """Numbers in a row's state, its history flattened."""
        return self.state_history_length * self.max_state_dim


def read_config(config: Mapping[str, Any], backbone: Mapping[str, Any] | None = None) -> GrootConfig:
    """The network that a checkpoint's `config.json` describes.

    Args:
        backbone: sizes of the backbone in the form of `COSMOS_REASON2`, the default.

    Raises:
        CheckpointError: naming the entry that is missing, of the wrong kind, or says what this network cannot do.
    """
    top = Entries(config, "config.json", _NO_DEFAULT)
    for switch in ("use_vlln", "use_alternate_vl_dit", "add_pos_embed"):
        top.one_of(switch, (True,))
    dit, vl = top.inner("diffusion_model_cfg"), top.inner("vl_self_attention_cfg")
    dit.one_of("interleave_self_attention", (True,))
    dit.one_of("norm_type", ("ada_norm",))
    for stack in (dit, vl):
        for key, only in (("positional_embeddings", None), ("activation_fn", "gelu-approximate")):
            if key in stack.values:
                stack.one_of(key, (only,))
    sizes = Entries(COSMOS_REASON2 if backbone is None else backbone, "relay.json: backbone", _NO_DEFAULT)
    vision, text, image_token_id = _read_backbone(sizes)
    read = GrootConfig(
        select_layer=top.count("select_layer", _MOST_LAYERS),
        backbone_embedding_dim=top.count("backbone_embedding_dim"),
        hidden_size=top.count("hidden_size"),
        input_embedding_dim=top.count("input_embedding_dim"),
        max_state_dim=top.count("max_state_dim"),
        max_action_dim=top.count("max_action_dim"),
        action_horizon=top.count("action_horizon"),
        max_num_embodiments=top.count("max_num_embodiments"),
        max_seq_len=top.count("max_seq_len"),
        num_steps=top.count("num_inference_timesteps"),
        num_timestep_buckets=top.count("num_timestep_buckets"),
        attend_text_every_n_blocks=top.count("attend_text_every_n_blocks"),
        state_history_length=top.count("state_history_length"),
        dit=_read_stack(dit),
        vl=_read_stack(vl),
        vision=vision,
        text=text,
        image_token_id=image_token_id,
    )
    _agree("diffusion_model_cfg.num_attention_heads x attention_head_dim", read.dit.width, read, "input_embedding_dim")
    _agree("diffusion_model_cfg.output_dim", dit.count("output_dim"), read, "hidden_size")
    _agree("vl_self_attention_cfg.num_attention_heads x attention_head_dim", read.vl.width, read, _FEATURES)
    _agree("the backbone's text_config.hidden_size", text.width, read, _FEATURES)
    _agree("the backbone's vision_config.out_hidden_size", vision.output_width, read, _FEATURES)
    if read.action_horizon > read.max_seq_len:
        raise CheckpointError(
            f"config.json: action_horizon is {read.action_horizon}, expected at most max_seq_len, {read.max_seq_len}"
        )
    return read


_FEATURES = "backbone_embedding_dim"
_MOST_LAYERS = 1024
_NO_DEFAULT = (
    "; no default is assumed, since the libraries' defaults are not the released model's: take the configuration that "
    "was saved with the weights"
)


def _read_stack(section: Entries) -> StackSizes:
    return StackSizes(
        section.count("num_layers", _MOST_LAYERS),
        section.count("num_attention_heads"),
        section.count("attention_head_dim"),
    )


def _read_backbone(section: Entries) -> tuple[VisionSizes, TextSizes, int]:
    vision, text = section.inner("vision_config"), section.inner("text_config")
    section.refuse_unknown(COSMOS_REASON2)
    vision.refuse_unknown(COSMOS_REASON2["vision_config"])
    text.refuse_unknown(COSMOS_REASON2["text_config"])
    vision.one_of("hidden_act", ("gelu_pytorch_tanh",))
    vision.one_of("in_channels", (3,))
    depth = vision.count("depth", _MOST_LAYERS)
    vision_sizes = VisionSizes(
        width=vision.count("hidden_size"),
        depth=depth,
        mlp=vision.count("intermediate_size"),
        heads=vision.count("num_heads"),
        patch=vision.count("patch_size"),
        merge=vision.count("spatial_merge_size"),
        frames=vision.count("temporal_patch_size"),
        output_width=vision.count("out_hidden_size"),
        positions=vision.count("num_position_embeddings"),
        deepstack=tuple(_integers(vision, "deepstack_visual_indexes", depth - 1)),
    )
    head_dim = text.count("head_dim")
    sections = _integers(section, "mrope_section", head_dim)
    if len(sections) != 3 or 2 * sum(sections) != head_dim:
        raise CheckpointError(
            f"{section.place}: mrope_section is {sections}, expected three numbers whose sum is half of head_dim, "
            f"{head_dim}"
        )
    if math.isqrt(vision_sizes.positions) ** 2 != vision_sizes.positions:
        raise CheckpointError(
            f"{vision.place}: num_position_embeddings is {vision_sizes.positions}, expected a square number"
        )
    text_sizes = TextSizes(
        vocab_size=text.count("vocab_size"),
        width=text.count("hidden_size"),
        mlp=text.count("intermediate_size"),
        heads=text.count("num_attention_heads"),
        kv_heads=text.count("num_key_value_heads"),
        head_dim=head_dim,
        rope_base=section.number("rope_theta", 1, 1e12),
        rope_sections=(sections[0], sections[1], sections[2]),
        epsilon=text.number("rms_norm_eps", 1e-12, 0.1),
    )
    return vision_sizes, text_sizes, section.count("image_token_id")


def _integers(section: Entries, key: str, most: int) -> list[int]:
    numbers = section.entry(key, list)
    for number in numbers:
        if type(number) is not int or not 0 <= number <= most:
            raise CheckpointError(f"{section.place}: {key} holds {shown(number)}, expected integers from 0 to {most}")
    return numbers


def _agree(what: str, width: int, read: GrootConfig, name: str) -> None:
    expected = getattr(read, name)
    if width != expected:
        raise CheckpointError(f"config.json: {what} is {width}, expected {name}, which is {expected}")
