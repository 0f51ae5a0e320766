"""The tiny golden networks as checkpoint folders, laid out as openpi, lerobot and relay write them.

Statistics are made up but fixed; `norm_stats` gives them, so that tests can work out expected values by hand.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from tiny import DATA, tiny_tensors

HERE = Path(__file__).parent
ORBAX_PYTHON = HERE.parents[2] / ".venv-orbax/bin/python"
EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
EXPERT_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"
TINY = {"vision_heads": 2}
"""What is true of the tiny networks only: a released checkpoint's is told by its `paligemma_variant`."""

Json = Mapping[str, Any]


def norm_stats(width: int, *, shift: float = 0.0, padded: int | None = None) -> dict[str, list[float]]:
    """Statistics of `width` dimensions, each with another range; zeros up to `padded`."""
    index = np.arange(width)
    mean, std = 0.1 * index - 0.3 + shift, 0.5 + 0.05 * index
    stats = {
        "mean": mean,
        "std": std,
        "q01": mean - 2 * std,
        "q99": mean + 2.5 * std,
        "min": mean - 3 * std,
        "max": mean + 4 * std,
    }
    return {name: np.pad(value, (0, (padded or width) - width)).tolist() for name, value in stats.items()}


def write_openpi(
    folder: Path,
    family: str,
    *,
    assets: Mapping[str, tuple[int, int]] | None = None,
    action_horizon: int = 10,
    settings: Json = TINY,
    config: Json | None = None,
    tokenizer: bool = True,
) -> Path:
    """A folder as openpi's converter to PyTorch leaves it, and a small `relay.json` for the tiny sizes.

    Args:
        assets: asset ids with the widths of state and actions; DROID's by default.
        settings: of `relay.json`; it isn't written when empty.
        config: changes to `config.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {HEAD if name == EMBEDDING else name: tensor for name, tensor in tiny_tensors(family).items()}
    save_file({**tensors, EXPERT_HEAD: torch.zeros(3, 3)}, folder / "model.safetensors")
    stated = {
        "action_dim": 32,
        "action_horizon": action_horizon,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "precision": "bfloat16",
    }
    write_json(folder / "config.json", {**stated, **(config or {})})
    write_assets(folder, assets or {"droid": (8, 8)})
    write_around(folder, settings, tokenizer)
    return folder


def write_openpi_jax(
    folder: Path, family: str, *, assets: Mapping[str, tuple[int, int]] | None = None, settings: Json = TINY
) -> Path:
    """A folder as openpi's JAX training writes it; needs `ORBAX_PYTHON`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = DATA / f"{family}_tiny.safetensors"
    command = [ORBAX_PYTHON, HERE / "write_orbax.py", weights, folder / "params", "--value"]
    done = subprocess.run(command, env={"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    write_assets(folder, assets or {"droid": (8, 8)})
    write_around(folder, settings, tokenizer=True)
    return folder


def write_lerobot(
    folder: Path,
    family: str,
    *,
    cameras: Sequence[str] = ("front", "wrist"),
    empty_cameras: int = 1,
    state_dim: int = 6,
    action_dim: int = 6,
    modes: Json | None = None,
    relative: Json | None = None,
    rename: Json | None = None,
    config: Json | None = None,
    settings: Json = TINY,
    tokenizer: bool = True,
) -> Path:
    """A folder as lerobot 0.6's `save_pretrained` writes it, and a small `relay.json` for the tiny sizes.

    Args:
        modes: `norm_map` of both normalizers; the family's usual one by default.
        relative: config of `relative_actions_processor`; not enabled by default.
        config: changes to `config.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"model.{name}": tensor for name, tensor in tiny_tensors(family).items()}, folder / "model.safetensors")
    usual = "QUANTILES" if family == "pi05" else "MEAN_STD"
    norm_map = {"VISUAL": "IDENTITY", "STATE": usual, "ACTION": usual, **(modes or {})}
    camera = {"type": "VISUAL", "shape": [3, 480, 640]}
    images = {f"observation.images.{name}": camera for name in cameras}
    empty = {f"observation.images.empty_camera_{i}": camera for i in range(empty_cameras)}
    inputs = {**images, **empty, "observation.state": {"type": "STATE", "shape": [state_dim]}}
    outputs = {"action": {"type": "ACTION", "shape": [action_dim]}}
    names = [f"joint_{i}.pos" for i in range(action_dim - 1)] + ["gripper.pos"]
    offsets = {"enabled": False, "exclude_joints": ["gripper"], "action_names": names, **(relative or {})}
    stated = {
        "type": family,
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": outputs,
        "device": "cpu",
        "use_amp": False,
        "use_peft": False,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": "bfloat16",
        "chunk_size": 10,
        "n_action_steps": 10,
        "max_state_dim": 32,
        "max_action_dim": 32,
        "num_inference_steps": 10,
        "min_period": 0.004,
        "max_period": 4.0,
        "use_relative_actions": offsets["enabled"],
        "relative_exclude_joints": offsets["exclude_joints"],
        "action_feature_names": names,
        "rtc_config": None,
        "image_resolution": [224, 224],
        "empty_cameras": empty_cameras,
        "tokenizer_max_length": 200 if family == "pi05" else 48,
        "normalization_mapping": norm_map,
    }
    write_json(folder / "config.json", {**stated, **(config or {})})
    arrays = {
        f"{key}.{name}": np.array(values, np.float32)
        for key, stats in {
            "observation.state": norm_stats(state_dim),
            "action": norm_stats(action_dim, shift=0.2),
            "observation.images.front": {"mean": [[[0.5]]] * 3, "std": [[[0.25]]] * 3},
        }.items()
        for name, values in stats.items()
    }
    features = {"features": {**inputs, **outputs}, "norm_map": norm_map, "eps": 1e-8}
    steps = {
        "rename_observations_processor": {"rename_map": dict(rename or {})},
        "to_batch_processor": {},
        "relative_actions_processor": offsets,
        "normalizer_processor": features,
        "pi05_prepare_state_tokenizer_processor_step": {"max_state_dim": 32, "task_key": "task"},
        "pi0_new_line_processor": {},
        "tokenizer_processor": {
            "max_length": stated["tokenizer_max_length"],
            "task_key": "task",
            "padding_side": "right",
            "padding": "max_length",
            "truncation": True,
            "tokenizer_name": "google/paligemma-3b-pt-224",
        },
        "device_processor": {"device": "cpu", "float_dtype": None},
    }
    order = list(steps)
    if family == "pi05":
        order.remove("pi0_new_line_processor")
    else:
        order = [*order[:2], *order[5:], *order[2:4]]
    _write_steps(folder, "policy_preprocessor", {name: steps[name] for name in order}, arrays)
    after = {
        "unnormalizer_processor": {**features, "features": outputs},
        "absolute_actions_processor": {"enabled": offsets["enabled"]},
        "device_processor": {"device": "cpu", "float_dtype": None},
    }
    _write_steps(folder, "policy_postprocessor", after, arrays)
    write_around(folder, settings, tokenizer)
    return folder


def write_relay(folder: Path, family: str, *, tokenizer: bool = True, **changes: Any) -> Path:
    """A folder of ours: safetensors, a complete `relay.json` and a tokenizer; model format only."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(DATA / f"{family}_tiny.safetensors", folder / "model.safetensors")
    settings = {
        "action_horizon": 10,
        "state_dim": 32,
        "state_in_prompt": family == "pi05",
        "max_token_len": 200 if family == "pi05" else 48,
        "num_steps": 10,
        **TINY,
    }
    write_around(folder, {**settings, **changes}, tokenizer)
    return folder


def write_assets(folder: Path, assets: Mapping[str, tuple[int, int]]) -> None:
    """`norm_stats.json` under every asset id, for states and actions of these widths."""
    for asset_id, (state_dim, action_dim) in assets.items():
        stats = {"state": norm_stats(state_dim), "actions": norm_stats(action_dim, shift=0.2)}
        place = folder / "assets" / asset_id
        place.mkdir(parents=True, exist_ok=True)
        write_json(place / "norm_stats.json", {"norm_stats": stats})


def write_around(folder: Path, settings: Json, tokenizer: bool) -> None:
    """`relay.json`, unless it would be empty, and the tokenizer."""
    if settings:
        write_json(folder / "relay.json", settings)
    if tokenizer:
        write_tokenizer(folder / "tokenizer.json")


def write_tokenizer(path: Path) -> None:
    """A tokenizer with one piece per character, small enough for the golden networks' 64 tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *"abcdefghijklmnopqrstuvwxyzTSA0123456789 :,;-_\n"]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.save(str(path))


def write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2))


def change_json(path: Path, *keys: str | int, value: Any) -> None:
    """Set one value deep in a JSON file."""
    content = json.loads(path.read_text())
    place = content
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    write_json(path, content)


def _write_steps(folder: Path, name: str, steps: Mapping[str, Json], arrays: Mapping[str, Any]) -> None:
    """A processor file, with a state file for its normalizer."""
    entries: list[dict[str, Any]] = []
    for index, (step, config) in enumerate(steps.items()):
        entry: dict[str, Any] = {"registry_name": step, "config": config}
        if step in ("normalizer_processor", "unnormalizer_processor"):
            entry["state_file"] = f"{name}_step_{index}_{step}.safetensors"
            save_arrays(dict(arrays), folder / entry["state_file"])
        entries.append(entry)
    write_json(folder / f"{name}.json", {"name": name, "steps": entries})
