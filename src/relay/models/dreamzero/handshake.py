"""What clients read of a DreamZero policy before they send anything: RoboArena's six keys and no other.

RoboArena's client refuses a greeting with any other key (dreamzero: eval_utils/policy_server.py: PolicyServerConfig).
"""

from __future__ import annotations

from typing import Any

from relay.models.dreamzero.recipe import Recipe


def handshake(recipe: Recipe) -> dict[str, Any]:
    """The six keys, the same on both paths.

    `image_resolution` is (height, width) of the training data's frames; other sizes are padded to it.
    `action_space` is the key of the actions' first part.
    """
    on_robot = [camera for camera in recipe.cameras if any(part in camera for part in _ON_ROBOT)]
    return {
        "image_resolution": list(recipe.views.received),
        "n_external_cameras": len(recipe.cameras) - len(on_robot),
        "needs_wrist_camera": bool(on_robot),
        "needs_stereo_camera": False,
        "needs_session_id": True,
        "action_space": recipe.actions[0].key,
    }


_ON_ROBOT = ("wrist", "hand")
"""Parts of the names of cameras that move with the robot."""
