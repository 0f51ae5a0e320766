"""The engine around the golden network, so that recorded calls go the whole way of a request.

Its robot has one camera, whose frames are the recorded ones as they are, and its units are the network's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tiny_dreamzero import PROMPT_LENGTHS, SCENARIOS, frames, prompt, state
from tiny_dreamzero_model import model, noise

from relay.engine.base import Chunk, Failure, Work
from relay.models.dreamzero.checkpoint import Checkpoint
from relay.models.dreamzero.engine import DreamZeroEngine
from relay.models.dreamzero.footprint import footprint
from relay.models.dreamzero.frames import Views
from relay.models.dreamzero.recipe import Part, Recipe
from relay.models.dreamzero.sessions import DreamZeroSession
from relay.protocol.messages import Options

CAMERA, STATE = "observation/view", "observation/state"


class GoldenEngine(DreamZeroEngine):
    """Starts from the recorded noise, unless a request asks for its own; prompts are called by their letter."""

    def _noise(self, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
        return noise() if options.seed is None and options.noise is None else super()._noise(options)


def golden_engine(*, decouple: bool = False, sessions: int | None = None, **choices: Any) -> DreamZeroEngine:
    """A new engine around the shared network.

    Args:
        sessions: how many sessions fit on the device; None for as many as there are.
    """
    network = model(decouple=decouple)
    config = network.config
    ends = -np.ones(config.state_dim), np.ones(config.state_dim)
    recipe = Recipe(
        embodiment="tiny",
        cameras=("view",),
        views=Views((48, 64), 1.0, (48, 64), 1, wrist_on_top=False),
        state=(Part("state", *ends),),
        actions=(Part("action", *(end[: config.action_dim] for end in ends)),),
        horizon=config.action_horizon,
        state_width=config.state_dim,
        action_width=config.action_dim,
    )
    size = footprint(config, torch.float32, network.network)
    memory = None if sessions is None else sessions * size.session
    checkpoint = Checkpoint(network, _tokens, recipe, "roboarena", size)  # type: ignore[arg-type]
    return GoldenEngine("dreamzero", checkpoint, session_memory=memory, **choices)


def _tokens(words: str) -> tuple[int, ...]:
    return prompt(words if words in PROMPT_LENGTHS else "A")


def observation(scenario: str, number: int) -> dict[str, Any]:
    """A recorded call as a client would send it."""
    count, words = SCENARIOS[scenario][number]
    return observed(f"{scenario}/{number}", frames(f"{scenario}/{number}", count).numpy(), words)


def observed(tag: str, pictures: NDArray[np.uint8], words: str = "A") -> dict[str, Any]:
    return {CAMERA: pictures, STATE: state(tag).numpy(), "prompt": words}


def answer(
    engine: DreamZeroEngine, session: DreamZeroSession, asked: Mapping[str, Any], **options: Any
) -> Chunk | Failure:
    wanted = Options(**options)
    (row,) = engine.infer([Work(engine.prepare(asked, wanted), wanted, session)])
    return row


def actions(
    engine: DreamZeroEngine, session: DreamZeroSession, asked: Mapping[str, Any], **options: Any
) -> NDArray[np.float32]:
    row = answer(engine, session, asked, **options)
    assert isinstance(row, Chunk), row
    assert isinstance(row.actions, np.ndarray)
    return row.actions


@cache
def undisturbed(scenario: str) -> list[bytes]:
    """The actions of a scenario whose session is alone."""
    engine = golden_engine()
    session = engine.open_session()
    return [
        actions(engine, session, observation(scenario, number)).tobytes() for number in range(len(SCENARIOS[scenario]))
    ]
