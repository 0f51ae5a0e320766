"""What a DreamZero network is, as data: sizes and rules read from the checkpoint's own `config.json`.

Everything stands under `action_head_cfg.config` there (dreamzero: groot/vla/model/dreamzero/action_head/
wan_flow_matching_action_tf.py: WANPolicyHeadConfig). Nothing has a default that the reference doesn't have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from relay.engine.json_entries import Entries
from relay.engine.weights import CheckpointError

TEXT_TOKENS = 512
"""Length that every prompt is padded to; the padding's embeddings are zero, and the network attends to them."""


@dataclass(frozen=True, slots=True)
class DitSizes:
    """The causal diffusion transformer.

    Attributes:
        in_channels: of the patches: the latent's, and the first frame's with its mask where `sees_first_frame`.
        out_channels: of the latent.
        time_width: of the sinusoidal time code.
        sees_first_frame: whether every latent frame is joined by what the window began with (image-to-video).
        frame_tokens: tokens of one latent frame.
    """

    width: int
    depth: int
    heads: int
    mlp: int
    in_channels: int
    out_channels: int
    time_width: int
    sees_first_frame: bool
    frame_tokens: int
    epsilon: float

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True, slots=True)
class TextSizes:
    """The UMT5 text encoder."""

    vocab_size: int = 256_384
    width: int = 4096
    head_dim: int = 64
    heads: int = 64
    mlp: int = 10_240
    depth: int = 24


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """The CLIP vision tower, as many blocks of it as are run: the last of the released 32 is not."""

    width: int = 1280
    heads: int = 16
    mlp: int = 5120
    depth: int = 31
    patch: int = 14
    image_size: int = 224


@dataclass(frozen=True, slots=True)
class VideoSizes:
    """The video autoencoder's encoder: Wan 2.1 (8x in space) or Wan 2.2 (16x), 4x in time."""

    version: Literal["2.1", "2.2"] = "2.1"
    base: int = 96
    latent_channels: int = 16

    @property
    def space(self) -> int:
        return 8 if self.version == "2.1" else 16


@dataclass(frozen=True, slots=True)
class DreamZeroConfig:
    """Everything the network and its sampler need to know.

    Attributes:
        frames: video frames that a window's first-frame latent stands for, 33: 9 latent frames.
        block_frames: latent frames that one inference denoises.
        window_frames: latent frames that fit into a window, counting the first; then it begins again.
        video_final_noise: noise level at which the video stops, where it is decoupled from the actions; else None.
        video_size: (height, width) that the stitched frames are resized to; None leaves them as they are.
    """

    dit: DitSizes
    text: TextSizes
    image: ImageSizes
    video: VideoSizes
    frames: int
    block_frames: int
    window_frames: int
    action_horizon: int
    action_dim: int
    state_dim: int
    video_final_noise: float | None = None
    video_size: tuple[int, int] | None = None

    @property
    def window_tokens(self) -> int:
        return self.window_frames * self.dit.frame_tokens

    @property
    def latent_frames(self) -> int:
        """Latent frames of `frames` video frames."""
        return 1 + (self.frames - 1) // 4


def read_config(config: Mapping[str, Any], encoders: Mapping[str, Any] | None = None) -> DreamZeroConfig:
    """The configuration of a checkpoint.

    Args:
        config: the checkpoint's `config.json`.
        encoders: `text`, `image` and `video` sizes that differ from the released ones, by field name.

    Raises:
        CheckpointError: naming what is missing, of another kind, too large to be true or not run by this engine.
    """
    head = Entries(config, "config.json").inner("action_head_cfg").inner("config")
    dit = head.inner("diffusion_model_cfg")
    dit.one_of("model_type", ("i2v", "ti2v"))
    version = _version(head.inner("vae_cfg"))
    given = Entries(encoders or {}, "relay.json: encoders")
    given.refuse_unknown(("text", "image", "video"))
    video: dict[str, Any] = {"base": 160, "latent_channels": 48} if version == "2.2" else {}
    block = dit.count("num_frame_per_block", _MOST_STEPS)
    parts = DreamZeroConfig(
        dit=DitSizes(
            width=dit.count("dim"),
            depth=dit.count("num_layers", _MOST_LAYERS),
            heads=dit.count("num_heads"),
            mlp=dit.count("ffn_dim"),
            in_channels=dit.count("in_dim"),
            out_channels=dit.count("out_dim"),
            time_width=dit.count("freq_dim"),
            sees_first_frame=dit.entry_or("concat_first_frame_latent", True),
            frame_tokens=dit.count("frame_seqlen"),
            epsilon=dit.number("eps", 1e-12, 0.1),
        ),
        text=_sized(TextSizes, given, "text", {}),
        image=_sized(ImageSizes, given, "image", {}),
        video=_sized(VideoSizes, given, "video", {"version": version, **video}),
        frames=head.count("num_frames", _MOST_STEPS),
        block_frames=block,
        window_frames=dit.count("max_chunk_size", _MOST_STEPS) * block + 1,
        action_horizon=head.count("action_horizon", _MOST_STEPS),
        action_dim=head.count("action_dim"),
        state_dim=head.count("max_state_dim"),
        video_final_noise=_final_noise(head),
        video_size=_video_size(head),
    )
    _agree(head, dit, parts)
    return parts


_VIDEO_ENCODERS: Mapping[str, Literal["2.1", "2.2"]] = {"WanVideoVAE": "2.1", "WanVideoVAE38": "2.2"}
"""The reference's classes, and the version of Wan that each is of."""

_MOST_LAYERS = _MOST_STEPS = 1024

_BLOCK = 2
"""Latent frames of a block: what eight video frames make."""


def _version(vae: Entries) -> Literal["2.1", "2.2"]:
    """By the last part of the class's name."""
    name = vae.entry("_target_", str).rpartition(".")[2]
    return _VIDEO_ENCODERS[Entries({"_target_": name}, vae.place).one_of("_target_", _VIDEO_ENCODERS)]


def _agree(head: Entries, dit: Entries, parts: DreamZeroConfig) -> None:
    """What is said twice, or follows from something else, must agree."""
    sizes, channels = parts.dit, parts.video.latent_channels
    beside = 4 + channels if sizes.sees_first_frame else 0
    for entries, name, expected in (
        (dit, "num_frame_per_block", _BLOCK),
        (head, "num_frame_per_block", parts.block_frames),
        (dit, "num_action_per_block", parts.action_horizon),
        (dit, "num_state_per_block", 1),
        (dit, "out_dim", channels),
        (dit, "in_dim", channels + beside),
    ):
        value = entries.count(name)
        if value != expected:
            raise CheckpointError(
                f"{entries.place}: {name} is {value}; this engine runs networks in which it is {expected}"
            )
    if sizes.width % (2 * sizes.heads):
        raise CheckpointError(
            f"{dit.place}: num_heads is {sizes.heads}, expected a divisor of dim, {sizes.width}, with an even width "
            "for each head"
        )
    if sizes.time_width % 2:
        raise CheckpointError(f"{dit.place}: freq_dim is {sizes.time_width}, expected an even number")
    if parts.frames % 4 != 1 or parts.latent_frames < parts.block_frames:
        raise CheckpointError(
            f"{head.place}: num_frames is {parts.frames}, expected 5, 9, 13 and so on: one frame, and four for every "
            "further latent one"
        )
    if parts.image.width % parts.image.heads:
        raise CheckpointError(
            f"relay.json: encoders.image: heads is {parts.image.heads}, expected a divisor of width, "
            f"{parts.image.width}"
        )
    if parts.image.image_size < parts.image.patch:
        raise CheckpointError(
            f"relay.json: encoders.image: image_size is {parts.image.image_size}, less than one patch of "
            f"{parts.image.patch}"
        )


def _final_noise(head: Entries) -> float | None:
    decoupled = head.entry_or("decouple_inference_noise", False)
    told = head.values.get("video_inference_final_noise") is not None
    noise = head.number("video_inference_final_noise", 0, 1) if told else 0.8
    return noise if decoupled else None


def _video_size(head: Entries) -> tuple[int, int] | None:
    sides = ("target_video_height", "target_video_width")
    if all(head.values.get(side) is None for side in sides):
        return None
    height, width = (head.count(side, _MOST_PIXELS) for side in sides)
    return height, width


_MOST_PIXELS = 4096


def _sized(kind: Any, given: Entries, name: str, released: Mapping[str, Any]) -> Any:
    own = given.inner(name) if name in given.values else Entries({}, "")
    own.refuse_unknown([field for field in kind.__dataclass_fields__ if field != "version"])
    sizes = {field: own.count(field, _MOST_LAYERS) if field == "depth" else own.count(field) for field in own.values}
    return kind(**{**released, **sizes})
