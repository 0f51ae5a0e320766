"""What a LoRA adapter changes, in one form whatever wrote it; knows no model.

Written after "LoRA" (arXiv 2106.09685): a linear layer's weight W becomes W + B·A, with the factor alpha / rank folded
into B.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from relay.engine.weights import CheckpointError


class Pair(NamedTuple):
    """A change of low rank: `weight + b @ a`, with a (rank, inputs) and b (outputs, rank), any float dtype."""

    a: Tensor
    b: Tensor

    @property
    def delta(self) -> Tensor:
        """The change itself, (outputs, inputs) float32."""
        return self.b.float() @ self.a.float()


@dataclass(frozen=True, slots=True)
class Adapter:
    """Everything an adapter changes, by the names of the checkpoint's tensors; CPU.

    Attributes:
        pairs: weights of linear layers that get a change of low rank.
        replaced: tensors that are there in full, and take the place of the checkpoint's.
        notes: what its user should know.
    """

    pairs: Mapping[str, Pair]
    replaced: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """The tensors that are changed."""
        return frozenset((*self.pairs, *self.replaced))

    @property
    def has_effect(self) -> bool:
        """Whether anything changes at all; all-zero matrices, as training begins with, change nothing."""
        return bool(self.replaced) or any(pair.a.any() and pair.b.any() for pair in self.pairs.values())


NO_EFFECT = "has no effect: all its changes are zero"
"""What is said of an adapter that changes nothing, after its name."""


def find_problems(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What keeps an adapter from fitting a network whose tensors have these shapes, a sentence each; sorted."""
    problems = [f"unknown target: {name}" for name in adapter.names - shapes.keys()]
    problems += [f"given twice, in full and as LoRA: {name}" for name in adapter.pairs.keys() & adapter.replaced.keys()]
    for name, (a, b) in adapter.pairs.items():
        if name in shapes and len(shapes[name]) != 2:
            problems.append(f"not a linear layer: {name} is {shapes[name]}")
        elif name in shapes and (a.shape[1], b.shape[0]) != (shapes[name][1], shapes[name][0]):
            problems.append(
                f"wrong shape: {name} is {shapes[name]}, lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} "
                f"expect {(b.shape[0], a.shape[1])}"
            )
    problems += [
        f"wrong shape: {name} is {tuple(tensor.shape)}, expected {shapes[name]}"
        for name, tensor in adapter.replaced.items()
        if name in shapes and tuple(tensor.shape) != shapes[name]
    ]
    return sorted(problems)


def refuse(path: object, problems: Iterable[str]) -> None:
    """Raise a `CheckpointError` that lists the problems, if there are any."""
    problems = list(problems)
    if problems:
        shown = "\n  ".join(problems[:40])
        more = f"\n  and {len(problems) - 40} more" if len(problems) > 40 else ""
        raise CheckpointError(f"the adapter in {path} cannot be used:\n  {shown}{more}")
