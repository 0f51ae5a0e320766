"""What a π0 or π0.5 network is, as data: sizes, heads, horizon, prompt form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
"""openpi's image keys, in the order in which their tokens stand in the prefix (openpi: src/openpi/models/model.py)."""

Family = Literal["pi0", "pi05"]


@dataclass(frozen=True, slots=True)
class VisionSize:
    """A SigLIP tower: `image_size` pixels a side, cut into square patches of `patch` pixels."""

    width: int
    depth: int
    mlp: int
    heads: int
    patch: int = 14
    image_size: int = 224

    @property
    def tokens(self) -> int:
        """Tokens per image."""
        return (self.image_size // self.patch) ** 2


@dataclass(frozen=True, slots=True)
class TransformerSize:
    """A stack of Gemma blocks."""

    width: int
    depth: int
    mlp: int


@dataclass(frozen=True, slots=True)
class Pi0Config:
    """Everything the network, its prompt and its sampler need to know.

    Attributes:
        family: `pi05` modulates the expert's norms by time and has the state in its prompt; `pi0` has a state token.
        heads, head_dim: query heads and their width, the same in both transformers; there is one key-value head.
        vocab_size: rows of the token embedding.
        action_dim: width of the model's actions, padding included.
        state_dim: real width of the robot's state, as its statistics have it.
        max_token_len: longest prompt in tokens.
        state_in_prompt: whether the discretized state is written into the prompt (π0.5's usual form).
        num_steps: denoising steps when a request names none.
    """

    family: Family
    vision: VisionSize
    language: TransformerSize
    expert: TransformerSize
    heads: int
    head_dim: int
    vocab_size: int
    action_dim: int
    action_horizon: int
    state_dim: int
    max_token_len: int
    state_in_prompt: bool
    num_steps: int = 10
    cameras: tuple[str, ...] = field(default=CAMERAS)


DEMO = Pi0Config(
    family="pi05",
    vision=VisionSize(width=128, depth=2, mlp=512, heads=4, patch=28),
    language=TransformerSize(width=128, depth=3, mlp=384),
    expert=TransformerSize(width=96, depth=3, mlp=256),
    heads=4,
    head_dim=32,
    vocab_size=512,
    action_dim=4,
    action_horizon=16,
    state_dim=4,
    max_token_len=48,
    state_in_prompt=True,
)
"""The built-in robot's policy: π0.5's architecture at 1.9 million parameters."""
