"""A GR00T reply worked out one number after the other, from the folder's files and the network alone.

Shares nothing with the engine but the network, which has golden outputs of its own: frames, prompt, state, noise and
actions are done here again, slowly, as Isaac-GR00T's description has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from groot_folders import BACKBONE, CONFIG, HORIZONS, IDS, LANGUAGE, VOCABULARY, processor_kwargs, statistics_of
from numpy.typing import NDArray
from tokenizers import Tokenizer

from relay.engine.weights import SafetensorsSource
from relay.models.groot.assemble import assemble
from relay.models.groot.config import read_config
from relay.models.groot.inputs import GrootRow
from relay.models.groot.model import Groot
from relay.models.groot.weights import load_weights

IDENTITY = {"crop_fraction": 1.0}
"""Settings under which frames of 256x256 stay as they are, and larger ones of whole multiples are averaged."""


def expected_actions(folder: Path, tag: str, slot: int, observation: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Each group's actions (1, horizon, k), for an observation in the reference form and four steps."""
    model = _network(folder.joinpath("model.safetensors").resolve())
    config = model.config
    settings = processor_kwargs([tag])["modality_configs"][tag]
    images = [
        shrunk(observation["video"][camera][0][time])
        for time in range(len(settings["video"]["delta_indices"]))
        for camera in settings["video"]["modality_keys"]
    ]
    state = np.zeros(config.max_state_dim, np.float32)
    scaled = scaled_state(tag, settings, observation["state"])
    state[: len(scaled)] = scaled
    row = GrootRow(prompt(observation["language"][LANGUAGE[tag]][0][0], images), tuple(images), state, slot)
    shape = (1, config.action_horizon, config.max_action_dim)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.bfloat16)
    normalized = model.sample_actions(assemble(model, [row], noise.float(), 4))[0].numpy().astype(np.float64)
    return robot_actions(tag, settings, normalized, observation["state"])


@cache
def _network(file: Path) -> Groot:
    """The tests' folders link to the same weights, so they are loaded once."""
    config, source = read_config(CONFIG, BACKBONE), SafetensorsSource(file)
    slots = list(IDS.values())
    return load_weights(config, source, torch.device("cpu"), torch.float32, lambda *_: None, slots=slots)


def shrunk(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A frame whose sides are the same multiple of 256, averaged over squares, halves rounded up."""
    factor = frame.shape[0] // 256
    blocks = frame.reshape(256, factor, 256, factor, 3).astype(np.int64)
    return ((2 * blocks.sum((1, 3)) + factor**2) // (2 * factor**2)).astype(np.uint8)


def prompt(text: str, images: list[NDArray[np.uint8]]) -> NDArray[np.int64]:
    """Qwen's chat form as one text, tokenized as a whole."""
    kept = "".join(letter for letter in text.lower() if letter.isalnum() or letter in "_ ")
    blocks = "".join(
        f"<|vision_start|>{'<|image_pad|>' * (image.shape[0] * image.shape[1] // 1024)}<|vision_end|>"
        for image in images
    )
    tokenizer = Tokenizer.from_file(str(VOCABULARY))
    whole = f"<|im_start|>user\n{blocks}{kept}<|im_end|>\n"
    return np.array(tokenizer.encode(whole, add_special_tokens=False).ids)


def scaled_state(tag: str, settings: Mapping[str, Any], state: Mapping[str, Any]) -> list[float]:
    """Between the percentiles, number by number, cut off at -1 and 1."""
    scaled: list[float] = []
    for key in settings["state"]["modality_keys"]:
        told = statistics_of(tag)["state"][key]
        for value, low, high in zip(state[key][0, 0], told["q01"], told["q99"], strict=True):
            scaled.append(min(1.0, max(-1.0, 2 * (float(value) - low) / (high - low) - 1)))
    return scaled


def robot_actions(
    tag: str, settings: Mapping[str, Any], normalized: NDArray[np.float64], state: Mapping[str, Any]
) -> dict[str, NDArray[np.float64]]:
    """Every group's rows in the robot's units, made absolute one by one."""
    groups: dict[str, NDArray[np.float64]] = {}
    start = 0
    for key, how in zip(settings["action"]["modality_keys"], settings["action"]["action_configs"], strict=True):
        relative = how["rep"] == "RELATIVE"
        told = statistics_of(tag)["relative_action" if relative else "action"][key]
        low, high = np.array(told["min" if relative else "q01"]), np.array(told["max" if relative else "q99"])
        width = low.shape[-1]
        rows: list[NDArray[np.float64]] = []
        for step in range(HORIZONS[tag]):
            bottom, top = (low[step], high[step]) if relative else (low, high)
            share = (np.clip(normalized[step, start : start + width], -1, 1) + 1) / 2
            value = bottom + share * (top - bottom)
            if relative:
                base = np.asarray(state[key][0, -1], np.float64)
                value = moved_pose(base, value) if how["type"] == "EEF" else base + value
            rows.append(value)
        groups[key] = np.stack(rows)[None]
        start += width
    return groups


def moved_pose(base: NDArray[np.float64], step: NDArray[np.float64]) -> NDArray[np.float64]:
    """One pose seen from another, as the product of their 4x4 matrices."""
    moved = as_matrix(base) @ as_matrix(step)
    return np.concatenate([moved[:3, 3], moved[0, :3], moved[1, :3]])


def as_matrix(pose: NDArray[np.float64]) -> NDArray[np.float64]:
    first = pose[3:6] / np.linalg.norm(pose[3:6])
    second = pose[6:9] - (pose[6:9] @ first) * first
    second /= np.linalg.norm(second)
    matrix = np.eye(4)
    matrix[:3, :3] = [first, second, np.cross(first, second)]
    matrix[:3, 3] = pose[:3]
    return matrix
