"""Robot profiles as YAML files: the shipped ones by name, a user's own by path.

Strict: unknown keys, other types and names that fit nothing are refused with file and key. Read once, at start-up.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from relay.robots.gripper import Gripper
from relay.robots.profile import KINDS, ActionDimension, Camera, ProfileError, RobotProfile, StatePart
from relay.robots.yaml_entries import Entries, expand, read_yaml

PROFILE_KEYS = (
    "base",
    "name",
    "control_hz",
    "cameras",
    "ignored_cameras",
    "frames",
    "state",
    "actions",
    "relative",
    "conversion",
    "statistics",
    "normalization",
)
STATE_KEYS = ("key", "names", "unit")
ACTION_KEYS = ("names", "unit", "kind", "scale", "limits", "gripper")
GRIPPER_KEYS = ("closed_at", "open_at")


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles that come with relay."""
    names = [entry.name for entry in files("relay.robots").iterdir()]
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def load_profile(name_or_path: str | Path) -> RobotProfile:
    """A shipped profile by its name, or a YAML file by its path, which ends in `.yaml` or `.yml`.

    Raises:
        ProfileError: naming the file, the key, what stands there and what was expected.
    """
    entries, default_name, folder = _open(name_or_path, Path())
    base = entries.text("base", None)
    if base is not None:
        entries = _extended(entries, base, folder)
    actions = _actions(entries)
    parts: dict[str, Any] = {
        "name": entries.text("name", default_name),
        "cameras": _cameras(entries.map("cameras")),
        "state": _state(entries),
        "actions": actions,
        "control_hz": entries.positive("control_hz"),
        "ignored_cameras": entries.texts("ignored_cameras", ()),
        "frames": entries.texts("frames", ()),
        "conversion": entries.choice("conversion", ("aloha",)),
        "statistics": entries.path("statistics", folder),
        "normalization": entries.choice("normalization", ("z_score", "quantile")),
    }
    try:
        return RobotProfile(**parts)
    except ProfileError as error:
        raise ProfileError(f"{entries.source}: {error}") from None


def _open(name_or_path: str | Path, folder: Path) -> tuple[Entries, str, Path]:
    """A profile's entries, its name and the folder that paths in it are relative to."""
    text = str(name_or_path)
    if text.endswith((".yaml", ".yml")):
        path = folder / Path(text).expanduser()
        try:
            content = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ProfileError(f"robot profile {path} cannot be read: {reason}") from None
        return read_yaml(content, str(path), PROFILE_KEYS), path.stem, path.parent
    if text not in shipped_profiles():
        near = get_close_matches(text, shipped_profiles(), n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ProfileError(
            f"robot profile {text!r} is not known{hint}; known are {', '.join(shipped_profiles())}, "
            "or a file that ends in .yaml"
        )
    content = files("relay.robots").joinpath(f"{text}.yaml").read_text("utf-8")
    return read_yaml(content, f"{text}.yaml", PROFILE_KEYS), text, Path()


def _extended(entries: Entries, base: str, folder: Path) -> Entries:
    """The entries over those of their base. One level, so that a profile is understood from two files at most."""
    below, _, base_folder = _open(base, folder)
    if "base" in below.values:
        raise ProfileError(f"{entries.source}: base: {below.source} has a base itself; extend that one")
    values = {key: value for key, value in below.values.items() if key != "name"}
    statistics = below.path("statistics", base_folder)
    if statistics is not None:
        values["statistics"] = str(statistics.absolute())
    return Entries(entries.source, "", {**values, **entries.values})


def _cameras(entries: Entries) -> tuple[Camera, ...]:
    return tuple(Camera(name, entries.texts(name)) for name in entries.values)


def _state(entries: Entries) -> tuple[StatePart, ...]:
    """Parts from groups; a group without a key goes on with the key of the one before."""
    parts: list[StatePart] = []
    for group in entries.groups("state", STATE_KEYS):
        names = group.names("names")
        units = (group.text("unit", "unknown"),) * len(names)
        if "key" in group.values:
            parts.append(StatePart(group.texts("key"), names, units))
        elif parts:
            before = parts.pop()
            parts.append(StatePart(before.keys, before.names + names, before.units + units))
        else:
            raise group.missing("key")
    return tuple(parts)


def _actions(entries: Entries) -> tuple[ActionDimension, ...]:
    groups = [(group, group.names("names")) for group in entries.groups("actions", ACTION_KEYS)]
    known = [name for _, names in groups for name in names]
    relative = expand(entries.texts("relative", ()), entries, "relative")
    for name in relative:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise entries.error("relative", f"{name!r} is not an action{hint}; they are {', '.join(known)}")
    return tuple(
        ActionDimension(
            name=name,
            unit=group.text("unit", "unknown"),
            kind=cast(Any, group.choice("kind", tuple(KINDS))) or "unknown",
            scale=group.positive("scale") or 1.0,
            relative=name in relative,
            limits=_limits(group, len(names), index),
            gripper=_gripper(group),
        )
        for group, names in groups
        for index, name in enumerate(names)
    )


def _limits(group: Entries, count: int, index: int) -> tuple[float, float] | None:
    """One pair for the whole group, or a list of one per dimension."""
    value = group.values.get("limits")
    if value is None:
        return None
    pairs = cast("list[Any]", value) if isinstance(value, list) else []
    if pairs and isinstance(pairs[0], list):
        if len(pairs) != count:
            raise group.error("limits", f"{len(pairs)} pairs for {count} names; give one pair, or one per name")
        value = pairs[index]
    pair = cast("list[Any]", value) if isinstance(value, list) else []
    if len(pair) != 2 or not all(_is_number(end) for end in pair):
        raise group.unfit("limits", "[least, most]")
    return float(pair[0]), float(pair[1])


def _gripper(group: Entries) -> Gripper | None:
    if "gripper" not in group.values:
        return None
    entries = group.map("gripper", GRIPPER_KEYS)
    try:
        return Gripper(entries.number("closed_at"), entries.number("open_at"))
    except ValueError as error:
        if isinstance(error, ProfileError):
            raise
        raise group.error("gripper", str(error)) from None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
