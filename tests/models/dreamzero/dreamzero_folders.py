"""Tiny checkpoint folders in the released format: shards, settings, statistics, prompts and a tokenizer.

The texts of `prompts.json` are made up, since the released ones are the model's; `relay.json` says so, as it does for
every checkpoint that was trained with texts of its own.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from tiny_dreamzero import ENCODERS, config_json, shapes, value_of
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

TEMPLATES = {
    "oxe_droid": "Seen from wrist, left and right, a robot {p} The robot {p}",
    "agibot": "Seen from head and hands, a robot {p} The robot {p}",
}
NEGATIVE = "blurry &amp;  dull"

SMALL_IMAGE = {"width": 64, "heads": 4, "mlp": 128, "depth": 2}
"""An image encoder of a few kilobytes, in place of one of the released width."""

_SMALLER = {1280: 64, 5120: 128, 3840: 192}

ROBOTS: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "oxe_droid": {
        "video": {"exterior_image_1_left": 0, "exterior_image_2_left": 0, "wrist_image_left": 0},
        "state": {"joint_position": 7, "gripper_position": 1},
        "action": {"joint_position": 7, "gripper_position": 1},
    },
    "agibot": {
        "video": {"top_head": 0, "hand_left": 0, "hand_right": 0},
        "state": {"left_arm_joint_position": 7, "right_arm_joint_position": 7, "head_position": 2},
        "action": {"left_arm_joint_position": 7, "right_arm_joint_position": 7, "robot_velocity": 2},
    },
}
"""Keys with their widths, by modality and embodiment."""


def write_checkpoint(
    folder: Path,
    robots: Sequence[str] = ("oxe_droid",),
    *,
    released_width: bool = False,
    conf: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of the tiny network and return its folder.

    Args:
        robots: embodiments that it has, of `ROBOTS`.
        released_width: the image encoder is 1280 wide, as the recorded calls have it; 240 MB.
        conf: entries of `conf.yaml` beside or instead of the usual ones.
        settings: likewise of `relay.json`.
    """
    home = folder / "experiment_cfg"
    home.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config_json())
    _write_shards(folder, released_width)
    (home / "conf.yaml").write_text(yaml.safe_dump({**conf_yaml(robots), **(conf or {})}), "utf-8")
    _write_json(home / "metadata.json", metadata_json(robots))
    texts = {"negative": NEGATIVE, "templates": {robot: TEMPLATES[robot] for robot in robots}}
    _write_json(folder / "prompts.json", texts)
    encoders = ENCODERS if released_width else {**ENCODERS, "image": SMALL_IMAGE}
    _write_json(folder / "relay.json", {"encoders": encoders, "prompts": digests(), **(settings or {})})
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def digests() -> dict[str, str]:
    """SHA-256 of the texts above."""
    texts = {**TEMPLATES, "negative": NEGATIVE}
    return {name: sha256(text.encode()).hexdigest() for name, text in texts.items()}


def conf_yaml(robots: Sequence[str], tile: tuple[int, int] = (24, 32)) -> dict[str, Any]:
    """The entries of a training run's configuration that say something about robots, interpolations resolved."""
    module = "groot.vla.data.transform"

    def keys(robot: str, modality: str) -> list[str]:
        return [f"{modality}.{key}" for key in ROBOTS[robot][modality]]

    def transforms(robot: str) -> list[dict[str, Any]]:
        views = {"apply_to": keys(robot, "video")}
        scaled = [
            {
                "_target_": f"{module}.StateActionTransform",
                "apply_to": keys(robot, modality),
                "normalization_modes": dict.fromkeys(keys(robot, modality), "q99"),
            }
            for modality in ("state", "action")
        ]
        return [
            {"_target_": f"{module}.VideoToTensor", **views},
            {"_target_": f"{module}.VideoCrop", **views, "scale": 0.95, "mode": "random"},
            {
                "_target_": f"{module}.VideoResize",
                **views,
                "height": tile[0],
                "width": tile[1],
                "interpolation": "linear",
            },
            {"_target_": f"{module}.VideoColorJitter", **views, "brightness": 0.3},
            {"_target_": f"{module}.VideoToNumpy", **views},
            {"_target_": f"{module}.StateActionToTensor", "apply_to": keys(robot, "state")},
            *scaled,
            {
                "_target_": f"{module}.ConcatTransform",
                **{f"{modality}_concat_order": keys(robot, modality) for modality in ("video", "state", "action")},
            },
            {
                "_target_": "groot.vla.model.dreamzero.transform.dreamzero_cotrain.DreamTransform",
                "default_instruction": "Perform the default behavior.",
                "formalize_language": False,
                "always_use_default_instruction": False,
                "tokenizer_path": "google/umt5-xxl",
            },
        ]

    return {
        "modality_configs": {
            robot: {
                modality: {"delta_indices": [0], "modality_keys": keys(robot, modality)}
                for modality in ("video", "state", "action")
            }
            for robot in robots
        },
        "transforms": {
            robot: {"_target_": f"{module}.ComposedModalityTransform", "transforms": transforms(robot)}
            for robot in robots
        },
        "relative_action": True,
        "relative_action_per_horizon": False,
        "relative_action_keys": ["joint_position", "left_arm_joint_position", "right_arm_joint_position"],
        "eval_bf16": True,
    }


def metadata_json(robots: Sequence[str]) -> dict[str, Any]:
    """Statistics and sizes by embodiment."""
    return {
        robot: {
            "statistics": {
                modality: {key: statistics(key, width) for key, width in ROBOTS[robot][modality].items()}
                for modality in ("state", "action")
            },
            "modalities": {
                "video": {key: {"resolution": [320, 180], "channels": 3} for key in ROBOTS[robot]["video"]},
                **{
                    modality: {key: {"shape": [width]} for key, width in ROBOTS[robot][modality].items()}
                    for modality in ("state", "action")
                },
            },
            "embodiment_tag": robot,
        }
        for robot in robots
    }


def statistics(key: str, width: int) -> dict[str, list[float]]:
    """Percentiles that differ in every dimension; a gripper's are 0 and 1."""
    if "gripper" in key:
        low, high = [0.0] * width, [1.0] * width
    else:
        low, high = [-2.0 - 0.1 * i for i in range(width)], [1.5 + 0.2 * i for i in range(width)]
    middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
    return {"q01": low, "q99": high, "min": low, "max": high, "mean": middle, "std": [1.0] * width}


@cache
def tokenizer() -> Tokenizer:
    """A tokenizer of UMT5's form that spells letter by letter."""
    letters = ["▁", *string.ascii_letters, *string.digits, *string.punctuation]
    filling = [f"piece{number}" for number in range(500 - 3 - len(letters))]
    pieces = ["<pad>", "</s>", "<unk>", *letters, *filling]
    made = Tokenizer(models.Unigram([(piece, -float(place)) for place, piece in enumerate(pieces)], unk_id=2))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    made.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in pieces[:3]])
    return made


def _write_shards(folder: Path, released_width: bool) -> None:
    sizes = shapes() if released_width else {name: _smaller(name, shape) for name, shape in shapes().items()}
    tensors = {name: torch.from_numpy(value_of(name, shape)) for name, shape in sizes.items()}
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    files = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    for file, half in zip(files, halves, strict=True):
        save_file({name: tensors[name] for name in half}, folder / file)
    places = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})


def _smaller(name: str, shape: list[int]) -> list[int]:
    """The shape with an image encoder of `SMALL_IMAGE`."""
    return [_SMALLER.get(side, side) for side in shape] if "image_encoder" in name or "img_emb" in name else shape


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), "utf-8")
