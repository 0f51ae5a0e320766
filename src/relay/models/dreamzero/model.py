"""One inference of DreamZero: observe the new frames, then denoise the next video and actions together.

Names follow dreamzero: groot/vla/model/dreamzero/action_head/wan_flow_matching_action_tf.py. It knows no cameras, no
robot and no text: frames come stitched, states normalized, prompts as tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from relay.models.dreamzero.branches import BranchPlan, Flows
from relay.models.dreamzero.dit import CrossKeys, Joined
from relay.models.dreamzero.memory import Episode, Keys, SessionMemory
from relay.models.dreamzero.schedule import STEPS, UniPC, grid
from relay.models.dreamzero.weights import Network

GUIDANCE = 5.0
"""How far the video's flow is pushed away from the negative prompt's; the actions' flow is not."""

BOTH = BranchPlan()

KEPT_PROMPTS = 16
"""Prompts whose embeddings are kept, 4 MB each at full size."""


class Steps(Protocol):
    """Which of the sixteen steps run the network."""

    last: int | None

    def runs(self, number: int, flows: Sequence[Tensor]) -> bool: ...


class Seen(NamedTuple):
    """One observation in the network's terms.

    Attributes:
        frames: stitched frames uint8 (T, height, width, 3), T of 1, 4, 8 or 9.
        state: normalized and padded, float32 (state_dim,).
        prompt: token ids, without padding.
    """

    frames: Tensor
    state: Tensor
    prompt: tuple[int, ...]


class Imagined(NamedTuple):
    """What an inference gives, with the episode that it leaves behind.

    Attributes:
        actions: normalized, float32 (action_horizon, action_dim).
        video: latents of the frames to come, float32 (1, channels, 2, height, width); meaningless unless asked for.
    """

    actions: Tensor
    video: Tensor
    episode: Episode


class DreamZero:
    """A network with the tokens of its negative prompt.

    Args:
        negative_prompt: token ids that guidance pushes away from, without padding.
        plan: which branches of guidance are computed here; by default both.
    """

    def __init__(self, network: Network, negative_prompt: tuple[int, ...], plan: BranchPlan = BOTH) -> None:
        self.plan = plan
        self.network, self.config = network, network.config
        self._negative_prompt = negative_prompt
        self._embedded: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        weight = network.dit.head.head.weight
        self.device, self.dtype = weight.device, weight.dtype

    @torch.inference_mode()
    def infer(
        self,
        memory: SessionMemory,
        seen: Seen,
        noise: tuple[Tensor, Tensor],
        steps: Steps,
        *,
        want_video: bool = False,
    ) -> Imagined:
        """Answer one observation; `memory.episode` stays as it was until the caller takes the answer's.

        `memory.keys` says itself which frames it holds: an inference that failed leaves none behind that the next one
        would take for its own.

        Args:
            noise: starting noise of video (1, channels, 2, height, width) and actions (1, horizon, action_dim).
            want_video: run guidance to the end, which the actions do not need.
        """
        episode = self._observe(memory, seen)
        keys = self._keys(memory, episode)
        actions, video = self._denoise(episode, keys, seen.state, noise, steps, want_video=want_video)
        return Imagined(actions[0], video, episode)

    def begins_anew(self, episode: Episode | None, seen: Seen) -> bool:
        """Whether the window begins with this observation: the first, another prompt, one frame alone, or no room."""
        return (
            episode is None
            or episode.prompt != seen.prompt
            or len(seen.frames) == 1
            or episode.frames + 2 * self.config.block_frames > self.config.window_frames
        )

    def _observe(self, memory: SessionMemory, seen: Seen) -> Episode:
        """The episode with the new frames in it."""
        frames = seen.frames.to(self.device)
        if memory.episode is None or self.begins_anew(memory.episode, seen):
            return self._begin(frames[-1] if len(frames) in (4, 9) else frames[0], seen.prompt)
        clip = _nine_frames(frames)
        latents = self.network.video(self._pixels(clip))[:, :, -self.config.block_frames :]
        return memory.episode.to(self.device).seeing(latents)

    def _begin(self, frame: Tensor, prompt: tuple[int, ...]) -> Episode:
        """A window's first frame (height, width, 3): alone as a latent, and as what every later latent is joined by."""
        pixels = self._pixels(frame[None])  # (1, 3, 1, height, width)
        image = self.network.image(pixels[:, :, 0])
        grey = pixels.new_zeros(1, 3, self.config.frames - 1, *pixels.shape[3:])
        latents = self.network.video(torch.cat((pixels, grey), 2))  # (1, channels, 9, height, width)
        mask = latents.new_zeros(1, 4, *latents.shape[2:])
        mask[:, :, 0] = 1
        return Episode(prompt, image, torch.cat((mask, latents), 1), (latents[:, :, :1],))

    def _keys(self, memory: SessionMemory, episode: Episode) -> Keys:
        """Keys and values of all frames of the episode, computing those that are missing."""
        if memory.keys is None:
            memory.keys = Keys(self._new_memory())
        keys = memory.keys
        held = keys.held(episode)
        keys.latents = keys.latents[:held]  # of another episode, or of an inference that failed
        if held == 0:
            keys.cross = ()  # before the new ones, which take as much again
            keys.cross = self._cross_keys(episode)
        start = sum(latents.shape[2] for latents in keys.latents)
        for latents in episode.latents[held:]:
            self._prefill(episode, keys, latents, start)
            keys.latents = (*keys.latents, latents)
            start += latents.shape[2]
        return keys

    def _prefill(self, episode: Episode, keys: Keys, latents: Tensor, start: int) -> None:
        """Write the keys and values of observed frames."""
        video = self._joined(episode, latents, start).expand(self.plan.count, -1, -1, -1, -1)
        dit = self.network.dit
        dit(video, 0, start, keys.memory, start * self.config.dit.frame_tokens, keys.cross)

    def _denoise(
        self,
        episode: Episode,
        keys: Keys,
        state: Tensor,
        noise: tuple[Tensor, Tensor],
        steps: Steps,
        *,
        want_video: bool,
    ) -> tuple[Tensor, Tensor]:
        """Actions and video from noise; both stay float32 between the network's passes."""
        video, actions = (part.to(self.device, torch.float32) for part in noise)
        state = state.to(self.device, self.dtype)[None, None]  # (1, 1, state_dim)
        video_grid, action_grid = grid(self.config.video_final_noise), grid()
        of_video, of_actions = UniPC(video_grid), UniPC(action_grid)
        flows: list[Tensor] = []
        action_flow = torch.empty(0)
        for number in range(STEPS):
            if steps.runs(number, flows):
                guided = want_video or number != steps.last
                timesteps = video_grid.timesteps[number], action_grid.timesteps[number]
                rows = self.plan.rows(guided=guided)
                mine = self._flows(episode, keys, (video, actions, state), timesteps, rows) if rows else None
                flow, action_flow = self.plan.together(mine, self.device)
                action_flow = action_flow[:1]
                flows = [*flows[-1:], flow[1:] + GUIDANCE * (flow[:1] - flow[1:]) if guided else flow]
            video = of_video.step(number, flows[-1], video)
            actions = of_actions.step(number, action_flow, actions)
        return actions, video

    def _flows(
        self,
        episode: Episode,
        keys: Keys,
        moving: tuple[Tensor, Tensor, Tensor],
        timesteps: tuple[int, int],
        rows: int,
    ) -> Flows:
        """One pass of the first `rows` branches.

        Args:
            moving: video, actions and state, one row each.
            timesteps: of video and actions.
        """
        video, actions, state = moving
        start = episode.frames
        joined = Joined(
            actions.to(self.dtype).expand(rows, -1, -1),
            state.expand(rows, -1, -1),
            timesteps[1],
            (start - 1) // self.config.block_frames,
        )
        flow, action_flow = self.network.dit(
            self._joined(episode, video.to(self.dtype), start).expand(rows, -1, -1, -1, -1),
            timesteps[0],
            start,
            keys.memory[:, :, :rows],
            start * self.config.dit.frame_tokens,
            [CrossKeys(*(part[:rows] for part in block)) for block in keys.cross],
            joined,
        )
        return Flows(flow.float(), action_flow.float())

    def _joined(self, episode: Episode, latents: Tensor, start: int) -> Tensor:
        """Latents with what the window began with beside them, where the network wants that."""
        if not self.config.dit.sees_first_frame:
            return latents
        count = latents.shape[2]
        first = episode.first
        beside = first[:, :, start : start + count] if start + count <= first.shape[2] else first[:, :, -count:]
        return torch.cat((latents, beside), 1)

    def _cross_keys(self, episode: Episode) -> list[CrossKeys]:
        prompts = [episode.prompt] * self.plan.prompt + [self._negative_prompt] * self.plan.negative
        text = torch.cat([self._embed(prompt) for prompt in prompts])  # (branches, 512, width)
        return self.network.dit.cross_keys(text, episode.image.to(self.device).expand(self.plan.count, -1, -1))

    def _embed(self, prompt: tuple[int, ...]) -> Tensor:
        """(1, 512, width), kept for the next time."""
        if prompt not in self._embedded:
            self._embedded[prompt] = self.network.text(torch.tensor(prompt, device=self.device))
            if len(self._embedded) > KEPT_PROMPTS:
                self._embedded.popitem(last=False)
        self._embedded.move_to_end(prompt)
        return self._embedded[prompt]

    def _new_memory(self) -> Tensor:
        config = self.config
        return self.network.dit.new_memory(self.plan.count, config.window_tokens + config.action_horizon + 1)

    def _pixels(self, frames: Tensor) -> Tensor:
        """Frames uint8 (T, height, width, 3) as (1, 3, T, height, width) in [-1, 1]."""
        pixels = (frames.permute(3, 0, 1, 2)[None].float() / 255).to(self.dtype)
        if self.config.video_size is not None:
            pixels = (pixels - 0.5) / 0.5
            flat = pixels[0].transpose(0, 1)  # (T, 3, height, width)
            flat = torch.nn.functional.interpolate(flat, self.config.video_size, mode="bilinear", align_corners=False)
            return flat.transpose(0, 1)[None]
        return (pixels - 0.5) / 0.5


def _nine_frames(frames: Tensor) -> Tensor:
    """The clip that two latent frames are taken from: four frames stand twice each, eight are led by their first."""
    if len(frames) == 4:
        frames = frames.repeat_interleave(2, 0)
    if len(frames) == 8:
        frames = torch.cat((frames[:1], frames))
    return frames
