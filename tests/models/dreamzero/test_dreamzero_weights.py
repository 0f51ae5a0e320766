"""Strict loading, and the network of the smaller backbone, Wan 2.2."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tiny_dreamzero import ENCODERS, config_json, shapes, value_of

from relay.engine.weights import CheckpointError
from relay.models.dreamzero.config import DreamZeroConfig, read_config
from relay.models.dreamzero.memory import SessionMemory
from relay.models.dreamzero.model import DreamZero, Seen
from relay.models.dreamzero.schedule import FixedSteps
from relay.models.dreamzero.weights import Network, load_network

pytestmark = pytest.mark.dreamzero

Shapes = dict[str, list[int]]

QUERY = "action_head.model.blocks.1.self_attn.q.weight"


class Named:
    """Tensors of these names and shapes, with the values that follow from their names."""

    dtypes: Mapping[str, torch.dtype] = {}

    def __init__(self, told: Shapes) -> None:
        self._told = told

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(shape) for name, shape in self._told.items()}

    def read(self, name: str) -> torch.Tensor:
        return torch.from_numpy(value_of(name, self._told[name]))


def load(told: Shapes, config: DreamZeroConfig | None = None) -> Network:
    config = config or read_config(config_json(), ENCODERS)
    return load_network(config, Named(told), torch.device("cpu"), torch.float32, lambda phase, share: None)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda told: told.pop(QUERY), f"missing: {QUERY}"),
        (lambda told: told.update({"action_head.model.more": [1]}), "unknown: action_head.model.more"),
        (
            lambda told: told.update({QUERY: [96, 95]}),
            f"wrong shape: {QUERY} is (96, 95), expected (96",
        ),
        (lambda told: told.update({"a.lora_A.weight": [1]}), "adapter: a.lora_A.weight"),
    ],
)
def test_a_tensor_that_is_missing_unknown_or_of_another_shape_is_named(
    change: Callable[[Shapes], Any], told: str
) -> None:
    tensors = dict(shapes())
    change(tensors)
    with pytest.raises(CheckpointError, match=re.escape(told)):
        load(tensors)


def smaller_config() -> dict[str, Any]:
    """A tiny network on Wan 2.2: 48 latent channels, 16 pixels to one of them, and no first frame beside them."""
    config = config_json()
    head = config["action_head_cfg"]["config"]
    head["diffusion_model_cfg"] |= {"model_type": "ti2v", "concat_first_frame_latent": False, "frame_seqlen": 8}
    head["diffusion_model_cfg"] |= {"in_dim": 48, "out_dim": 48}
    head["vae_cfg"]["_target_"] += "38"
    return config | {"action_head_cfg": {"config": head | {"target_video_height": 64, "target_video_width": 128}}}


def smaller_tensors() -> Shapes:
    """Its tensors, those of the video encoder by the names of Wan 2.2's own modules."""
    told = {name: list(shape) for name, shape in shapes().items() if ".vae." not in name}
    told["action_head.model.patch_embedding.weight"][1] = 48
    for kind in ("weight", "bias"):
        told[f"action_head.model.head.head.{kind}"][0] = 4 * 48
    inside = "action_head.vae.model.encoder."

    def convolution(name: str, out: int, into: int, *kernel: int) -> None:
        told[f"{name}.weight"], told[f"{name}.bias"] = [out, into, *kernel], [out]

    def residual(name: str, out: int, into: int) -> None:
        told[f"{name}.residual.0.gamma"], told[f"{name}.residual.3.gamma"] = [into, 1, 1, 1], [out, 1, 1, 1]
        convolution(f"{name}.residual.2", out, into, 3, 3, 3)
        convolution(f"{name}.residual.6", out, out, 3, 3, 3)
        if out != into:
            convolution(f"{name}.shortcut", out, into, 1, 1, 1)

    convolution(inside + "conv1", 8, 12, 3, 3, 3)
    widths = (8, 8, 16, 32, 32)
    for block in range(4):
        there = f"{inside}downsamples.{block}.downsamples."
        residual(there + "0", widths[block + 1], widths[block])
        residual(there + "1", widths[block + 1], widths[block + 1])
        if block < 3:
            convolution(there + "2.resample.1", widths[block + 1], widths[block + 1], 3, 3)
        if block in (1, 2):
            convolution(there + "2.time_conv", widths[block + 1], widths[block + 1], 3, 1, 1)
    residual(inside + "middle.0", 32, 32)
    residual(inside + "middle.2", 32, 32)
    told[inside + "middle.1.norm.gamma"] = [32, 1, 1]
    convolution(inside + "middle.1.to_qkv", 96, 32, 1, 1)
    convolution(inside + "middle.1.proj", 32, 32, 1, 1)
    told[inside + "head.0.gamma"] = [32, 1, 1, 1]
    convolution(inside + "head.2", 96, 32, 3, 3, 3)
    convolution("action_head.vae.model.conv1", 96, 96, 1, 1, 1)
    return told


def test_the_smaller_backbone_loads_strictly_by_the_names_of_its_own_modules() -> None:
    config = read_config(smaller_config(), ENCODERS)
    network = load(smaller_tensors(), config)
    assert (config.video.version, config.video_size, config.dit.sees_first_frame) == ("2.2", (64, 128), False)
    latents = network.video(torch.zeros(1, 3, 9, 64, 128))
    assert latents.shape == (1, 48, 3, 4, 8)
    assert network.dit.patch_embedding.in_channels == 48


def test_the_smaller_backbone_answers_without_a_first_frame_beside_the_latents() -> None:
    model = DreamZero(load(smaller_tensors(), read_config(smaller_config(), ENCODERS)), (5, 6))
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 48, 2, 4, 8, generator=random), torch.randn(1, 24, 32, generator=random)
    memory, actions = SessionMemory(), []
    for count in (1, 4):
        frames = torch.randint(0, 256, (count, 96, 160, 3), generator=random, dtype=torch.uint8)
        answer = model.infer(memory, Seen(frames, torch.zeros(64), (1, 2, 3)), noise, FixedSteps(8))
        memory.episode = answer.episode
        actions.append(answer.actions)
    assert all(chunk.shape == (24, 32) and chunk.isfinite().all() for chunk in actions)
    assert not torch.equal(*actions)


def test_the_smaller_backbones_frames_are_resized_as_in_training_after_they_are_normalized() -> None:
    model = DreamZero(load(smaller_tensors(), read_config(smaller_config(), ENCODERS)), (5, 6))
    frames = torch.randint(0, 256, (2, 96, 160, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    normalized = frames.permute(0, 3, 1, 2).float() / 127.5 - 1
    rows = (torch.arange(64) + 0.5) * 96 / 64 - 0.5  # centres of pixels, no antialiasing
    columns = (torch.arange(128) + 0.5) * 160 / 128 - 0.5
    top, left = rows.floor().long(), columns.floor().long()
    down, right = (rows - top)[:, None], columns - left
    upper = normalized[:, :, top][..., left] * (1 - right) + normalized[:, :, top][..., left + 1] * right
    lower = normalized[:, :, top + 1][..., left] * (1 - right) + normalized[:, :, top + 1][..., left + 1] * right
    expected = (upper * (1 - down) + lower * down).transpose(0, 1)[None]
    assert torch.allclose(model._pixels(frames), expected, atol=1e-5)


def test_the_smaller_backbones_latents_are_scaled_by_the_published_constants() -> None:
    scale = load(smaller_tensors(), read_config(smaller_config(), ENCODERS)).video.wan.config
    for values, plain, weighted in (
        (scale.latents_mean, -0.5589, -7.0659),
        (scale.latents_std, 32.536, 758.3531),
    ):  # sums over the 48 numbers of the reference's wan_video_vae.py, plain and by position
        assert sum(values) == pytest.approx(plain)
        assert sum(place * value for place, value in enumerate(values)) == pytest.approx(weighted)


@pytest.mark.parametrize("place", [("diffusion_model_cfg", "concat_first_frame_latent"), ("decouple_inference_noise",)])
def test_a_switch_that_is_text_is_refused(place: tuple[str, ...]) -> None:
    config = config_json()
    inner = config["action_head_cfg"]["config"]
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = "false"
    with pytest.raises(CheckpointError, match=f"{place[-1]} is 'false'"):
        read_config(config, ENCODERS)
