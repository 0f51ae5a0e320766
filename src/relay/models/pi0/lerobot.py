"""What a lerobot folder says about its policy: `config.json`, the two processor files and their statistics.

lerobot describes what happens around the network as lists of steps (lerobot: src/lerobot/policies/pi0/processor_pi0.py,
policies/pi05/processor_pi05.py, processor/pipeline.py). Each step is known here or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from relay.engine.json_entries import entry, entry_or, read_json
from relay.engine.normalization import Kind, Normalization, Statistics
from relay.engine.statistics import fit, read_lerobot_state
from relay.engine.weights import CheckpointError
from relay.protocol.wording import shown
from relay.robots.profile import ActionDimension, Camera, RobotProfile, StatePart

CONFIG_FILE = "config.json"
PREPROCESSOR_FILE = "policy_preprocessor.json"
POSTPROCESSOR_FILE = "policy_postprocessor.json"

STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
EMPTY_CAMERA = IMAGES + "empty_camera_"

_KINDS: dict[str, Kind] = {"MEAN_STD": "z_score", "QUANTILES": "quantile", "MIN_MAX": "min_max", "IDENTITY": "none"}

_RELATIVE, _ABSOLUTE = "relative_actions_processor", "absolute_actions_processor"
_NORMALIZER, _UNNORMALIZER = "normalizer_processor", "unnormalizer_processor"
_RENAME, _TOKENIZER = "rename_observations_processor", "tokenizer_processor"
_PI05_PROMPT = "pi05_prepare_state_tokenizer_processor_step"
_PI0_PROMPT = "pi0_new_line_processor"
_BATCH, _DEVICE = "to_batch_processor", "device_processor"
_STEPS: dict[str, tuple[str, ...]] = {
    "pi05": (_RENAME, _BATCH, _RELATIVE, _NORMALIZER, _PI05_PROMPT, _TOKENIZER, _DEVICE),
    "pi0": (_RENAME, _BATCH, _PI0_PROMPT, _TOKENIZER, _DEVICE, _RELATIVE, _NORMALIZER),
}
"""The steps before the network, in lerobot's order; `relative_actions_processor` came later than the others."""

_STEPS_AFTER = (_UNNORMALIZER, _ABSOLUTE, _DEVICE)

_DEFAULTS: dict[str, Any] = {
    "n_obs_steps": 1,
    "min_period": 4e-3,
    "max_period": 4.0,
    "use_visual_memory": False,
    "use_proprioceptive_memory": False,
    "use_peft": False,
}
"""Settings of the network that only one value of is built here."""


@dataclass(frozen=True, slots=True)
class LerobotPolicy:
    """A lerobot folder's description, without its weights.

    Attributes:
        settings: what it says, as keys of `relay.json`.
        paligemma_variant: openpi's name for the sizes of vision tower and prefix transformer.
        image_resolution: (height, width) of the network's images.
        image_keys: lerobot's keys of the network's cameras, in the order of their tokens.
        state_dim, action_dim: the robot's real widths.
        state_kind, actions_kind: how each is scaled.
        state_file, actions_file: where the statistics stand; None where a step has no state file.
        relative: per action dimension, whether the network gives an offset from the state.
        action_names: from the training data, where they are written down.
        renamed: the robot's own keys for the network's, as (robot's, network's).
        tokenizer_name: the repository that the tokenizer was taken from.
    """

    settings: Mapping[str, Any]
    paligemma_variant: str | None
    image_resolution: tuple[int, int]
    image_keys: tuple[str, ...]
    state_dim: int
    action_dim: int
    state_kind: Kind
    actions_kind: Kind
    state_file: Path | None
    actions_file: Path | None
    relative: tuple[bool, ...]
    action_names: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    tokenizer_name: str | None

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the network's cameras: the keys without the beginning that most of them have."""
        return tuple(map(_short, self.image_keys))


def is_lerobot(folder: Path) -> bool:
    """Whether the folder's `config.json` is lerobot's, which alone has a `type`."""
    return (folder / CONFIG_FILE).is_file() and "type" in read_json(folder / CONFIG_FILE)


def read_lerobot(folder: Path) -> LerobotPolicy:
    """Read everything but the weights and the statistics.

    Raises:
        CheckpointError: a file is missing or damaged, or says what this engine does not do.
    """
    config = read_json(folder / CONFIG_FILE)
    family = entry(config, "type", str, CONFIG_FILE)
    if family not in _STEPS:
        raise CheckpointError(f"{CONFIG_FILE}: this is a {family!r} policy; pi0 and pi05 are served")
    for key, only in _DEFAULTS.items():
        if config.get(key, only) != only:
            raise CheckpointError(f"{CONFIG_FILE}: {key} is {config[key]!r}; only {only!r} is supported")
    before = _read_steps(folder / PREPROCESSOR_FILE, _STEPS[family])
    after = _read_steps(folder / POSTPROCESSOR_FILE, _STEPS_AFTER)
    prompt = _PI05_PROMPT if family == "pi05" else _PI0_PROMPT
    for file, steps, needed in (
        (PREPROCESSOR_FILE, before, (_NORMALIZER, prompt, _TOKENIZER)),
        (POSTPROCESSOR_FILE, after, (_UNNORMALIZER,)),
    ):
        for name in needed:
            if name not in steps:
                raise CheckpointError(f"{file} has no step {name!r}; a {family} policy needs one")
    if before[prompt].config.get("include_state_in_prompt", True) is not True:
        raise CheckpointError(
            f"{PREPROCESSOR_FILE}: {prompt} leaves the state out of the prompt, which is not supported"
        )
    image_keys = [key for key in _features(config, "input_features", "VISUAL") if not key.startswith(EMPTY_CAMERA)]
    if not image_keys:
        raise CheckpointError(f"{CONFIG_FILE}: input_features has no camera")
    state_dim = _width(config, "input_features", STATE, entry(config, "max_state_dim", int, CONFIG_FILE))
    action_dim = _width(config, "output_features", ACTION, entry(config, "max_action_dim", int, CONFIG_FILE))
    normalizer, unnormalizer = before[_NORMALIZER], after[_UNNORMALIZER]
    if _mode(normalizer, "VISUAL") != "none":
        raise CheckpointError(
            f"{PREPROCESSOR_FILE}: images are scaled with {normalizer.modes['VISUAL']}; only IDENTITY is supported"
        )
    state_kind = _mode(normalizer, "STATE")
    only_some = entry_or(normalizer.config, "normalize_observation_keys", [STATE], PREPROCESSOR_FILE)
    features = entry_or(normalizer.config, "features", {STATE: {}}, PREPROCESSOR_FILE)
    if STATE not in only_some or STATE not in features:
        state_kind = "none"
    if _RELATIVE in before:
        names = entry_or(before[_RELATIVE].config, "action_names", [], PREPROCESSOR_FILE)
    else:
        names = entry_or(config, "action_feature_names", [], CONFIG_FILE)
    return LerobotPolicy(
        settings={
            "model": family,
            "action_horizon": entry(config, "chunk_size", int, CONFIG_FILE),
            "action_dim": entry(config, "max_action_dim", int, CONFIG_FILE),
            "state_dim": state_dim,
            "state_in_prompt": family == "pi05",
            "max_token_len": entry(before[_TOKENIZER].config, "max_length", int, PREPROCESSOR_FILE),
            "num_steps": entry(config, "num_inference_steps", int, CONFIG_FILE),
        },
        paligemma_variant=entry_or(config, "paligemma_variant", "", CONFIG_FILE) or None,
        image_resolution=_resolution(config),
        image_keys=tuple(image_keys),
        state_dim=state_dim,
        action_dim=action_dim,
        state_kind=state_kind,
        actions_kind=_mode(unnormalizer, "ACTION"),
        state_file=normalizer.state_file,
        actions_file=unnormalizer.state_file,
        relative=_relative(before.get(_RELATIVE), after.get(_ABSOLUTE), action_dim),
        action_names=tuple(map(str, names)),
        renamed=_renamed(before[_RENAME].config) if _RENAME in before else (),
        tokenizer_name=entry_or(before[_TOKENIZER].config, "tokenizer_name", "", PREPROCESSOR_FILE) or None,
    )


def read_lerobot_normalization(policy: LerobotPolicy) -> Normalization:
    """The policy's statistics, checked against its widths.

    Raises:
        CheckpointError, StatisticsError: they are missing, or another robot's.
    """
    state = _read_statistics(policy.state_file, STATE, policy.state_kind, policy.state_dim)
    actions = _read_statistics(policy.actions_file, ACTION, policy.actions_kind, policy.action_dim)
    return Normalization(policy.state_kind, "lerobot", state, actions, policy.actions_kind)


def lerobot_profile(policy: LerobotPolicy) -> RobotProfile:
    """The robot that the policy was trained on, as far as the folder tells.

    Frames and state come under the network's own keys (`observation.images.front`), under those that lerobot renames to
    them, and as vLLM-Omni's clients send them: `front` in the map `images`, and `state`.
    """
    numbered = tuple(f"action_{i}" for i in range(policy.action_dim))
    names = policy.action_names[: policy.action_dim] + numbered[len(policy.action_names) :]
    return RobotProfile(
        name="lerobot",
        cameras=tuple(Camera(_short(key), _camera_keys(policy, key)) for key in policy.image_keys),
        state=(
            StatePart(
                keys=(*_keys(policy, STATE), "state"),
                names=tuple(f"state_{i}" for i in range(policy.state_dim)),
                units=("unknown",) * policy.state_dim,
            ),
        ),
        actions=tuple(
            ActionDimension(name, relative=relative, kind="position" if relative else "unknown")
            for name, relative in zip(names, policy.relative, strict=True)
        ),
        frames=("channels_first", "float"),
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a processor file."""

    file: str
    config: Mapping[str, Any]
    state_file: Path | None

    @property
    def modes(self) -> Mapping[str, Any]:
        """A normalizer's mode per kind of feature."""
        return entry_or(self.config, "norm_map", {}, self.file)


def _read_steps(path: Path, known: Sequence[str]) -> dict[str, _Step]:
    if not path.is_file():
        raise CheckpointError(
            f"no {path.name} in {path.parent}: it says how the state is scaled; folders from before lerobot 0.4 get "
            "one from lerobot's migrate_policy_normalization.py"
        )
    steps: dict[str, _Step] = {}
    listed = entry(read_json(path), "steps", list, path.name)
    for index, step in enumerate(listed):
        if not isinstance(step, dict):
            raise CheckpointError(f"{path.name}: steps[{index}] is {shown(step)}, expected an object")
        stated = cast("dict[str, Any]", step)
        name = entry_or(stated, "registry_name", "", path.name) or entry(stated, "class", str, path.name)
        if name not in known:
            raise CheckpointError(f"{path.name}: step {name!r} is not known; known are {', '.join(known)}")
        if name in steps:
            raise CheckpointError(f"{path.name} has the step {name!r} twice")
        state_file = entry_or(stated, "state_file", "", path.name)
        if Path(state_file).name != state_file:
            raise CheckpointError(f"{path.name}: state_file is {state_file!r}, expected a file in the same folder")
        config = entry_or(stated, "config", {}, path.name)
        if name == _DEVICE and config.get("float_dtype") not in (None, "float32"):
            raise CheckpointError(
                f"{path.name}: device_processor rounds to {config['float_dtype']}; only float32 is supported"
            )
        if name in (_NORMALIZER, _UNNORMALIZER) and config.get("eps", 1e-8) != 1e-8:
            raise CheckpointError(f"{path.name}: eps of {name} is {config['eps']}; only 1e-08 is supported")
        steps[name] = _Step(path.name, config, path.parent / state_file if state_file else None)
    expected = [name for name in known if name in steps]
    if list(steps) != expected:
        raise CheckpointError(
            f"{path.name} has its steps in the order {', '.join(steps)}; expected {', '.join(expected)}"
        )
    return steps


def _mode(step: _Step, feature: str) -> Kind:
    mode = entry_or(step.modes, feature, "IDENTITY", step.file)
    if mode not in _KINDS:
        raise CheckpointError(f"{step.file}: {feature} is scaled with {mode!r}; supported are {', '.join(_KINDS)}")
    return _KINDS[mode]


def _relative(relative: _Step | None, absolute: _Step | None, action_dim: int) -> tuple[bool, ...]:
    """lerobot's mask: every dimension but those whose name holds that of an excluded joint."""
    config = relative.config if relative else {}
    enabled = entry_or(config, "enabled", False, PREPROCESSOR_FILE)
    if enabled != entry_or(absolute.config if absolute else {}, "enabled", False, POSTPROCESSOR_FILE):
        raise CheckpointError(f"{_RELATIVE} and {_ABSOLUTE} must both be enabled or neither")
    if not enabled:
        return (False,) * action_dim
    excluded = [str(joint).lower() for joint in entry_or(config, "exclude_joints", [], PREPROCESSOR_FILE) if joint]
    names = [str(name).lower() for name in entry_or(config, "action_names", [], PREPROCESSOR_FILE)][:action_dim]
    kept = [any(joint in name for joint in excluded) for name in names]
    return tuple(not keep for keep in kept) + (True,) * (action_dim - len(kept))


def _read_statistics(file: Path | None, key: str, kind: Kind, width: int) -> Statistics:
    if kind == "none":
        return Statistics()
    if file is None:
        raise CheckpointError(
            f"this checkpoint has no statistics of {key!r}: the processor files name no state_file, as in base models "
            "that were never fine-tuned; fine-tune it, or put "
            '{"normalization": "none"} into relay.json to use the network as it is'
        )
    return fit(read_lerobot_state(file, key), kind, width, name=key, file=file)


def _features(config: Mapping[str, Any], key: str, kind: str) -> dict[str, Any]:
    features = config.get(key)
    if not isinstance(features, dict):
        raise CheckpointError(f"{CONFIG_FILE}: {key} is missing; it lists cameras, state and actions with their sizes")
    found = cast("dict[str, Any]", features)
    return {name: feature for name in found if (feature := entry(found, name, dict, CONFIG_FILE)).get("type") == kind}


def _width(config: Mapping[str, Any], key: str, feature: str, padded: int) -> int:
    """A vector's real width; lerobot takes the padded one where a folder has none."""
    features = {**_features(config, key, "STATE"), **_features(config, key, "ACTION")}
    if feature not in features:
        return padded
    shape = features[feature].get("shape")
    sound = isinstance(shape, list) and len(cast("list[Any]", shape)) == 1 and type(shape[0]) is int and shape[0] > 0
    if not sound:
        raise CheckpointError(f"{CONFIG_FILE}: the shape of {feature} is {shape!r}, expected one number")
    return shape[0]


def _resolution(config: Mapping[str, Any]) -> tuple[int, int]:
    """Height and width of the network's images."""
    sides = entry_or(config, "image_resolution", [224, 224], CONFIG_FILE)
    if len(sides) != 2 or any(type(side) is not int for side in sides):
        raise CheckpointError(f"{CONFIG_FILE}: image_resolution is {sides!r}, expected two integers")
    return sides[0], sides[1]


def _renamed(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    names = entry_or(config, "rename_map", {}, PREPROCESSOR_FILE)
    return tuple((name, entry(names, name, str, PREPROCESSOR_FILE)) for name in names)


def _short(image_key: str) -> str:
    return image_key.removeprefix(IMAGES)


def _camera_keys(policy: LerobotPolicy, image_key: str) -> tuple[str, ...]:
    keys: list[str] = []
    for key in _keys(policy, image_key):
        keys += [key, f"images/{_short(key)}", f"images/{key}"]
    return tuple(dict.fromkeys(keys))


def _keys(policy: LerobotPolicy, key: str) -> tuple[str, ...]:
    """The robot's keys for one of the network's: those renamed to it, and itself unless it's renamed to another."""
    own = tuple(robots for robots, networks in policy.renamed if networks == key)
    return own if key in dict(policy.renamed) else (*own, key)
