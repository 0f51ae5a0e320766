"""The tiny golden network, and its calls."""

from __future__ import annotations

from functools import cache

import torch
from tiny import ENCODERS, SCENARIOS, config_json, frames, golden, prompt, state, tiny_tensors

from relay.models.dreamzero.config import read_config
from relay.models.dreamzero.memory import SessionMemory
from relay.models.dreamzero.model import DreamZero, Imagined, Seen, Steps
from relay.models.dreamzero.schedule import FixedSteps
from relay.models.dreamzero.weights import load_network


@cache
def model(*, decouple: bool = False) -> DreamZero:
    config = read_config(config_json(decouple=decouple), ENCODERS)
    network = load_network(config, tiny_tensors(), torch.device("cpu"), torch.float32, lambda phase, share: None)
    return DreamZero(network, prompt("NEG"))


def seen(scenario: str, number: int) -> Seen:
    count, words = SCENARIOS[scenario][number]
    tag = f"{scenario}/{number}"
    return Seen(frames(tag, count), state(tag), prompt(words))


def noise() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(golden()["noise_video"]), torch.from_numpy(golden()["noise_action"])


def ask(
    memory: SessionMemory, scenario: str, number: int, *, steps: Steps | None = None, want_video: bool = False
) -> Imagined:
    """One call, which the session remembers."""
    network = model(decouple=scenario == "decouple")
    answer = network.infer(memory, seen(scenario, number), noise(), steps or FixedSteps(8), want_video=want_video)
    memory.episode = answer.episode
    return answer
