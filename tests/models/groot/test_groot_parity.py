"""The network against recorded outputs of a public implementation: same weights, same noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_groot import golden, golden_inputs, two_frame_model

BF16_GATE = 5e-2

RECORDED = {
    "actions_1_step": (1, 2),
    "actions_4_steps": (4, 2),
    "actions_10_steps": (10, 2),
    "actions_4_steps_embodiment_0": (4, 0),
}


def distance(ours: torch.Tensor, reference: NDArray[np.float32]) -> float:
    """Largest difference in units of the reference's standard deviation."""
    return float(np.abs(ours.float().numpy() - reference).max() / reference.std())


@torch.inference_mode()
def test_backbone_features_equal_the_reference() -> None:
    features = two_frame_model().backbone(golden_inputs(1))
    assert distance(features, golden()["backbone_features"][0]) <= 1e-4


@torch.inference_mode()
def test_adapted_features_equal_the_reference() -> None:
    model, inputs = two_frame_model(), golden_inputs(1)
    assert distance(model.adapt(model.backbone(inputs), inputs), golden()["adapted_features"][0]) <= 1e-4


@pytest.mark.parametrize("recorded", list(RECORDED))
def test_float32_actions_equal_the_reference(recorded: str) -> None:
    num_steps, slot = RECORDED[recorded]
    actions = two_frame_model().sample_actions(golden_inputs(num_steps, slot=slot))
    assert distance(actions, golden()[recorded]) <= 1e-5
    assert moved(actions, recorded) <= 1e-5


@pytest.mark.parametrize("recorded", list(RECORDED))
def test_bfloat16_actions_stay_near_the_float32_reference(recorded: str) -> None:
    num_steps, slot = RECORDED[recorded]
    actions = two_frame_model(torch.bfloat16).sample_actions(golden_inputs(num_steps, slot=slot, dtype=torch.bfloat16))
    assert moved(actions, recorded) <= BF16_GATE


def test_another_state_and_other_eyes_would_be_noticed() -> None:
    inputs = golden_inputs(4)
    for other in (
        replace(inputs, state=inputs.state.flip(1)),
        replace(inputs, text=inputs.images, images=inputs.text),
        replace(inputs, positions=torch.zeros_like(inputs.positions)),
    ):
        assert moved(two_frame_model().sample_actions(other), "actions_4_steps") > 5e-3


def moved(actions: torch.Tensor, recorded: str) -> float:
    """`distance` of what the network does to the noise, most of which a tiny network leaves as it is."""
    return distance(actions - torch.from_numpy(golden()["noise"]), golden()[recorded] - golden()["noise"])
