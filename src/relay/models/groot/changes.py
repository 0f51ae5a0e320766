"""The linear layers that adapters change row by row: their kinds and sizes, and how changes of them enter the network.

A kind is a layer's name without numbers, so that the layers in the same place of every block share one table. Keys and
values that the network packs into one matrix are kinds of their own, and so are the norms that depend on the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from relay.engine.adapter_rows import Changes, LinearChange, LinearShape, RowChange
from relay.models.groot.dit import DitChange, TimeChange
from relay.models.groot.layers import UNCHANGED, BlockChange, Linear
from relay.models.groot.model import Groot, NetworkChange
from relay.models.groot.vision import VisionChange

_KEYS, _VALUES, _NORMS = "dit.keys", "dit.values", "dit.norms"
_LOOKS = {"dit.text_keys_values": True, "dit.image_keys_values": False}
_HALF_OF_THE_BLOCKS = ("dit.blocks.q", "dit.blocks.qkv")
OF_TIME = ("dit.time_in", "dit.time_out", _NORMS)
"""Kinds that depend on the time alone, and are applied when a schedule is made."""


class Spot(NamedTuple):
    """Where some outputs of a parameter are: kind and number of the layer, and the first output there."""

    kind: str
    number: int
    output: int


def spot(model: Groot, parameter: str, output: int) -> Spot:
    """Where the outputs of a parameter from `output` on are."""
    name, width = parameter.removesuffix(".weight"), model.config.dit.width
    if name == "dit.modulation_weight":
        norm, start = divmod(output, 2 * width)
        return Spot(_NORMS, norm, start)
    if name in _LOOKS:
        looks = [look for look, at_text in enumerate(model.dit.looks_at_text) if at_text == _LOOKS[name]]
        part, start = divmod(output, width)
        return Spot(_VALUES if part % 2 else _KEYS, looks[part // 2], start)
    words = name.split(".")
    kind = ".".join(word for word in words if not word.isdigit())
    number = next((int(word) for word in words if word.isdigit()), 0)
    return Spot(kind, number // 2 if kind in _HALF_OF_THE_BLOCKS else number, output)


def linear_shapes(model: Groot) -> dict[str, LinearShape]:
    """Every kind of layer whose changes are applied row by row."""
    config, dtype = model.config, model.dtype
    width, looks = config.dit.width, len(model.dit.looks_at_text)
    shapes = {kind: LinearShape(looks, config.backbone_embedding_dim, width, dtype) for kind in (_KEYS, _VALUES)}
    shapes[_NORMS] = LinearShape(len(model.dit.blocks) + 1, width, 2 * width, dtype)
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name not in _LOOKS:
            kind, number, _ = spot(model, name, 0)
            inputs, outputs = module.weight.shape
            shapes[kind] = LinearShape(number + 1, inputs, outputs, dtype)  # the last one of a kind counts
    return shapes


def is_of_images(kind: str) -> bool:
    """Whether a layer sees images, of which a row has several."""
    return kind.startswith("vision.")


def network_change(rows: Mapping[str, Sequence[RowChange]], images: Mapping[str, Sequence[RowChange]]) -> NetworkChange:
    """The changes of each kind and layer, as the network takes them."""
    merger = _blocks(images, "vision.merger")
    return NetworkChange(
        VisionChange(
            _blocks(images, "vision.blocks"), _blocks(images, "vision.deepstack"), merger[0] if merger else UNCHANGED
        ),
        _blocks(rows, "language.layers"),
        _blocks(rows, "adaptation.blocks"),
        DitChange(_diffusion_blocks(rows), rows.get(_KEYS, ()), rows.get(_VALUES, ()), rows.get("dit.out", [None])[0]),
    )


def time_change(changes: Changes, model: Groot) -> TimeChange:
    """What one adapter changes about schedules, on the network's device."""

    def put(change: LinearChange) -> RowChange:
        factors = (None if part is None else part.to(model.device, model.dtype) for part in change)
        return RowChange(*factors)

    norms = {number: put(change) for number, change in changes.get(_NORMS, {}).items()}
    time_in, time_out = (changes[kind][0] if kind in changes else None for kind in OF_TIME[:2])
    return TimeChange(time_in and put(time_in), time_out and put(time_out), norms)


def _blocks(rows: Mapping[str, Sequence[RowChange]], tower: str) -> list[BlockChange]:
    kinds = {kind.rpartition(".")[2]: changes for kind, changes in rows.items() if kind.startswith(tower + ".")}
    layers = max((len(changes) for changes in kinds.values()), default=0)
    return [BlockChange(**{name: changes[layer] for name, changes in kinds.items()}) for layer in range(layers)]


def _diffusion_blocks(rows: Mapping[str, Sequence[RowChange]]) -> list[BlockChange]:
    """Even blocks have queries alone, odd ones queries, keys and values."""
    halves = {kind.rpartition(".")[2]: rows[kind] for kind in _HALF_OF_THE_BLOCKS if kind in rows}
    blocks = _blocks({kind: changes for kind, changes in rows.items() if kind not in _HALF_OF_THE_BLOCKS}, "dit.blocks")
    depth = len(blocks) or 2 * max((len(changes) for changes in halves.values()), default=0)
    blocks = blocks or [UNCHANGED] * depth
    return [
        block._replace(**{name: changes[i // 2] for name, changes in halves.items() if (i % 2 == 1) == (name == "qkv")})
        for i, block in enumerate(blocks)
    ]
