"""Tiny GR00T checkpoints as folders, laid out as Isaac-GR00T and lerobot write them.

Weights are drawn from the tensors' names, statistics are made up but fixed, so that tests can work out expected values.
The vocabulary has its real size, since prompts hold real token ids; its rows are drawn once for a test session.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tiny_groot import described, golden_tensor
from torch import Tensor

VOCABULARY = Path(__file__).parents[3] / "vocab" / "qwen3.json"
EMBEDDING = "backbone.model.model.language_model.embed_tokens.weight"
HEAD = "backbone.model.lm_head.weight"

DROID, LIBERO = "oxe_droid_relative_eef_relative_joint", "libero_sim"
IDS = {DROID: 24, LIBERO: 2, "new_embodiment": 10}

STATE_WIDTHS = {
    DROID: {"eef_9d": 9, "gripper_position": 1, "joint_position": 7},
    LIBERO: {"x": 1, "y": 1, "z": 1, "roll": 1, "pitch": 1, "yaw": 1, "gripper": 2},
}
ACTION_WIDTHS = {
    DROID: {"eef_9d": 9, "gripper_position": 1, "joint_position": 7},
    LIBERO: {"x": 1, "y": 1, "z": 1, "roll": 1, "pitch": 1, "yaw": 1, "gripper": 1},
}
CAMERAS = {DROID: ("exterior_image_1_left", "wrist_image_left"), LIBERO: ("image", "wrist_image")}
LANGUAGE = {
    DROID: "annotation.language.language_instruction",
    LIBERO: "annotation.human.action.task_description",
}
HORIZONS = {DROID: 40, LIBERO: 16}
RELATIVE = {DROID: {"eef_9d": ("EEF", "XYZ_ROT6D"), "joint_position": ("NON_EEF", "DEFAULT")}, LIBERO: {}}

Json = Mapping[str, Any]

BACKBONE: Json = described()["backbone"]
WIDTHS = {"max_state_dim": 20, "max_action_dim": 20, "action_horizon": 40, "max_num_embodiments": 32, "max_seq_len": 64}
CONFIG: Json = {
    **described()["config"],
    **WIDTHS,
    "model_type": "Gr00tN1d7",
    "architectures": ["Gr00tN1d7"],
    "model_name": "nvidia/Cosmos-Reason2-2B",
    "use_vlln": True,
    "use_alternate_vl_dit": True,
    "add_pos_embed": True,
    "use_albumentations_transforms": True,
}
"""The golden network's sizes, with room for DROID's state, actions, horizon and slot."""


def write_isaac(
    folder: Path,
    *,
    tags: Sequence[str] = (LIBERO,),
    processor_folder: bool = False,
    shards: int = 1,
    config: Json | None = None,
    processor: Json | None = None,
    statistics: Json | None = None,
    settings: Json | None = None,
    tokenizer: bool = True,
    ids: bool = True,
) -> Path:
    """A folder as Isaac-GR00T releases it, or as its training writes it with the processor's files below.

    Args:
        tags: embodiments with statistics.
        shards: files of weights; with several there is an index.
        config, processor, statistics: changes to the files; None as a value takes an entry out.
        settings: of `relay.json`, the tiny backbone by default.
    """
    below = folder / "processor" if processor_folder else folder
    below.mkdir(parents=True, exist_ok=True)
    write_weights(folder, shards)
    write_json(folder / "config.json", _changed(CONFIG, config))
    write_json(
        below / "processor_config.json",
        {"processor_class": "Gr00tN1d7Processor", "processor_kwargs": _changed(processor_kwargs(tags), processor)},
    )
    write_json(below / "statistics.json", _changed({tag: statistics_of(tag) for tag in tags}, statistics))
    if ids:
        write_json(below / "embodiment_id.json", IDS)
    write_json(folder / "relay.json", {"backbone": BACKBONE} if settings is None else settings)
    if tokenizer:
        (folder / "tokenizer.json").symlink_to(VOCABULARY)
    return folder


def write_lerobot(
    folder: Path,
    *,
    tag: str = LIBERO,
    flat: bool = False,
    config: Json | None = None,
    tokenizer: bool = True,
) -> Path:
    """A folder as lerobot's `save_pretrained` leaves it, its tied embedding under the head's name.

    Args:
        flat: trained on a plain data set: statistics of one state and one action, in files of tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (weights,) = _weight_files(1, "_groot_model.")
    (folder / "model.safetensors").symlink_to(weights)
    features = {f"observation.images.{camera}": {"type": "VISUAL", "shape": [3, 64, 64]} for camera in CAMERAS[tag]}
    stated = {
        "type": "groot",
        "input_features": {**features, "observation.state": {"type": "STATE", "shape": [state_width(tag)]}},
        "output_features": {"action": {"type": "ACTION", "shape": [action_width(tag)]}},
        "chunk_size": HORIZONS[tag],
        "max_state_dim": WIDTHS["max_state_dim"],
        "max_action_dim": WIDTHS["max_action_dim"],
        "base_model_path": "nvidia/GR00T-N1.7-3B",
        "embodiment_tag": tag,
        "tokenizer_assets_repo": None,
        "num_inference_timesteps": None,
    }
    write_json(folder / "config.json", _changed(stated, config))
    kwargs, statistics = processor_kwargs([tag]), statistics_of(tag)
    modality = kwargs["modality_configs"][tag]
    pack = {
        "state_horizon": 1,
        "action_horizon": WIDTHS["action_horizon"],
        "valid_action_horizon": HORIZONS[tag],
        "video_horizon": len(modality["video"]["delta_indices"]),
        "max_state_dim": WIDTHS["max_state_dim"],
        "max_action_dim": WIDTHS["max_action_dim"],
        "language_key": "task",
        "formalize_language": True,
        "embodiment_tag": tag,
        "embodiment_mapping": IDS,
        "normalize_min_max": True,
        "state_dropout_prob": 0.0,
        "clip_outliers": True,
        "use_percentiles": False if flat else kwargs["use_percentiles"],
        "video_modality_keys": None if flat else list(CAMERAS[tag]),
        "raw_stats": None if flat else statistics,
        "modality_config": None if flat else modality,
    }
    encode = {key: kwargs.get(key) for key in ("image_crop_size", "image_target_size", "shortest_image_edge")}
    encode |= {"crop_fraction": kwargs["crop_fraction"], "use_albumentations": True, "letter_box_transform": False}
    if flat:
        encode |= {"use_albumentations": False, "image_target_size": [256, 256], "image_crop_size": [230, 230]}
        encode |= {"shortest_image_edge": None, "crop_fraction": None}
    decode = {
        "env_action_dim": action_width(tag),
        "raw_stats": statistics,
        "modality_config": modality,
        "use_percentiles": kwargs["use_percentiles"],
        "use_relative_action": kwargs["use_relative_action"],
        "action_decode_transform": None,
    }
    unpack = {"env_action_dim": action_width(tag), "normalize_min_max": True, "clip_normalized_action": True}
    tensors = flat_statistics(tag) if flat else None
    before = {
        "rename_observations_processor": {"rename_map": {}},
        "to_batch_processor": {},
        "groot_n1_7_pack_inputs_v1": pack,
        "groot_n1_7_vlm_encode_v1": {"model_name": "nvidia/Cosmos-Reason2-2B", **encode, "device": "cpu"},
        "device_processor": {"device": "cpu", "float_dtype": None},
    }
    last = ("groot_action_unpack_unnormalize_v2", unpack) if flat else ("groot_n1_7_action_decode_v1", decode)
    after = dict([last, ("device_processor", {"device": "cpu", "float_dtype": None})])
    _write_steps(folder, "policy_preprocessor", before, tensors)
    _write_steps(folder, "policy_postprocessor", after, tensors)
    base = {key: CONFIG[key] for key in CONFIG if key not in ("model_type", "architectures", "model_name")}
    write_json(folder / "relay.json", {"backbone": BACKBONE, "config": base})
    if tokenizer:
        (folder / "tokenizer.json").symlink_to(VOCABULARY)
    return folder


def processor_kwargs(tags: Sequence[str]) -> dict[str, Any]:
    """The arguments of `processor_config.json`, as the released one has them."""
    return {
        "modality_configs": {tag: modalities(tag) for tag in tags},
        "image_crop_size": [244, 244],
        "image_target_size": [256, 256],
        "shortest_image_edge": 256,
        "crop_fraction": 0.95,
        "use_albumentations": True,
        "letter_box_transform": False,
        "use_percentiles": True,
        "clip_outliers": True,
        "use_relative_action": True,
        "apply_sincos_state_encoding": True,
        "formalize_language": True,
        "exclude_state": False,
        "max_state_dim": WIDTHS["max_state_dim"],
        "max_action_dim": WIDTHS["max_action_dim"],
        "max_action_horizon": WIDTHS["action_horizon"],
    }


def modalities(tag: str) -> dict[str, Any]:
    """One embodiment's cameras, state, actions and language."""
    configs = [
        {
            "rep": "RELATIVE" if key in RELATIVE[tag] else "ABSOLUTE",
            "type": RELATIVE[tag].get(key, ("NON_EEF", "DEFAULT"))[0],
            "format": RELATIVE[tag].get(key, ("NON_EEF", "DEFAULT"))[1],
            "state_key": None,
        }
        for key in ACTION_WIDTHS[tag]
    ]
    return {
        "video": {"delta_indices": [-15, 0] if tag == DROID else [0], "modality_keys": list(CAMERAS[tag])},
        "state": {"delta_indices": [0], "modality_keys": list(STATE_WIDTHS[tag]), "sin_cos_embedding_keys": None},
        "action": {
            "delta_indices": list(range(HORIZONS[tag])),
            "modality_keys": list(ACTION_WIDTHS[tag]),
            "action_configs": configs,
        },
        "language": {"delta_indices": [0], "modality_keys": [LANGUAGE[tag]]},
    }


def statistics_of(tag: str) -> dict[str, Any]:
    """Another range for every number, and for relative actions for every step."""
    relative = {
        key: bounds(f"{tag} relative {key}", (HORIZONS[tag], ACTION_WIDTHS[tag][key]), scale=0.2)
        for key in RELATIVE[tag]
    }
    return {
        "state": {key: bounds(f"{tag} state {key}", (width,)) for key, width in STATE_WIDTHS[tag].items()},
        "action": {key: bounds(f"{tag} action {key}", (width,)) for key, width in ACTION_WIDTHS[tag].items()},
        **({"relative_action": relative} if relative else {}),
    }


def bounds(name: str, shape: tuple[int, ...], scale: float = 1.0) -> dict[str, Any]:
    """min < q01 < mean < q99 < max, drawn from the name."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    mean, std = scale * random.uniform(-0.5, 0.5, shape), scale * random.uniform(0.4, 0.8, shape)
    values = {"min": mean - 2.5 * std, "max": mean + 3 * std, "mean": mean, "std": std}
    return {key: value.tolist() for key, value in {**values, "q01": mean - 2 * std, "q99": mean + 2.2 * std}.items()}


def flat_statistics(tag: str) -> dict[str, Tensor]:
    """A lerobot data set's statistics of its one state and its one action."""
    features = {"observation.state": state_width(tag), "action": action_width(tag)}
    return {
        f"{feature}.{name}": torch.tensor(values, dtype=torch.float32)
        for feature, width in features.items()
        for name, values in bounds(f"{tag} flat {feature}", (width,)).items()
    }


def state_width(tag: str) -> int:
    return sum(STATE_WIDTHS[tag].values())


def action_width(tag: str) -> int:
    return sum(ACTION_WIDTHS[tag].values())


def observation(tag: str, seed: int = 0, size: tuple[int, int] = (64, 80)) -> dict[str, Any]:
    """The reference form: a batch axis of one and a time axis everywhere."""
    random = np.random.default_rng(seed)
    frames = len(modalities(tag)["video"]["delta_indices"])
    video = {camera: random.integers(0, 256, (1, frames, *size, 3)).astype(np.uint8) for camera in CAMERAS[tag]}
    state = {key: _state(key, width, random) for key, width in STATE_WIDTHS[tag].items()}
    return {"video": video, "state": state, "language": {LANGUAGE[tag]: [["Pick up the black bowl!"]]}}


def _state(key: str, width: int, random: np.random.Generator) -> NDArray[np.float32]:
    """(1, 1, width); of a pose the last six numbers are two rows of a rotation matrix."""
    values = random.uniform(-0.4, 0.4, width)
    if key == "eef_9d":
        rotation, _ = np.linalg.qr(random.standard_normal((3, 3)))
        rotation *= np.sign(np.linalg.det(rotation))
        values[3:] = rotation[:2].ravel()
    return values[None, None].astype(np.float32)


@cache
def tiny_weights() -> Mapping[str, Tensor]:
    """Every tensor of the tiny network, the head that nothing uses included."""
    tensors = {name: golden_tensor(name, shape) for name, shape in shapes().items()}
    return {**tensors, HEAD: tensors[EMBEDDING].clone()}


def shapes() -> dict[str, tuple[int, ...]]:
    """The golden network's tensors at `WIDTHS`."""
    widths = {
        "action_head.state_encoder.layer1.W": (WIDTHS["max_state_dim"], 24),
        "action_head.action_encoder.W1.W": (WIDTHS["max_action_dim"], 32),
        "action_head.action_decoder.layer2.W": (24, WIDTHS["max_action_dim"]),
        "action_head.action_decoder.layer2.b": (WIDTHS["max_action_dim"],),
    }
    maps = ("action_head.state_encoder.", "action_head.action_encoder.", "action_head.action_decoder.")
    sizes: dict[str, tuple[int, ...]] = {}
    for name, shape in described()["tensors"].items():
        if name.startswith(maps):
            sizes[name] = (WIDTHS["max_num_embodiments"], *widths.get(name, shape[1:]))
        elif name == "action_head.position_embedding.weight":
            sizes[name] = (WIDTHS["max_seq_len"], shape[1])
        else:
            sizes[name] = tuple(shape)
    return sizes


def write_weights(folder: Path, shards: int = 1) -> None:
    """All tensors in one file, or in several with an index; the files are links to some that are made once."""
    made = _weight_files(shards)
    for file in made:
        (folder / file.name).symlink_to(file)
    if shards > 1:
        places = {name: file.name for file, names in made.items() for name in names}
        write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})


@cache
def _weight_files(shards: int, prefix: str = "") -> Mapping[Path, Sequence[str]]:
    """Files of weights, with the names in each."""
    home = Path(_HOME.name) / f"{prefix}{shards}"
    home.mkdir()
    tensors = {f"{prefix}{name}": tensor for name, tensor in tiny_weights().items()}
    if prefix:  # lerobot's: the embedding is saved under the head's name alone
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(EMBEDDING)}
    names = sorted(tensors)
    files: dict[Path, Sequence[str]] = {}
    for i in range(shards):
        file = home / ("model.safetensors" if shards == 1 else f"model-{i + 1:05d}-of-{shards:05d}.safetensors")
        files[file] = names[i::shards]
        save_file({name: tensors[name] for name in files[file]}, file)
    return files


_HOME = TemporaryDirectory(prefix="relay-groot-weights-")


def write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content), "utf-8")


def _changed(values: Json, changes: Json | None) -> dict[str, Any]:
    return {key: value for key, value in {**values, **(changes or {})}.items() if value is not None}


def _write_steps(folder: Path, name: str, steps: Json, tensors: Mapping[str, Tensor] | None) -> None:
    """A processor file; with tensors, they are the state of the steps that have statistics."""
    listed: list[dict[str, Any]] = []
    for index, (step, config) in enumerate(steps.items()):
        entry: dict[str, Any] = {"registry_name": step, "config": config}
        if tensors is not None and step.startswith(("groot_n1_7_pack", "groot_action_unpack")):
            entry["state_file"] = f"{name}_step_{index}_{step}.safetensors"
            save_file(dict(tensors), folder / entry["state_file"])
        listed.append(entry)
    write_json(folder / f"{name}.json", {"name": name, "steps": listed})
