"""What a lerobot folder says of its GR00T N1.7 policy, in the form of Isaac-GR00T's own files.

lerobot writes lists of steps instead (lerobot: src/lerobot/policies/groot/processor_groot.py): one that packs the
inputs, one that resizes frames, one that decodes actions. Statistics stand in their settings by key, or, where a policy
was trained on a plain data set, in a file of tensors as one state and one action. Every step is known here or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from relay.engine.json_entries import entry, entry_or, read_json
from relay.engine.weights import CheckpointError, SafetensorsSource, TensorSource
from relay.models.groot.config import RELEASED
from relay.models.groot.formats import CONFIG_FILE

PREPROCESSOR_FILE = "policy_preprocessor.json"
POSTPROCESSOR_FILE = "policy_postprocessor.json"
PREFIX = "_groot_model."
EMBEDDING = "backbone.model.model.language_model.embed_tokens.weight"
HEAD = "backbone.model.lm_head.weight"

_PACK, _ENCODE = "groot_n1_7_pack_inputs_v1", "groot_n1_7_vlm_encode_v1"
_DECODE, _UNPACK = "groot_n1_7_action_decode_v1", "groot_action_unpack_unnormalize_v2"
_RENAME, _BATCH, _DEVICE = "rename_observations_processor", "to_batch_processor", "device_processor"
_KNOWN = {
    PREPROCESSOR_FILE: (_RENAME, _BATCH, _PACK, _ENCODE, _DEVICE),
    POSTPROCESSOR_FILE: (_DECODE, _UNPACK, _DEVICE),
}

STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
FLAT_STATE, FLAT_ACTION, FLAT_LANGUAGE = "state", "action", "task"
"""Keys of a policy that was trained on a plain data set, whose state and actions have no parts."""


@dataclass(frozen=True, slots=True)
class LerobotPolicy:
    """A lerobot folder as Isaac-GR00T would have written it.

    Attributes:
        config: entries of `config.json`.
        processor: the arguments of `processor_config.json`.
        statistics: as in `statistics.json`.
        embodiment_ids: as in `embodiment_id.json`; None where the folder has none.
        remarks: what lerobot does besides, and this server leaves to the client.
    """

    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    statistics: Mapping[str, Any]
    embodiment_ids: Mapping[str, Any] | None
    remarks: tuple[str, ...]


def read_lerobot(folder: Path, stated: Mapping[str, Any], base: Mapping[str, Any]) -> LerobotPolicy:
    """Read the two processor files and their statistics.

    Args:
        stated: lerobot's `config.json`.
        base: entries of the base model's configuration that differ from the released one.

    Raises:
        CheckpointError: a file is missing or damaged, or says what this engine does not do.
    """
    before, after = _read_steps(folder, PREPROCESSOR_FILE), _read_steps(folder, POSTPROCESSOR_FILE)
    for file, steps, name in ((PREPROCESSOR_FILE, before, _PACK), (PREPROCESSOR_FILE, before, _ENCODE)):
        if name not in steps:
            raise CheckpointError(f"{file} has no step {name!r}; a GR00T N1.7 policy needs one")
    pack, encode = before[_PACK].config, before[_ENCODE].config
    if entry_or(before[_RENAME].config, "rename_map", {}, PREPROCESSOR_FILE) if _RENAME in before else {}:
        raise CheckpointError(
            f"{PREPROCESSOR_FILE}: {_RENAME} renames keys, which is not supported; send the renamed keys and empty "
            "its rename_map"
        )
    tag = entry(pack, "embodiment_tag", str, PREPROCESSOR_FILE)
    if _DECODE in after:
        modality, statistics = _by_key(pack, after[_DECODE].config)
        relative = entry_or(after[_DECODE].config, "use_relative_action", False, POSTPROCESSOR_FILE)
    elif _UNPACK in after:
        modality, statistics = _flat(stated, pack, before[_PACK], after[_UNPACK])
        relative = False
    else:
        raise CheckpointError(f"{POSTPROCESSOR_FILE} has neither {_DECODE!r} nor {_UNPACK!r}; one of them is needed")
    if pack.get("normalize_min_max", True) is not True:
        raise CheckpointError(f"{PREPROCESSOR_FILE}: normalize_min_max is off in {_PACK}, which is not supported")
    config = {**RELEASED, **base}
    for key, own in (("num_inference_timesteps",) * 2, ("max_state_dim",) * 2, ("max_action_dim",) * 2):
        if stated.get(own) is not None:
            config[key] = stated[own]
    images = {key: encode.get(key) for key in _IMAGE_SETTINGS}
    return LerobotPolicy(
        config=config,
        processor={
            "modality_configs": {tag: modality},
            **images,
            "lerobot_frames": True,
            "formalize_language": entry_or(pack, "formalize_language", True, PREPROCESSOR_FILE),
            "use_percentiles": entry_or(pack, "use_percentiles", False, PREPROCESSOR_FILE),
            "clip_outliers": entry_or(pack, "clip_outliers", True, PREPROCESSOR_FILE),
            "use_relative_action": relative,
            "apply_sincos_state_encoding": False,
            "max_state_dim": pack.get("max_state_dim"),
            "max_action_dim": pack.get("max_action_dim"),
            "max_action_horizon": config["action_horizon"],
        },
        statistics={tag: statistics},
        embodiment_ids=entry_or(pack, "embodiment_mapping", {}, PREPROCESSOR_FILE),
        remarks=_remarks(stated, tag),
    )


_IMAGE_SETTINGS = (
    "image_crop_size",
    "image_target_size",
    "shortest_image_edge",
    "crop_fraction",
    "use_albumentations",
    "letter_box_transform",
)


class LerobotTensors:
    """The tensors of a lerobot folder under Isaac-GR00T's names.

    The head is tied to the token embedding there, and of two names for one tensor only the head's is saved.

    Raises:
        CheckpointError: a tensor's name is none of lerobot's.
    """

    def __init__(self, source: TensorSource) -> None:
        strange = [name for name in source.shapes if not name.startswith(PREFIX)]
        if strange:
            raise CheckpointError(f"tensor {strange[0]} does not begin with {PREFIX}, as all of lerobot's do")
        self._source = source
        self._names = {name.removeprefix(PREFIX): name for name in source.shapes}
        if HEAD in self._names:
            self._names.setdefault(EMBEDDING, self._names[HEAD])
        self.shapes = {name: source.shapes[stored] for name, stored in self._names.items()}
        self.dtypes = {name: source.dtypes[stored] for name, stored in self._names.items()}

    def read(self, name: str) -> Tensor:
        return self._source.read(self._names[name])


@dataclass(frozen=True, slots=True)
class _Step:
    """A step's settings, and the file of its tensors if it has one."""

    config: Mapping[str, Any]
    state_file: Path | None


def _read_steps(folder: Path, file: str) -> dict[str, _Step]:
    if not (folder / file).is_file():
        raise CheckpointError(f"no {file} in {folder}; copy it from where the checkpoint was trained")
    steps: dict[str, _Step] = {}
    for step in entry(read_json(folder / file), "steps", list, file):
        if not isinstance(step, dict):
            raise CheckpointError(f"{file}: a step is no object")
        told = cast("dict[str, Any]", step)
        name = str(told.get("registry_name") or told.get("class"))
        settings = entry_or(told, "config", {}, file)
        if name not in _KNOWN[file] and settings.get("enabled", True):
            raise CheckpointError(f"{file}: the step {name!r} is not supported; known are {', '.join(_KNOWN[file])}")
        state = entry_or(told, "state_file", "", file)
        if Path(state).name != state:
            raise CheckpointError(f"{file}: state_file is {state!r}, expected a file in the same folder")
        steps[name] = _Step(settings, folder / state if state else None)
    return steps


def _by_key(pack: Mapping[str, Any], decode: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Modalities and statistics as Isaac-GR00T has them; both files hold them, and must say the same."""
    for key in ("modality_config", "raw_stats"):
        if entry(pack, key, dict, PREPROCESSOR_FILE) != entry(decode, key, dict, POSTPROCESSOR_FILE):
            raise CheckpointError(
                f"{key} differs between {PREPROCESSOR_FILE} and {POSTPROCESSOR_FILE}; take both from one training run"
            )
    return pack["modality_config"], pack["raw_stats"]


def _flat(
    stated: Mapping[str, Any], pack: Mapping[str, Any], before: _Step, after: _Step
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """One state and one action, scaled by a data set's smallest and largest values."""
    features = [key for key in entry_or(stated, "input_features", {}, CONFIG_FILE) if key.startswith(IMAGES)]
    named = entry_or(pack, "video_modality_keys", [], PREPROCESSOR_FILE)
    cameras = named or sorted(key.removeprefix(IMAGES) for key in features)
    horizon = entry(pack, "valid_action_horizon", int, PREPROCESSOR_FILE)
    frames = entry_or(pack, "video_horizon", 1, PREPROCESSOR_FILE)
    modality = {
        "video": {"modality_keys": cameras, "delta_indices": list(range(1 - frames, 1))},
        "state": {"modality_keys": [FLAT_STATE], "delta_indices": [0]},
        "action": {
            "modality_keys": [FLAT_ACTION],
            "delta_indices": list(range(horizon)),
            "action_configs": [{"rep": "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT"}],
        },
        "language": {"modality_keys": [FLAT_LANGUAGE], "delta_indices": [0]},
    }
    statistics = {
        "state": {FLAT_STATE: _tensor_statistics(before, STATE, PREPROCESSOR_FILE, _PACK)},
        "action": {FLAT_ACTION: _tensor_statistics(after, ACTION, POSTPROCESSOR_FILE, _UNPACK)},
    }
    return modality, statistics


def _tensor_statistics(step: _Step, feature: str, file: str, name: str) -> dict[str, list[float]]:
    if step.state_file is None or not step.state_file.is_file():
        raise CheckpointError(f"{file}: {name} has no file of statistics; copy it from where it was trained")
    source = SafetensorsSource(step.state_file)
    found = {
        key: source.read(f"{feature}.{key}").to(torch.float64).flatten().tolist()
        for key in ("min", "max", "mean", "std", "q01", "q99")
        if f"{feature}.{key}" in source.shapes
    }
    if not {"min", "max"} <= found.keys():
        raise CheckpointError(f"{step.state_file} has no min and max of {feature!r}")
    return found


def _remarks(stated: Mapping[str, Any], tag: str) -> tuple[str, ...]:
    transform = stated.get("action_decode_transform", "auto")
    if transform != "libero" and not (transform == "auto" and tag == "libero_sim"):
        return ()
    return ("lerobot turns the gripper from 0..1 into the simulator's -1 and 1 after this; here the client does",)
