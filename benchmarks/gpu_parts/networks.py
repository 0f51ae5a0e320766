"""Networks of random weights made on the device, requests for them, and the least time that a call can take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from relay.demo.vocabulary import write_tokenizer
from relay.engine.base import Work
from relay.models.pi0.config import CAMERAS, Pi0Config, TransformerSize, VisionSize
from relay.models.pi0.engine import Pi0Engine
from relay.models.pi0.model import Pi0
from relay.models.pi0.tokenizer import PromptTokenizer, load_vocabulary
from relay.protocol.images import Codec, encode_frame
from relay.protocol.messages import Options

PEAK_FLOP, PEAK_BYTES = 790e12, 4.3e12
"""Per second, of one H200: a large bfloat16 matrix product and a large copy, as PyTorch reaches them."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a robot sends: cameras, prompt tokens and the actions it gets."""

    name: str
    cameras: int
    prompt: int
    horizon: int


DROID, ALOHA = Case("2 cameras, 15 actions", 2, 51, 15), Case("3 cameras, 50 actions", 3, 60, 50)


def config(scale: str, case: Case) -> Pi0Config:
    """π0.5 as it is published, or a tiny one of its shape; no more cameras and prompt than the case has."""
    full = scale == "full"
    return Pi0Config(
        family="pi05",
        vision=VisionSize(1152, 27, 4304, 16) if full else VisionSize(32, 1, 64, 2, patch=56),
        language=TransformerSize(2048, 18, 16384) if full else TransformerSize(64, 2, 96),
        expert=TransformerSize(1024, 18, 4096) if full else TransformerSize(32, 2, 80),
        heads=8,
        head_dim=256 if full else 16,
        vocab_size=257_152 if full else 512,
        action_dim=32,
        action_horizon=case.horizon,
        state_dim=8,
        max_token_len=64,
        state_in_prompt=True,
        cameras=CAMERAS[: case.cameras],
    )


def random_network(config: Pi0Config, device: torch.device) -> Pi0:
    """Random weights of the usual size, the large matrices in bfloat16 on a GPU."""
    generator = torch.Generator(device).manual_seed(0)
    with torch.device(device):
        model = Pi0(config)
    with torch.no_grad():
        for parameter in model.parameters():
            deviation = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.normal_(0, deviation, generator=generator)
    return model.to_compute_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32).eval()


def engine(model: Pi0, max_batch: int, **options: Any) -> Pi0Engine:
    """An engine with a small vocabulary: prompts come as token ids."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        write_tokenizer(path)
        tokenizer = PromptTokenizer(load_vocabulary(path), model.config.max_token_len, state_in_prompt=True)
    return Pi0Engine("pi05", model, tokenizer, max_batch=max_batch, **options)


def observation(case: Case, seed: int, *, prompt: int | None = None, side: int = 224) -> dict[str, Any]:
    """A request in model format, its frames JPEG files."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:side, :side]
    frames = {
        camera: np.stack([128 + 90 * np.sin(x / (9 + 5 * i) + seed) * np.cos(y / (7 + c)) for c in range(3)], -1)
        for i, camera in enumerate(CAMERAS[: case.cameras])
    }
    length = case.prompt if prompt is None else prompt
    return {
        "image": {camera: encode_frame(frame.astype(np.uint8), Codec.JPEG_Q90) for camera, frame in frames.items()},
        "state": random.uniform(-1, 1, 8).astype(np.float32),
        "tokenized_prompt": random.integers(3, 500, length),
        "tokenized_prompt_mask": np.ones(length, bool),
    }


def batch(engine: Pi0Engine, case: Case, rows: int, steps: int, seed: int = 0) -> list[Work]:
    """Prepared requests, all different."""
    options = [Options(seed=seed + row, num_steps=steps) for row in range(rows)]
    return [Work(engine.prepare(observation(case, seed + row), o), o) for row, o in enumerate(options)]


def floor_ms(config: Pi0Config, case: Case, rows: int, steps: int) -> float:
    """The least time of a call: of each part its arithmetic or its memory traffic, whichever takes longer."""
    vision, prefix, step = parts(config, case, rows)
    return 1e3 * sum(max(flop / PEAK_FLOP, moved / PEAK_BYTES) for flop, moved in (vision, prefix, *[step] * steps))


def parts(config: Pi0Config, case: Case, rows: int) -> Sequence[tuple[float, float]]:
    """Floating-point operations and bytes of the tower, the prefix and one step, with compact prompts."""
    vision, language, expert = config.vision, config.language, config.expert
    query, key_value = config.heads * config.head_dim, 2 * config.head_dim
    images = case.cameras * vision.tokens
    prefix = images + case.prompt

    def weights(size: TransformerSize) -> int:
        return size.width * (query + key_value) + query * size.width + 3 * size.width * size.mlp

    def attention(size: TransformerSize, tokens: int, keys: int) -> int:
        return size.depth * 4 * tokens * keys * query

    tower = vision.depth * (4 * vision.width**2 + 2 * vision.width * vision.mlp) + vision.width * language.width
    see = 2 * images * (tower + 3 * vision.patch**2 * vision.width)
    see += vision.depth * 4 * images * vision.tokens * vision.width
    almost_all = replace(language, depth=language.depth - 1)  # of the last layer only keys and values
    read = 2 * prefix * (almost_all.depth * weights(language) + language.width * key_value)
    read += attention(almost_all, prefix, prefix)
    step = 2 * case.horizon * expert.depth * weights(expert) + attention(expert, case.horizon, prefix + case.horizon)
    cache = 2 * 2 * expert.depth * (prefix + case.horizon) * config.head_dim
    return (
        (rows * see, 2 * tower),
        (rows * read, 2 * language.depth * weights(language)),
        (rows * step, 2 * expert.depth * weights(expert) + rows * cache),
    )
