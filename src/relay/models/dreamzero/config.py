"""What a DreamZero network is, as data: sizes and rules read from the checkpoint's own `config.json`.

Everything stands under `action_head_cfg.config` there (dreamzero: groot/vla/model/dreamzero/action_head/
wan_flow_matching_action_tf.py: WANPolicyHeadConfig). Nothing has a default that the reference doesn't have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from relay.engine.json_entries import entry_or
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
        CheckpointError: naming what is missing or of another kind.
    """
    head = _Entries(config, "config.json").map("action_head_cfg").map("config")
    dit = head.map("diffusion_model_cfg")
    model_type = dit.text("model_type")
    if model_type not in ("i2v", "ti2v"):
        raise CheckpointError(f"diffusion_model_cfg.model_type is {model_type!r}; expected 'i2v' or 'ti2v'")
    version = "2.2" if head.map("vae_cfg").text("_target_").endswith("VAE38") else "2.1"
    sizes = {"text": TextSizes, "image": ImageSizes, "video": VideoSizes}
    given = _Entries(encoders or {}, "encoders")
    if unknown := given.values.keys() - sizes.keys():
        raise CheckpointError(f"encoders.{min(unknown)} is not known; known are {', '.join(sizes)}")
    video: dict[str, Any] = {"version": version}
    if version == "2.2":
        video |= {"base": 160, "latent_channels": 48}
    block = dit.integer("num_frame_per_block")
    parts = DreamZeroConfig(
        dit=DitSizes(
            width=dit.integer("dim"),
            depth=dit.integer("num_layers"),
            heads=dit.integer("num_heads"),
            mlp=dit.integer("ffn_dim"),
            in_channels=dit.integer("in_dim"),
            out_channels=dit.integer("out_dim"),
            time_width=dit.integer("freq_dim"),
            sees_first_frame=dit.flag("concat_first_frame_latent", True),
            frame_tokens=dit.integer("frame_seqlen"),
            epsilon=dit.number("eps"),
        ),
        text=_sized(TextSizes, given, "text", {}),
        image=_sized(ImageSizes, given, "image", {}),
        video=_sized(VideoSizes, given, "video", video),
        frames=head.integer("num_frames"),
        block_frames=block,
        window_frames=dit.integer("max_chunk_size") * block + 1,
        action_horizon=head.integer("action_horizon"),
        action_dim=head.integer("action_dim"),
        state_dim=head.integer("max_state_dim"),
        video_final_noise=(
            float(head.values.get("video_inference_final_noise", 0.8))
            if head.flag("decouple_inference_noise", False)
            else None
        ),
        video_size=_video_size(head),
    )
    for name, value, expected in (
        ("num_action_per_block", dit.integer("num_action_per_block"), parts.action_horizon),
        ("num_state_per_block", dit.integer("num_state_per_block"), 1),
        ("num_frame_per_block", head.integer("num_frame_per_block"), block),
    ):
        if value != expected:
            raise CheckpointError(f"{name} is {value}; this engine runs networks in which it is {expected}")
    return parts


def _video_size(head: _Entries) -> tuple[int, int] | None:
    height, width = (head.values.get(f"target_video_{side}") for side in ("height", "width"))
    return None if height is None or width is None else (int(height), int(width))


def _sized(kind: Any, given: _Entries, name: str, released: Mapping[str, Any]) -> Any:
    values = given.map(name).values if name in given.values else {}
    fields = tuple(kind.__dataclass_fields__)
    if unknown := values.keys() - set(fields):
        raise CheckpointError(f"encoders.{name}.{min(unknown)} is not known; known are {', '.join(fields)}")
    return kind(**{**released, **values})


class _Entries:
    """One map of the file, read entry by entry with errors that name the entry."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values, self._path = values, path

    def map(self, name: str) -> _Entries:
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self._path} has no map {name}; take the folder of a DreamZero checkpoint")
        return _Entries(cast("Mapping[str, Any]", value), f"{self._path}.{name}")

    def flag(self, name: str, default: bool) -> bool:
        return entry_or(self.values, name, default, self._path)

    def integer(self, name: str) -> int:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self._path}.{name} is {value!r}; expected a positive integer")
        return value

    def number(self, name: str) -> float:
        value = self.values.get(name)
        try:
            return float(cast("Any", value))
        except (TypeError, ValueError):
            raise CheckpointError(f"{self._path}.{name} is {value!r}; expected a number") from None

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            raise CheckpointError(f"{self._path}.{name} is {value!r}; expected text")
        return value
