"""What turns prompts, first frames and clips into the network's inputs: UMT5, CLIP and Wan's video autoencoder.

They are `transformers`' and `diffusers`' own modules (the extra `dreamzero`), filled from the checkpoint's tensors
under the names of `encoder_names.py`. Only what an answer needs is built: no decoder, no text tower, and not CLIP's
last block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relay.models.dreamzero.config import TEXT_TOKENS, ImageSizes, TextSizes, VideoSizes
from relay.models.dreamzero.extra import imported

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

# Per channel of Wan 2.2's latents (dreamzero: groot/vla/model/dreamzero/modules/wan_video_vae.py); those of 2.1 are
# diffusers' defaults.

# fmt: off
_MEANS_2_2 = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
    0.157, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.123, -0.0313, -0.1649, 0.0117, 0.0723,
    -0.2839, -0.2083, -0.052, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)
_DEVIATIONS_2_2 = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.499, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.06, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)
# fmt: on


class TextEncoder(nn.Module):
    """Token ids to embeddings; what is padding becomes zero, which the network was trained to see."""

    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        transformers = imported("transformers")
        self.umt5 = transformers.UMT5EncoderModel(
            transformers.UMT5Config(
                vocab_size=sizes.vocab_size,
                d_model=sizes.width,
                d_kv=sizes.head_dim,
                d_ff=sizes.mlp,
                num_layers=sizes.depth,
                num_heads=sizes.heads,
                relative_attention_num_buckets=32,
                relative_attention_max_distance=128,
                feed_forward_proj="gated-gelu",
                dropout_rate=0.0,
                use_cache=False,
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """(1, 512, width) of the ids (n,) of one prompt, without padding."""
        padded = F.pad(tokens, (0, TEXT_TOKENS - len(tokens)))[None]
        mask = torch.arange(TEXT_TOKENS, device=tokens.device)[None] < len(tokens)
        embedded = self.umt5(input_ids=padded, attention_mask=mask.long()).last_hidden_state
        return embedded * mask[..., None]


class ImageEncoder(nn.Module):
    """A frame to CLIP's tokens before the final norm."""

    def __init__(self, sizes: ImageSizes) -> None:
        super().__init__()
        transformers = imported("transformers")
        self.size = sizes.image_size
        self.clip = transformers.CLIPVisionModel(
            transformers.CLIPVisionConfig(
                hidden_size=sizes.width,
                intermediate_size=sizes.mlp,
                num_hidden_layers=sizes.depth,
                num_attention_heads=sizes.heads,
                image_size=sizes.image_size,
                patch_size=sizes.patch,
                hidden_act="gelu",
                layer_norm_eps=1e-5,
            )
        )

    def forward(self, frame: Tensor) -> Tensor:
        """(1, 257, width) of a frame (1, 3, height, width) in [-1, 1]."""
        resized = F.interpolate(frame.float(), (self.size, self.size), mode="bicubic", align_corners=False)
        mean, std = (torch.tensor(values, device=frame.device)[:, None, None] for values in (_CLIP_MEAN, _CLIP_STD))
        pixels = ((resized * 0.5 + 0.5) - mean) / std
        return self.clip(pixel_values=pixels.to(frame.dtype)).last_hidden_state


class VideoEncoder(nn.Module):
    """Clips to normalized latents; nothing is kept from clip to clip."""

    def __init__(self, sizes: VideoSizes) -> None:
        super().__init__()
        autoencoder: Callable[..., Any] = imported("diffusers").AutoencoderKLWan
        options: dict[str, Any] = {"base_dim": sizes.base, "z_dim": sizes.latent_channels}
        if sizes.version == "2.2":
            options |= {
                "decoder_base_dim": 256,
                "is_residual": True,
                "in_channels": 12,
                "out_channels": 12,
                "patch_size": 2,
                "scale_factor_spatial": 16,
                "latents_mean": list(_MEANS_2_2),
                "latents_std": list(_DEVIATIONS_2_2),
            }
        self.wan = autoencoder(**options)
        self.wan.decoder = None
        self.wan.post_quant_conv = None

    def forward(self, clip: Tensor) -> Tensor:
        """Latents of a clip (1, 3, frames, height, width) in [-1, 1].

        (1, channels, 1 + (frames - 1) / 4, height / 8, width / 8), or / 16 in Wan 2.2.
        """
        latents = self.wan.encode(clip).latent_dist.mode()
        mean, std = (
            torch.tensor(getattr(self.wan.config, name), device=clip.device, dtype=torch.float32)[:, None, None, None]
            for name in ("latents_mean", "latents_std")
        )
        return ((latents.float() - mean) / std).to(clip.dtype)
