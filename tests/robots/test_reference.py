"""The tests' own formulas against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from reference import expected_model_state, expected_robot_actions

STATISTICS = {
    name: {"mean": [1.0] * 8, "std": [2.0] * 8, "q01": [-2.0] * 8, "q99": [2.0] * 8} for name in ("state", "actions")
}
OBSERVATION = {"observation/joint_position": np.full(7, 5.0), "observation/gripper_position": 0.5}


@pytest.mark.parametrize(("kind", "joint", "gripper"), [("z_score", 2.0, -0.25), ("quantile", 2.5, 0.25)])
def test_a_state_is_normalized(kind: str, joint: float, gripper: float) -> None:
    state = expected_model_state("droid", OBSERVATION, STATISTICS, kind)
    assert state == pytest.approx(np.array([joint] * 7 + [gripper]), abs=1e-5)


@pytest.mark.parametrize(("kind", "value"), [("z_score", 2.0), ("quantile", 1.0)])
def test_offsets_are_added_to_the_state_after_normalization_is_undone(kind: str, value: float) -> None:
    actions = expected_robot_actions("droid-jointpos", OBSERVATION, np.full((1, 32), 0.5), STATISTICS, kind)
    assert actions == pytest.approx(np.array([[value + 5] * 7 + [value]]), abs=1e-5)
