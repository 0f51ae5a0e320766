"""What an episode leaves behind: a few megabytes that say everything, and the gigabytes that are computed from them.

An `Episode` is never changed: an inference makes the next one, and only an answer puts it in the old one's place. Keys
and values of the frames seen so far lie in one block per session. They can be dropped at any time, and computed again
from the latents by the same passes in the same order, which gives the same bits.
It knows no frames, no prompts as text, and no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from relay.models.dreamzero.dit import CrossKeys


@dataclass(frozen=True, slots=True)
class Episode:
    """One window of an episode, as far as it was observed.

    Attributes:
        prompt: token ids.
        image: what the image encoder made of the window's first frame, (1, 257, width).
        first: that frame's latent and mask, for every latent frame of a window, (1, 4 + channels, 9, height, width).
        latents: observed latents, (1, channels, 1, height, width) for the first frame and two frames each after that.
    """

    prompt: tuple[int, ...]
    image: Tensor
    first: Tensor
    latents: tuple[Tensor, ...]

    @property
    def frames(self) -> int:
        """Latent frames observed."""
        return sum(latent.shape[2] for latent in self.latents)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.image, self.first, *self.latents))

    def seeing(self, latents: Tensor) -> Episode:
        """The episode with more frames observed."""
        return replace(self, latents=(*self.latents, latents))

    def to(self, device: object) -> Episode:
        """A copy on another device; the same numbers."""
        return Episode(
            self.prompt,
            self.image.to(device),  # pyright: ignore[reportArgumentType, reportCallIssue]
            self.first.to(device),  # pyright: ignore[reportArgumentType, reportCallIssue]
            tuple(latent.to(device) for latent in self.latents),  # pyright: ignore[reportArgumentType, reportCallIssue]
        )


@dataclass(slots=True)
class Keys:
    """Keys and values on the device.

    Attributes:
        memory: of the frames observed and, behind them, of the pass that ran last; (depth, 2, branches, heads, tokens,
            head_dim).
        cross: of prompt and first frame, by block.
        latents: those of the frames whose keys and values `memory` holds, the very tensors of an episode.
    """

    memory: Tensor
    cross: Sequence[CrossKeys] = ()
    latents: tuple[Tensor, ...] = ()

    def held(self, episode: Episode) -> int:
        """How many of an episode's observations it holds already."""
        pairs = zip(self.latents, episode.latents, strict=False)
        return next(
            (number for number, (mine, its) in enumerate(pairs) if mine is not its),
            min(len(self.latents), len(episode.latents)),
        )

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes + sum(tensor.nbytes for block in self.cross for tensor in block)


class SessionMemory:
    """One session's episode, with its keys and values while they are on the device.

    Attributes:
        episode: None before the first answer.
        keys: None while they are set aside.
    """

    def __init__(self) -> None:
        self.episode: Episode | None = None
        self.keys: Keys | None = None

    @property
    def nbytes(self) -> int:
        """What it holds, nearly all of it on the device."""
        return (self.keys.nbytes if self.keys else 0) + (self.episode.nbytes if self.episode else 0)

    def evict(self) -> Episode | None:
        """Give up the keys and values; what is left computes them again."""
        self.keys = None
        if self.episode is not None:
            self.episode = self.episode.to("cpu")
        return self.episode

    def restore(self, snapshot: Episode | None) -> None:
        """Be what `evict` returned; keys and values come back with the next inference."""
        self.episode, self.keys = snapshot, None
