"""From the checkpoint's tensors to the network: every one of them is used, or known to be of no use, or an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from relay.engine.base import Progress
from relay.engine.weights import CheckpointError, TensorSource, no_floats
from relay.models.dreamzero.config import DreamZeroConfig
from relay.models.dreamzero.dit import Dit
from relay.models.dreamzero.encoder_names import HEAD, stored_as
from relay.models.dreamzero.encoders import ImageEncoder, TextEncoder, VideoEncoder

_DIT = HEAD + "model."
_VISUAL = HEAD + "image_encoder.model."


class Network(nn.Module):
    """Everything with weights: the transformer and the three encoders."""

    def __init__(self, config: DreamZeroConfig, *, state_hidden: int, action_hidden: int) -> None:
        super().__init__()
        self.config = config
        self.dit = Dit(config, state_hidden=state_hidden, action_hidden=action_hidden)
        self.text = TextEncoder(config.text)
        self.image = ImageEncoder(config.image)
        self.video = VideoEncoder(config.video)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One parameter: tensors of the checkpoint one below the other, or one of a tensor's equal parts."""

    sources: tuple[str, ...]
    part: int = 0
    parts: int = 1


def load_network(
    config: DreamZeroConfig, source: TensorSource, device: torch.device, dtype: torch.dtype, progress: Progress
) -> Network:
    """Fill a network from a checkpoint, parameter by parameter.

    Raises:
        CheckpointError: listing every missing and unknown tensor, and those of another shape or kind, before anything
            is read.
    """
    network = empty_network(config, source.shapes, dtype)
    problems = find_problems(network, source.shapes, source.dtypes)
    if problems:
        raise CheckpointError(do_not_fit(problems))
    parameters = dict(network.named_parameters())
    total, done = sum(parameter.numel() for parameter in parameters.values()), 0
    state: dict[str, Tensor] = {}
    for name, empty in parameters.items():
        state[name] = _read(_piece(name), source, empty, device)
        done += empty.numel()
        progress("loading weights", done / total)
    network.load_state_dict(state, assign=True, strict=False)  # the tied copy of the token embedding has no entry
    network.text.umt5.encoder.set_input_embeddings(network.text.umt5.shared)
    for name, buffer in network.named_buffers():
        if not name.endswith("position_ids"):
            raise AssertionError(f"{name} would be left empty")
        network.get_submodule(name.rpartition(".")[0]).register_buffer(
            "position_ids", torch.arange(buffer.shape[1], device=device)[None], persistent=False
        )
    return network.eval().requires_grad_(False)


def empty_network(config: DreamZeroConfig, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Network:
    """The network without memory; the hidden widths of its small maps are told by the tensors."""

    def hidden(name: str) -> int:
        shape = shapes.get(_DIT + name, ())
        if len(shape) != 3:
            raise CheckpointError(f"the checkpoint has no tensor {_DIT}{name} of three axes; take a whole one")
        return shape[2]

    with torch.device("meta"):
        return Network(
            config,
            state_hidden=hidden("state_encoder.layer1.W"),
            action_hidden=hidden("action_decoder.layer1.W"),
        ).to(dtype)


def find_problems(
    network: Network, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> list[str]:
    """What keeps tensors of these names and shapes from filling the network, a sentence each; sorted."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, parameter in network.named_parameters():
        piece = _piece(name)
        rows = parameter.shape[0] * piece.parts // len(piece.sources) if parameter.ndim else 1
        for stored in piece.sources:
            expected[stored] = (rows, *parameter.shape[1:])
    problems = [f"missing: {name}" for name in expected.keys() - shapes.keys()]
    problems += [
        f"wrong shape: {name} is {shapes[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in shapes and _squeezed(shapes[name]) != _squeezed(shape)
    ]
    problems += no_floats((name for name in expected if name in shapes), dtypes)
    unknown = sorted(shapes.keys() - expected.keys() - set(unused_names(network.config, shapes)))
    adapters = [name for name in unknown if "lora_" in name]
    problems += [f"unknown: {name}" for name in unknown if name not in adapters]
    if adapters:
        problems.append(
            f"adapter: {adapters[0]} and {len(adapters) - 1} more LoRA tensors; merge them into the weights"
        )
    return sorted(problems)


def do_not_fit(problems: Sequence[str]) -> str:
    """One message of what `find_problems` found, its first forty."""
    shown = "\n  ".join(problems[:40])
    more = f"\n  and {len(problems) - 40} more" if len(problems) > 40 else ""
    return f"the checkpoint's tensors do not fit a DreamZero network of these sizes:\n  {shown}{more}"


def unused_names(config: DreamZeroConfig, names: Iterable[str]) -> list[str]:
    """The tensors that are known and of no use to actions: decoder, text tower, and CLIP's last block and head."""
    last_block = f"{_VISUAL}visual.transformer.{config.image.depth}."
    prefixes = (
        HEAD + "vae.model.decoder.",
        HEAD + "vae.model.conv2.",
        _VISUAL + "textual.",
        _VISUAL + "log_scale",
        last_block,
    )
    return [name for name in names if name.startswith(prefixes) or name == _VISUAL + "visual.head"]


def _piece(parameter: str) -> _Piece:
    if not parameter.startswith("dit."):
        stored = stored_as(parameter)
        return _Piece((stored.name,), stored.part, stored.parts)
    name = _DIT + parameter.removeprefix("dit.")
    if ".qkv." in name:
        return _Piece(tuple(name.replace(".qkv.", f".{part}.") for part in "qkv"))
    return _Piece((name,))


def _read(piece: _Piece, source: TensorSource, empty: Tensor, device: torch.device) -> Tensor:
    parts = [source.read(name) for name in piece.sources]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.chunk(piece.parts)[piece.part].reshape(empty.shape).to(device, empty.dtype, copy=True)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(side for side in shape if side != 1)
