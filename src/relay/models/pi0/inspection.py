"""Everything that a checkpoint folder says, without reading its weights.

Widths, depths and the family come from the tensors' shapes; what they do not say is looked up in one source after the
other, and nothing is guessed. Problems are collected, so that all of them are told at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relay.engine.attempts import Attempts
from relay.engine.json_entries import entry, entry_or, read_json
from relay.engine.normalization import Normalization
from relay.engine.statistics import StatisticsError, find_openpi_assets
from relay.engine.weights import CheckpointError, TensorSource
from relay.models.pi0.config import CAMERAS, Family, Pi0Config
from relay.models.pi0.configurations import Configuration, find_configuration
from relay.models.pi0.formats import Format, open_tensors, recognise
from relay.models.pi0.lerobot import CONFIG_FILE, LerobotPolicy, lerobot_profile, read_lerobot
from relay.models.pi0.scaling import Scaling, choose_scaling, real_state_dim
from relay.models.pi0.settings import KEYS, SETTINGS_FILE, Setting, Settings, Source, heads_of, read_settings
from relay.models.pi0.weights import Sizes, find_problems, read_sizes
from relay.robots.profile import ProfileError, RobotProfile
from relay.robots.profile_file import load_profile

TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json", "paligemma_tokenizer.model")


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that is known about a folder without reading its weights; None is what could not be found out.

    Attributes:
        settings: values by key of `relay.json`, each with the source it was taken from.
        assets: statistics files by asset id.
        statistics: the files that are taken.
        raw_prompt: lerobot's π0 tokenizes prompts as they come.
        problems: why the folder cannot be served, a sentence each with its remedy.
    """

    folder: Path
    form: Format | None = None
    sizes: Sizes | None = None
    config: Pi0Config | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    assets: Mapping[str, Path] = field(default_factory=dict)
    statistics: tuple[Path, ...] = ()
    normalization: Normalization | None = None
    profile: RobotProfile | None = None
    tokenizer: Path | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    raw_prompt: bool = False
    problems: tuple[str, ...] = ()
    tensors: TensorSource | None = field(default=None, repr=False)

    def tensor_problems(self) -> list[str]:
        """Every tensor that is missing, unknown, or of another shape or kind; needs no setting."""
        if self.sizes is None or self.tensors is None:
            return []
        return find_problems(_of_sizes(self.sizes), self.tensors.shapes, self.tensors.dtypes)


def inspect_checkpoint(
    folder: Path,
    *,
    config: str | None = None,
    robot: str | None = None,
    tokenizer: Path | None = None,
    family: Family | None = None,
) -> Inspection:
    """Find out everything about a folder but its weights; the arguments are those of `load_checkpoint`."""
    attempt = Attempts(CheckpointError, StatisticsError, ProfileError)
    form = attempt(recognise, folder)
    tensors = attempt(open_tensors, folder, form) if form else None
    sizes = attempt(read_sizes, tensors.shapes) if tensors else None
    if form is None or tensors is None or sizes is None:
        return Inspection(folder, form, problems=attempt.problems)
    named = attempt(find_configuration, config) if config else None
    policy = attempt(read_lerobot, folder) if form == "lerobot" else None
    settings = attempt(_collect, folder, form, sizes, robot, config, named, policy)
    if settings is None or attempt.problems:
        vocabulary = tokenizer or attempt(_tokenizer_in, folder, policy)
        return Inspection(folder, form, sizes, tokenizer=vocabulary, problems=attempt.problems, tensors=tensors)
    attempt(_agree, settings, sizes, family)
    profile = attempt(_choose_profile, folder, settings, policy)
    assets = find_openpi_assets(folder)
    scaling = None
    if not attempt.problems:
        scaling = attempt(choose_scaling, folder, settings, profile, policy, assets)
    if scaling is None:
        attempt(settings.require_all, _NEVER_IN_TENSORS)
    made = attempt(_configure, sizes, settings, profile, policy, scaling) if scaling else None
    vocabulary = tokenizer or attempt(_tokenizer_in, folder, policy)
    return Inspection(
        folder,
        form,
        sizes,
        config=made,
        settings=_resolved(settings, made, scaling),
        assets=assets,
        statistics=scaling.files if scaling else (),
        normalization=scaling.normalization if scaling else None,
        profile=profile,
        tokenizer=vocabulary,
        metadata=settings.get("metadata") or {},
        raw_prompt=policy is not None and sizes.family == "pi0",
        problems=attempt.problems,
        tensors=tensors,
    )


def complete_settings(found: Inspection) -> dict[str, Any]:
    """What a `relay.json` must hold for the folder to be served without further options.

    Raises:
        CheckpointError: something is not known yet.
    """
    if found.problems:
        raise CheckpointError("\n".join(found.problems))
    values = {key: found.settings[key].value for key in KEYS if key in found.settings}
    if _is_file(values.get("robot", "")) and found.settings["robot"].source != SETTINGS_FILE:
        given, home = Path(values["robot"]).expanduser(), found.folder.resolve()
        robot = given.parent.resolve() / given.name  # a link keeps its own name, which ends in .yaml
        values["robot"] = str(robot.relative_to(home) if robot.is_relative_to(home) else robot)
    return values


_NEVER_IN_TENSORS = ("action_horizon", "max_token_len", "num_steps", "vision_heads", "state_in_prompt")


def _collect(
    folder: Path,
    form: Format,
    sizes: Sizes,
    robot: str | None,
    config: str | None,
    named: Configuration | None,
    policy: LerobotPolicy | None,
) -> Settings:
    """All that anything says, in order of precedence."""
    sources = [Source("the command line", {"robot": robot}, overrides=True)]
    if (folder / SETTINGS_FILE).is_file():
        sources.append(Source(SETTINGS_FILE, read_settings(folder / SETTINGS_FILE), overrides=True))
    variants: list[str | None] = []
    if policy is not None:
        if config is not None:
            raise CheckpointError(
                f"--config {config}: this is a lerobot folder, which says itself what openpi's configurations say; "
                "leave the option out"
            )
        sources.append(Source(f"lerobot's {CONFIG_FILE}", policy.settings))
        variants.append(policy.paligemma_variant)
    elif form == "openpi-pytorch" and (folder / CONFIG_FILE).is_file():
        stated = read_json(folder / CONFIG_FILE)
        numbers = ("action_horizon", "action_dim")
        sizes_stated = {key: entry(stated, key, int, CONFIG_FILE) for key in numbers if stated.get(key) is not None}
        sources.append(Source(f"openpi's {CONFIG_FILE}", sizes_stated))
        variants.append(entry_or(stated, "paligemma_variant", "", CONFIG_FILE) or None)
    if named is not None:
        sources.append(Source(f"the configuration {config}", named.settings()))
        variants.append(named.paligemma_variant)
    for variant in variants:
        heads = heads_of(variant, sizes.vision_width, sizes.vision_depth)
        sources.append(Source(f"paligemma_variant {variant}", {"vision_heads": heads}))
    return Settings(sources)


def _agree(settings: Settings, sizes: Sizes, family: Family | None) -> None:
    """What the tensors tell is never said otherwise."""
    facts = {
        "model": sizes.family,
        "action_dim": sizes.action_dim,
        "head_dim": sizes.head_dim,
        "heads": sizes.query_width // sizes.head_dim,
    }
    for key, value in facts.items():
        stated = settings.get(key)
        if stated is not None and stated != value:
            raise CheckpointError(f"{settings.source(key)} says {key} {stated!r}, but the tensors say {value!r}")
    if family is not None and family != sizes.family:
        raise CheckpointError(f"this is a {sizes.family} checkpoint; serve it as {sizes.family}, not as {family}")


def _choose_profile(folder: Path, settings: Settings, policy: LerobotPolicy | None) -> RobotProfile | None:
    """The robot profile that is named, or the one a lerobot folder describes."""
    name = settings.get("robot")
    if name is None:
        return lerobot_profile(policy) if policy else None
    if settings.source("robot") == SETTINGS_FILE and _is_file(name):
        name = str(folder / name)
    profile = load_profile(name)
    cameras = policy.cameras if policy else CAMERAS
    strange = [camera.name for camera in profile.cameras if camera.name not in cameras]
    if strange:
        raise CheckpointError(
            f"robot {profile.name} fills the camera {strange[0]!r}, but this checkpoint's are {', '.join(cameras)}"
        )
    if policy is not None and profile.action_dim != policy.action_dim:
        raise CheckpointError(
            f"robot {profile.name} takes {profile.action_dim} action dimensions, but this checkpoint gives "
            f"{policy.action_dim}"
        )
    if policy is not None:
        _agree_on_offsets(profile, policy)
    return profile


def _agree_on_offsets(profile: RobotProfile, policy: LerobotPolicy) -> None:
    """An offset that is taken for a position, or the other way round, would move the robot far."""
    for action, offset in zip(profile.actions, policy.relative, strict=True):
        if action.relative != offset:
            own = "a value of its own"
            said, given = (own, "an offset") if offset else ("an offset", own)
            names = [name.name for name, relative in zip(profile.actions, policy.relative, strict=True) if relative]
            raise CheckpointError(
                f"robot {profile.name} takes {action.name!r} for {said}, but this checkpoint gives it as {given}: "
                f"write 'relative: [{', '.join(names)}]' into the profile, as lerobot's processor files have it"
            )


def _configure(
    sizes: Sizes, settings: Settings, profile: RobotProfile | None, policy: LerobotPolicy | None, scaling: Scaling
) -> Pi0Config:
    state_dim = real_state_dim(settings, profile)
    if state_dim is None and scaling.normalization is not None and scaling.normalization.kind != "none":
        state_dim = len(scaling.normalization.state.pair(scaling.normalization.kind)[0])
    values: dict[str, Any] = {} if state_dim is None else {"state_dim": state_dim}
    bounds = {
        "action_horizon": (1, 512),
        "state_dim": (1, sizes.action_dim),
        "max_token_len": (8, 2048),
        "num_steps": (1, 50),
        "vision_heads": (1, sizes.vision_width),
    }
    values |= settings.require_all([*([] if "state_dim" in values else ["state_dim"]), *_NEVER_IN_TENSORS])
    for key, (least, most) in bounds.items():
        if not least <= values[key] <= most:
            place = settings.source(key) if key in settings.found else "the statistics"
            raise CheckpointError(f"{place}: {key} must be between {least} and {most}, got {values[key]}")
    if sizes.vision_width % values["vision_heads"]:
        raise CheckpointError(
            f"{settings.source('vision_heads')}: vision_heads {values['vision_heads']} does not divide the width "
            f"{sizes.vision_width}"
        )
    if values["state_in_prompt"] and sizes.family == "pi0":
        raise CheckpointError(
            f"{settings.source('state_in_prompt')}: state_in_prompt is true, but a pi0 network has a token of its own "
            "for the state"
        )
    if profile is not None and profile.action_dim > sizes.action_dim:
        raise CheckpointError(
            f"robot {profile.name} takes {profile.action_dim} action dimensions, but this network gives "
            f"{sizes.action_dim}"
        )
    if policy is not None and policy.image_resolution != (sizes.image_size, sizes.image_size):
        raise CheckpointError(
            f"lerobot's {CONFIG_FILE} says image_resolution {list(policy.image_resolution)}, but the tensors say "
            f"{[sizes.image_size] * 2}"
        )
    return Pi0Config(
        family=sizes.family,
        vision=sizes.vision(values["vision_heads"]),
        language=sizes.language,
        expert=sizes.expert,
        heads=sizes.query_width // sizes.head_dim,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab_size,
        action_dim=sizes.action_dim,
        action_horizon=values["action_horizon"],
        state_dim=values["state_dim"],
        max_token_len=values["max_token_len"],
        state_in_prompt=values["state_in_prompt"],
        num_steps=values["num_steps"],
        cameras=policy.cameras if policy else CAMERAS,
    )


def _of_sizes(sizes: Sizes) -> Pi0Config:
    """A network of these sizes; what its tensors do not depend on is made up."""
    return Pi0Config(
        family=sizes.family,
        vision=sizes.vision(heads=1),
        language=sizes.language,
        expert=sizes.expert,
        heads=sizes.query_width // sizes.head_dim,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab_size,
        action_dim=sizes.action_dim,
        action_horizon=1,
        state_dim=1,
        max_token_len=1,
        state_in_prompt=False,
    )


def _resolved(settings: Settings, config: Pi0Config | None, scaling: Scaling | None) -> dict[str, Setting]:
    """Every setting that is known, those included that the tensors and the statistics tell."""
    found = dict(settings.found)
    if config is not None:
        told = {
            "model": config.family,
            "action_dim": config.action_dim,
            "heads": config.heads,
            "head_dim": config.head_dim,
        }
        found = {key: Setting(value, "the tensors") for key, value in told.items()} | found
        found.setdefault("state_dim", Setting(config.state_dim, "the robot or its statistics"))
    if scaling is not None and scaling.normalization is not None and scaling.normalization.style == "openpi":
        kind = scaling.normalization.kind
        if "normalization" not in found or found["normalization"].value != kind:
            found["normalization"] = Setting(kind, "the robot profile")
    if scaling is not None and scaling.asset_id is not None:
        found["asset_id"] = scaling.asset_id
    return {key: found[key] for key in KEYS if key in found}


def _is_file(robot: str) -> bool:
    """Whether a robot is named by a profile of its own; in `relay.json` relative to the folder."""
    return robot.endswith((".yaml", ".yml"))


def _tokenizer_in(folder: Path, policy: LerobotPolicy | None) -> Path:
    places = [folder / name for name in TOKENIZER_FILES] + [folder / "tokenizer" / name for name in TOKENIZER_FILES]
    found = [place for place in places if place.is_file()]
    if not found:
        repository = (policy.tokenizer_name if policy else None) or "google/paligemma-3b-pt-224"
        raise CheckpointError(
            f"no tokenizer in {folder}; put {' or '.join(TOKENIZER_FILES[:2])} of the Hugging Face repository "
            f"{repository} there, or pass --tokenizer FILE"
        )
    return found[0]
