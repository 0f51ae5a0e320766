"""A robot profile as the YAML text that `profile_file` reads back to the same profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, TypeVar

import yaml

from relay.robots.profile import ActionDimension, RobotProfile, StatePart

_Item = TypeVar("_Item")

_HEADING = """\
# A robot profile, written by relay; edit it, and pass it with --robot. Keys and kinds: docs/robot-profiles.md.
# 'unknown' is what the checkpoint does not tell: write the unit (rad, m, rad/s, ...) and the kind (position, velocity,
# relative, relative_to_observation, effort) there.
"""


def profile_text(profile: RobotProfile) -> str:
    """The whole profile, nothing left to defaults of a base."""
    entries: dict[str, Any] = {"name": profile.name}
    if profile.control_hz is not None:
        entries["control_hz"] = profile.control_hz
    entries["cameras"] = {camera.name: _one_or_list(camera.keys) for camera in profile.cameras}
    for key, texts in (("ignored_cameras", profile.ignored_cameras), ("frames", profile.frames)):
        if texts:
            entries[key] = list(texts)
    if profile.conversion is not None:
        entries["conversion"] = profile.conversion
    entries["state"] = [group for part in profile.state for group in _state_groups(part)]
    entries["actions"] = _action_groups(profile.actions)
    relative = [action.name for action in profile.actions if action.relative]
    if relative:
        entries["relative"] = relative
    if profile.statistics is not None:
        entries["statistics"] = str(profile.statistics.absolute())
    if profile.normalization is not None:
        entries["normalization"] = profile.normalization
    return _HEADING + yaml.safe_dump(entries, sort_keys=False, default_flow_style=None, allow_unicode=True, width=110)


def _state_groups(part: StatePart) -> list[dict[str, Any]]:
    """Dimensions of one unit each; the groups after the first go on with its key."""
    dimensions = list(zip(part.names, part.units, strict=True))
    groups = [
        {"names": _one_or_list([name for name, _ in same]), "unit": unit}
        for unit, same in _runs(dimensions, lambda dimension: dimension[1])
    ]
    groups[0] = {"key": _one_or_list(part.keys), **groups[0]}
    return groups


def _action_groups(actions: Sequence[ActionDimension]) -> list[dict[str, Any]]:
    """Dimensions that differ in nothing but their names."""
    return [
        {"names": _one_or_list([action.name for action in same]), **_shared(same[0])}
        for _, same in _runs(actions, _shared)
    ]


def _shared(action: ActionDimension) -> dict[str, Any]:
    entries: dict[str, Any] = {"unit": action.unit, "kind": action.kind}
    if action.scale != 1:
        entries["scale"] = action.scale
    if action.limits is not None:
        entries["limits"] = list(action.limits)
    if action.gripper is not None:
        entries["gripper"] = {"closed_at": action.gripper.closed_at, "open_at": action.gripper.open_at}
    return entries


def _runs(items: Sequence[_Item], key: Callable[[_Item], Any]) -> list[tuple[Any, list[_Item]]]:
    return [(value, list(same)) for value, same in groupby(items, key)]


def _one_or_list(texts: Sequence[str]) -> str | list[str]:
    return texts[0] if len(texts) == 1 else list(texts)
