"""Twenty calls of the reference in six scenarios."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_dreamzero import SCENARIOS, distance, golden, prompt
from tiny_dreamzero_model import ask, model, recorded

from relay.models.dreamzero.memory import SessionMemory

pytestmark = pytest.mark.dreamzero


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_actions_and_video_equal_the_references(scenario: str) -> None:
    for number, call in enumerate(recorded(scenario)):
        assert distance(call.answer.actions, f"{scenario}/{number}/action") <= 1e-5, number
        assert distance(call.answer.video, f"{scenario}/{number}/video") <= 1e-5, number
        assert call.answer.episode.frames + 2 == golden()[f"{scenario}/{number}/next_start_frame"]


def test_encoders_equal_the_references() -> None:
    episode = recorded("base")[0].answer.episode
    assert distance(episode.first, "base/0/y") <= 1e-5
    assert distance(episode.image[:, ::32, ::64], "base/0/clip") <= 1e-5
    embedded = model().network.text(torch.tensor(prompt("A")))
    assert distance(embedded[:, :24], "prompt/A/embeds") <= 1e-5
    assert np.abs(embedded[:, 20:].numpy()).max() == 0


def test_leaving_out_the_last_guidance_changes_no_actions() -> None:
    shorter, longer = ask(SessionMemory(), "base", 0), recorded("base")[0].answer
    assert (shorter.actions - longer.actions).norm() <= 1e-5 * longer.actions.norm()
    assert (shorter.video - longer.video).norm() > 1e-3 * longer.video.norm()
