"""Reads adapters that the PEFT library saved: `adapter_config.json` and `adapter_model.safetensors`.

Every setting and every tensor is accounted for: what would change the result and is not known here is refused by name
(github.com/huggingface/peft: src/peft/tuners/lora/{config,model,layer}.py). Knows no model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from relay.engine.adapters import Adapter, Pair, refuse
from relay.engine.weights import CheckpointError, SafetensorsSource, TensorSource

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_OWN_PREFIX = "base_model.model."
_POLICY_PREFIXES = ("model.", "_groot_model.")  # lerobot adapts its policy object; its attribute is the network

_FACTORS = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")

_UNDERSTOOD = frozenset(
    ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "bias", "target_modules")
)
_WITHOUT_INFLUENCE = frozenset(
    (
        *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "lora_dropout", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("runtime_config", "qalora_group_size", "ensure_weight_tying", "init_lora_weights", "target_parameters"),
        # Only says how the base stores its weights; A and B mean the same either way.
        "fan_in_fan_out",
    )
)
"""Settings of how an adapter was made, or of which tensors it has, which the tensors say themselves."""

_CHANGING_THE_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Values of `init_lora_weights` under which training began by taking something away from the base's weights."""


def is_peft(folder: Path) -> bool:
    """Whether a folder holds an adapter of PEFT."""
    return (folder / CONFIG_FILE).is_file()


def read_peft(folder: Path, linears: Collection[str], without_effect: Collection[str] = ()) -> Adapter:
    """Read an adapter; names lose PEFT's and lerobot's prefixes and so become those of the checkpoint's tensors.

    Args:
        linears: the weights of the network's linear layers, of which `target_modules` must find none that has no LoRA.
        without_effect: tensors that the network doesn't need, so that changes of them can be left out, with a note.

    Raises:
        CheckpointError: naming the setting or the tensor that cannot be honoured.
    """
    config = _read_config(folder / CONFIG_FILE)
    refuse(folder, _refused_settings(config))
    if not (folder / WEIGHTS_FILE).is_file() and (folder / "adapter_model.bin").is_file():
        raise CheckpointError(
            f"{folder / 'adapter_model.bin'} is a pickle, which can run code when it is loaded, so it is never read; "
            "save the adapter with safe_serialization=True"
        )
    source = SafetensorsSource(folder / WEIGHTS_FILE)
    modules, full, problems = _sort_out(source, config)
    problems += [f"missing: {name}, which target_modules names" for name in _untold(config, modules, linears)]
    problems += [f"missing: {name}, which modules_to_save names" for name in _unsaved(config, full, linears)]
    refuse(folder, problems)
    pairs: dict[str, Pair] = {}
    for module, factors in modules.items():
        scale, problem = _scale(module, source.shapes[factors["A"]][0], config)
        problems += problem
        b = source.read(factors["B"])
        pairs[_plain(module) + ".weight"] = Pair(source.read(factors["A"]), b if scale == 1 else b.float() * scale)
    refuse(folder, problems)
    replaced = {_plain(name): source.read(stored) for name, stored in full.items()}
    useless = sorted(name for name in (*pairs, *replaced) if name in without_effect)
    return Adapter(
        pairs={name: pair for name, pair in pairs.items() if name not in without_effect},
        replaced={name: tensor for name, tensor in replaced.items() if name not in without_effect},
        notes=tuple(f"changes {name}, which actions do not depend on" for name in useless),
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
        if not isinstance(config, dict):
            raise TypeError
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, RecursionError):
        raise CheckpointError(f"{path} is damaged: expected a JSON object") from None
    return config


def _refused_settings(config: Mapping[str, Any]) -> Iterator[str]:
    kind = config.get("peft_type")
    if kind != "LORA":
        yield f"peft_type is {kind!r}; only 'LORA' can be served"
        return
    for name, value in config.items():
        if name not in _UNDERSTOOD | _WITHOUT_INFLUENCE and value not in (None, False, {}, []):
            yield f"{name} is {_short(value)}, which is not supported; expected it to be unset"
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_CHANGING_THE_BASE):
        yield (
            f"init_lora_weights is {init!r}, which changes the base's weights; save the adapter with "
            "path_initial_model_for_weight_conversion"
        )
    if config.get("target_parameters"):
        yield f"target_parameters is {_short(config['target_parameters'])}, which is not supported; use target_modules"
    if config.get("bias", "none") not in ("none", "all", "lora_only"):
        yield f"bias is {_short(config['bias'])}; expected 'none', 'all' or 'lora_only'"
    for name in ("r", "lora_alpha"):
        if not _is_positive(value := config.get(name, 8)):
            yield f"{name} is {_short(value)}; expected a positive number"
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict) or not all(_is_pattern(k) and _is_positive(v) for k, v in patterns.items()):
            yield f"{name} is {_short(patterns)}; expected a map from module names to numbers"
    for name in ("target_modules", "exclude_modules", "modules_to_save"):
        value = config.get(name) or []
        if not (_is_names(value) or (name != "modules_to_save" and _is_pattern(value))):
            yield f"{name} is {_short(value)}; expected names of modules"


def _is_positive(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < math.inf


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _is_pattern(value: Any) -> bool:
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except re.error:
        return False


def _sort_out(
    source: TensorSource, config: Mapping[str, Any]
) -> tuple[dict[str, dict[str, str]], dict[str, str], list[str]]:
    """LoRA factors by module, full tensors by name, and what is neither."""
    modules: dict[str, dict[str, str]] = {}
    full: dict[str, str] = {}
    problems: list[str] = []
    for stored, shape in source.shapes.items():
        name = stored.removeprefix(_OWN_PREFIX).replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        factor = _FACTORS.fullmatch(name)
        if factor and len(shape) == 2:
            modules.setdefault(factor["module"], {})[factor["factor"]] = stored
        elif "lora_magnitude_vector" in name:
            problems.append(f"{stored} belongs to DoRA, which is not supported")
        elif "lora_" in name:
            problems.append(f"{stored} has the shape {shape}; only lora_A and lora_B of linear layers are supported")
        elif _is_saved_in_full(name, config):
            full[name] = stored
        else:
            problems.append(f"unexplained: {stored} is neither LoRA nor in modules_to_save")
    for module, factors in list(modules.items()):
        for factor in {"A", "B"} - factors.keys():
            problems.append(f"missing: lora_{factor} of {module}")
            del modules[module]
    for module, factors in modules.items():
        (rank, _), (_, other) = source.shapes[factors["A"]], source.shapes[factors["B"]]
        if rank != other:
            problems.append(f"wrong shape: lora_A of {module} has rank {rank}, its lora_B {other}")
    return modules, full, problems


def _is_saved_in_full(name: str, config: Mapping[str, Any]) -> bool:
    module, _, kind = name.rpartition(".")
    if kind == "bias" and config.get("bias", "none") != "none":
        return True
    return any(_holds(entry, module) for entry in config.get("modules_to_save") or ())


def _holds(entry: str, module: str) -> bool:
    return f".{entry}." in f".{module}."


def _unsaved(config: Mapping[str, Any], full: Collection[str], linears: Collection[str]) -> list[str]:
    """What `modules_to_save` names and the file lacks: linear layers, or everything under a name."""
    saved = {_plain(name) for name in full}
    return sorted(
        missing
        for entry in config.get("modules_to_save") or ()
        for missing in (
            [name for name in linears if _holds(entry, name.removesuffix(".weight")) and name not in saved]
            or ([] if any(_holds(entry, name) for name in saved) else [entry])
        )
    )


def _ends_with(entry: str, module: str) -> bool:
    return module == entry or module.endswith("." + entry)


def _untold(config: Mapping[str, Any], modules: Collection[str], linears: Collection[str]) -> list[str]:
    """Linear layers that `target_modules` picks and that have no LoRA in the file: training always writes all."""
    target = config.get("target_modules")
    if target is None or config.get("layers_to_transform") is not None or str(target).lower() == "all-linear":
        return []
    found = {_plain(module) for module in modules}
    prefix = next((p for p in _POLICY_PREFIXES for module in modules if module.startswith(p)), "")
    names = [name.removesuffix(".weight") for name in linears]
    return sorted(
        name
        for name in names
        if name not in found
        and _picks(target, prefix + name)
        and not _picks(config.get("exclude_modules") or (), prefix + name)
        and not any(_holds(entry, name) for entry in config.get("modules_to_save") or ())
    )


def _picks(pattern: str | Collection[str], module: str) -> bool:
    if isinstance(pattern, str):
        return re.fullmatch(pattern, module) is not None
    return any(_ends_with(entry, module) for entry in pattern)


def _scale(module: str, stored_rank: int, config: Mapping[str, Any]) -> tuple[float, list[str]]:
    """alpha / rank, or alpha / √rank; patterns name modules by the end of their names."""
    rank = _by_pattern(config.get("rank_pattern") or {}, module, config.get("r", 8))
    alpha = _by_pattern(config.get("alpha_pattern") or {}, module, config.get("lora_alpha", 8))
    if rank != stored_rank:
        return 1.0, [f"wrong rank: lora_A of {module} has {stored_rank}, {CONFIG_FILE} says {rank}"]
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), []


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _plain(name: str) -> str:
    prefix = next((prefix for prefix in _POLICY_PREFIXES if name.startswith(prefix)), "")
    return name.removeprefix(prefix)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
