"""The tiny golden network, and its calls."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b

import torch
from tiny_dreamzero import ENCODERS, SCENARIOS, TinyTensors, config_json, frames, golden, prompt, state
from torch import Tensor

from relay.models.dreamzero.config import read_config
from relay.models.dreamzero.memory import SessionMemory
from relay.models.dreamzero.model import DreamZero, Imagined, Seen, Steps
from relay.models.dreamzero.schedule import FixedSteps
from relay.models.dreamzero.weights import load_network


def model(*, decouple: bool = False) -> DreamZero:
    return _models()[decouple]


@cache
def _models() -> tuple[DreamZero, DreamZero]:
    """Without and with decoupled noise, the same weights."""
    configs = [read_config(config_json(decouple=decouple), ENCODERS) for decouple in (False, True)]
    network = load_network(configs[0], TinyTensors(), torch.device("cpu"), torch.float32, lambda phase, share: None)
    for name in ("image", "video"):
        encoder = getattr(network, name)
        encoder.forward = _asked_once(encoder.forward)
    decoupled = copy(network)
    decoupled.config = configs[1]
    return DreamZero(network, prompt("NEG")), DreamZero(decoupled, prompt("NEG"))


def _asked_once(encode: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """An encoder that computes every input once, as most of the tests' time would be spent on the same frames.

    That nothing but the input matters is shown by the recorded calls, each of which comes after others.
    """
    known: dict[tuple[object, ...], Tensor] = {}

    def answer(pixels: Tensor) -> Tensor:
        key = (*pixels.shape, blake2b(pixels.contiguous().numpy()).digest())
        if key not in known:
            known[key] = encode(pixels)
        return known[key].clone()

    return answer


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


@dataclass(frozen=True)
class Recorded:
    """One call of a scenario that ran undisturbed.

    Attributes:
        before: the session as it was, with its keys and values.
    """

    before: SessionMemory
    answer: Imagined


@cache
def recorded(scenario: str) -> list[Recorded]:
    """All calls of a scenario, with the whole guidance; run once for all tests."""
    memory, calls = SessionMemory(), []
    for number in range(len(SCENARIOS[scenario])):
        before = duplicate(memory)
        steps = FixedSteps(16 if scenario == "full16" else 8)
        calls.append(Recorded(before, ask(memory, scenario, number, steps=steps, want_video=True)))
    return calls


def session_before(scenario: str, number: int) -> SessionMemory:
    """A session that has answered the calls of a scenario before this one."""
    return duplicate(recorded(scenario)[number].before)


def duplicate(memory: SessionMemory) -> SessionMemory:
    """The same session once more, sharing nothing that is written to."""
    other = SessionMemory()
    other.episode = memory.episode
    other.keys = replace(memory.keys, memory=memory.keys.memory.clone()) if memory.keys else None
    return other
