"""What clients read of a GR00T policy before they send anything, derived from its checkpoint's recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relay.models.groot.recipe import ActionGroup, Recipe, StatePart

IMAGE_RESOLUTION = (180, 320)
"""The frames that DROID's robots send (vllm-omni: vllm_omni/deploy/Gr00tN1d7.yaml): a hint, any size is taken."""

_FORMS = {
    "xyz_rot6d": "position, then the first two rows of the rotation matrix",
    "xyz_rotvec": "position, then the rotation vector",
    "matrix": "the rows of a 4x4 matrix",
}


def vllm_handshake(recipe: Recipe, tags: Sequence[str]) -> dict[str, Any]:
    """The `policy_server_config` of vLLM-Omni, with this checkpoint's values.

    Args:
        tags: all embodiments that the checkpoint has statistics of.
    """
    return {
        "image_resolution": list(IMAGE_RESOLUTION),
        "needs_session_id": True,
        "embodiment_tag": recipe.embodiment.tag,
        "action_horizon": recipe.horizon,
        "action_keys": [group.key for group in recipe.actions],
        "supported_embodiments": list(tags),
    }


def openpi_metadata(recipe: Recipe, tags: Sequence[str]) -> dict[str, Any]:
    """What OpenPI clients are told besides the standard keys: enough to build an observation and to use the reply.

    `frames` are the control steps of each camera's frames, 0 being now. Of each action group the first row is the one
    to execute first. `kind` is `absolute`, or `delta` for steps from one action to the next; `range` is what the
    statistics say of values that are no offsets, (dim,) each.
    """
    return {
        **vllm_handshake(recipe, tags),
        "frames": list(recipe.frames),
        "language_key": recipe.language_key,
        "state_steps": recipe.state_steps,
        "state": [_part(part, recipe) for part in recipe.state],
        "actions": [_group(group) for group in recipe.actions],
    }


def _part(part: StatePart, recipe: Recipe) -> Mapping[str, Any]:
    told: dict[str, Any] = {"key": part.key, "dim": part.width}
    forms = [
        _FORMS[group.relative] for group in recipe.actions if group.state_key == part.key and group.relative in _FORMS
    ]
    return {**told, "form": forms[0]} if forms else told


def _group(group: ActionGroup) -> Mapping[str, Any]:
    told: dict[str, Any] = {"key": group.key, "dim": group.width, "kind": "delta" if group.delta else "absolute"}
    if group.relative is None:
        if group.scaling == "min_max" and group.low.ndim == 1:
            told["range"] = [group.low.tolist(), group.high.tolist()]
        return told
    told["from_state"] = group.state_key
    form = _FORMS.get(group.relative)
    return {**told, "form": form} if form else told
