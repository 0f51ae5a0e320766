"""Which device a model is put on."""

from __future__ import annotations

import torch

from relay.engine.weights import CheckpointError


def choose_device(name: str) -> torch.device:
    """The torch device of this name; `auto` takes a GPU where there is one.

    Raises:
        CheckpointError: torch knows no such device, or this machine has none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # fails on devices that this machine lacks, and on `meta`
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "it cannot be used"
        raise CheckpointError(f"--device {name}: {reason}; this machine has {', '.join(_available())}") from None
    return device


def _available() -> list[str]:
    gpus = [f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(torch.cuda.device_count())]
    return [*gpus, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]
