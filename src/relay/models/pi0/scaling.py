"""Which statistics a checkpoint's state and actions are scaled with, chosen from what its folder and its robot say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from relay.engine.normalization import Kind, Normalization, Statistics
from relay.engine.statistics import NORM_STATS_FILE, fit, read_lerobot_state, read_norm_stats
from relay.engine.weights import CheckpointError
from relay.models.pi0.formats import ASSETS_FOLDER
from relay.models.pi0.lerobot import ACTION, STATE, LerobotPolicy, read_lerobot_normalization
from relay.models.pi0.settings import SETTINGS_FILE, Setting, Settings
from relay.robots.profile import RobotProfile


@dataclass(frozen=True, slots=True)
class Scaling:
    """What the statistics came to.

    Attributes:
        normalization: None in model format only.
        files: where they stand.
        asset_id: under which of openpi's assets.
    """

    normalization: Normalization | None
    files: tuple[Path, ...] = ()
    asset_id: Setting | None = None


def choose_scaling(
    folder: Path,
    settings: Settings,
    profile: RobotProfile | None,
    policy: LerobotPolicy | None,
    assets: Mapping[str, Path],
) -> Scaling:
    kind = _kind(settings, profile)
    if kind == "none":
        return Scaling(Normalization("none", "openpi", Statistics(), Statistics()))
    if policy is not None:
        if profile is not None and profile.statistics is not None:
            raise CheckpointError(
                f"robot {profile.name} names the statistics {profile.statistics}, but a lerobot folder is served with "
                "those of its own processor files; leave 'statistics' out of the profile"
            )
        if kind is not None and not kind == policy.state_kind == policy.actions_kind:
            stated = settings.found.get("normalization")
            source = stated.source if stated and stated.value == kind else _of_profile(profile)
            raise CheckpointError(
                f"{source} says normalization {kind!r}, but lerobot's processor files say "
                f"{policy.state_kind!r} for the state and {policy.actions_kind!r} for the actions"
            )
        files = [file for file in (policy.state_file, policy.actions_file) if file]
        return Scaling(read_lerobot_normalization(policy), tuple(files))
    if kind is None and profile is None and settings.get("asset_id") is None:
        if assets:
            raise CheckpointError(
                f"there are statistics ({', '.join(assets)}), but nothing says how they are used: name openpi's "
                f"configuration with --config, or write 'normalization' into {SETTINGS_FILE} ('z_score' for pi0 and "
                "'quantile' for pi05, or 'none' to serve the network's own units only)"
            )
        return Scaling(None)
    if kind is None:
        kind = settings.require("normalization")
    file, asset_id = _statistics_file(folder, settings, profile, assets)
    state, actions = _read_statistics(file)
    state_dim = real_state_dim(settings, profile)
    state = fit(state, kind, state_dim, name="state", file=file)
    actions = fit(actions, kind, profile.action_dim if profile else None, name="actions", file=file)
    return Scaling(Normalization(kind, "openpi", state, actions), (file,), asset_id)


def _kind(settings: Settings, profile: RobotProfile | None) -> Kind | None:
    """How state and actions are scaled: as `relay.json` says, the robot's profile, or any other source."""
    stated = settings.found.get("normalization")
    if profile is not None and profile.normalization is not None and not (stated and stated.overrides):
        return profile.normalization
    return stated.value if stated else None


def _read_statistics(file: Path) -> tuple[Statistics, Statistics]:
    """State and actions of openpi's JSON, or of the state file of a lerobot normalizer."""
    if file.suffix == ".safetensors":
        return read_lerobot_state(file, STATE), read_lerobot_state(file, ACTION)
    return read_norm_stats(file)


def _of_profile(profile: RobotProfile | None) -> str:
    return f"robot {profile.name}" if profile else "the robot profile"


def _statistics_file(
    folder: Path, settings: Settings, profile: RobotProfile | None, assets: Mapping[str, Path]
) -> tuple[Path, Setting | None]:
    if profile is not None and profile.statistics is not None:
        return profile.statistics, None
    wanted = settings.found.get("asset_id")
    if not assets:
        place = folder / ASSETS_FOLDER / (wanted.value if wanted else "<robot>") / NORM_STATS_FILE
        raise CheckpointError(
            f"no statistics: looked for {place}; copy the {ASSETS_FOLDER} folder from where the checkpoint was "
            "trained, or name their file under 'statistics' in a robot profile and pass it with --robot"
        )
    found = ", ".join(assets)
    if wanted is not None:
        if wanted.value not in assets:
            raise CheckpointError(
                f"{wanted.source} asks for the statistics of {wanted.value!r}, but {folder / ASSETS_FOLDER} holds "
                f"those of {found}; write the right one into {SETTINGS_FILE} as 'asset_id'"
            )
        return assets[wanted.value], wanted
    if len(assets) == 1:
        (asset_id,) = assets
        return assets[asset_id], Setting(asset_id, f"the only one in {ASSETS_FOLDER}")
    if profile is not None and profile.name in assets:
        return assets[profile.name], Setting(profile.name, f"robot {profile.name}")
    raise CheckpointError(
        f"{folder / ASSETS_FOLDER} holds statistics for several robots: {found}; write the right one into "
        f"{SETTINGS_FILE} as 'asset_id', or name openpi's configuration with --config"
    )


def real_state_dim(settings: Settings, profile: RobotProfile | None) -> int | None:
    stated: int | None = settings.get("state_dim")
    if profile is None:
        return stated
    if stated is not None and stated != profile.state_dim:
        raise CheckpointError(
            f"{settings.source('state_dim')} says state_dim {stated}, but robot {profile.name} has {profile.state_dim}"
        )
    return profile.state_dim
