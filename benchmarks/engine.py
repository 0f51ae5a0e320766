"""Our networks beside lerobot's, eager on the CPU: operations dispatched, and time, in one call.

    python3.12 -m venv .venv-lerobot
    .venv-lerobot/bin/pip install lerobot==0.6.1 'transformers>=5.4,<5.6' diffusers dm-tree
    python benchmarks/engine.py --lerobot .venv-lerobot/bin/python

lerobot needs other versions than we do, so each side runs in a process of its own environment; without `--lerobot`
only ours does. Both networks have the same sizes and random weights and get the same shapes: batch 1, float32, one
thread; π0 and π0.5 with three cameras, a full prompt, 10 actions and 10 steps, GR00T as `groot_calls.py` says. Sides
take turns; a side's time is the processor's, of its best round, so that other work on the machine hardly counts.

What is dispatched is a fair stand-in for what the host has to do: all ATen calls under `no_grad`. Those that compute,
views left out, are about what a GPU is told to launch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import groot_calls

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vision": {"width": 32, "depth": 1, "mlp": 128, "heads": 2},
        "language": {"width": 64, "depth": 3, "mlp": 96},
        "expert": {"width": 32, "depth": 3, "mlp": 80},
        "head_dim": 16,
    },
    "small": {
        "vision": {"width": 288, "depth": 7, "mlp": 1076, "heads": 4},
        "language": {"width": 512, "depth": 5, "mlp": 4096},
        "expert": {"width": 256, "depth": 5, "mlp": 1024},
        "head_dim": 64,
    },
}
FAMILIES = ("pi05", "pi0", "groot")
CAMERAS, PROMPT, HORIZON, STEPS, HEADS = 3, 40, 10, 10, 8
ROUNDS = 3
COLUMNS = ("dispatched", "computing", "milliseconds")
VIEWS = {"alias", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes"}
VIEWS |= {"squeeze", "t", "transpose", "unbind", "unsqueeze", "view"}
"""Operations that move no data."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lerobot", type=Path, help="a Python that has lerobot 0.6.1")
    parser.add_argument("--scale", choices=list(SIZES), action="append", help="by default all")
    parser.add_argument("--measure", choices=["relay", "lerobot"], help=argparse.SUPPRESS)
    parser.add_argument("--family", choices=FAMILIES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.family, options.scale[0])))
        return 0
    if options.lerobot is None:
        print("lerobot is left out: --lerobot names a Python that has it")
    elif subprocess.run([options.lerobot, "-c", "import lerobot.policies.groot, diffusers, tree"]).returncode:
        print(f"lerobot is left out: {options.lerobot} cannot import it, diffusers and dm-tree")
        options.lerobot = None
    sides = {"relay": sys.executable} | ({"lerobot": str(options.lerobot)} if options.lerobot else {})
    print(f"{'':14} " + " ".join(f"{kind:>22}" for kind in COLUMNS))
    print(f"{'':14} " + " ".join(f"{'ours':>7} {'lerobot':>8} {'ratio':>5}" for _ in COLUMNS))
    for scale in options.scale or SIZES:
        for family in FAMILIES:
            results = {side: _in_process(python, side, family, scale) for side, python in sides.items()}
            print(f"{scale + ' ' + family:14} " + " ".join(_columns(results, kind) for kind in COLUMNS))
    return 0


def _columns(results: dict[str, dict[str, float]], name: str) -> str:
    ours, theirs = results["relay"][name], results.get("lerobot", {}).get(name)
    return f"{ours:7.0f} " + (f"{theirs:8.0f} {ours / theirs:5.2f}" if theirs else f"{'-':>8} {'-':>5}")


def _in_process(python: str, side: str, family: str, scale: str) -> dict[str, float]:
    command = [python, __file__, "--measure", side, "--family", family, "--scale", scale]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **_QUIET})
    return json.loads(done.stdout.splitlines()[-1])


_QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def measure(side: str, family: str, scale: str) -> dict[str, float]:
    """Count and time one call in this process."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if family == "groot":
        make = {"relay": groot_calls.our_call, "lerobot": groot_calls.lerobots_call}[side]
        call = make(groot_calls.WIDTHS[scale])
    else:
        call = {"relay": our_call, "lerobot": lerobots_call}[side](family, SIZES[scale])
    with torch.no_grad():
        call()
        dispatched = count(call)
        milliseconds = float("inf")
        for _ in range(ROUNDS):
            started = process_time()
            call()
            milliseconds = min(milliseconds, 1e3 * (process_time() - started))
    computing = sum(times for name, times in dispatched.items() if name not in VIEWS)
    return {"dispatched": sum(dispatched.values()), "computing": computing, "milliseconds": milliseconds}


def count(call: Callable[[], object]) -> Counter[str]:
    """ATen calls that reach the dispatcher, by name."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        call()
    return counts


def our_call(family: str, sizes: dict[str, Any]) -> Callable[[], object]:
    import torch

    from relay.models.pi0.config import Pi0Config, TransformerSize, VisionSize
    from relay.models.pi0.model import Inputs, Pi0
    from relay.models.pi0.prefix import RowTokens, lay_out

    config = Pi0Config(
        family=family,  # pyright: ignore[reportArgumentType]
        vision=VisionSize(**sizes["vision"]),
        language=TransformerSize(**sizes["language"]),
        expert=TransformerSize(**sizes["expert"]),
        heads=HEADS,
        head_dim=sizes["head_dim"],
        vocab_size=1024,
        action_dim=32,
        action_horizon=HORIZON,
        state_dim=32,
        max_token_len=PROMPT,
        state_in_prompt=family == "pi05",
    )
    model = Pi0(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    inputs = Inputs(
        images=torch.randint(0, 256, (CAMERAS, 224, 224, 3), dtype=torch.uint8),
        tokens=torch.randint(0, 1024, (PROMPT,)),
        layout=lay_out([RowTokens([True] * CAMERAS, [True] * PROMPT)], config.vision.tokens),
        noise=torch.randn(1, HORIZON, 32),
        num_steps=[STEPS],
        state=torch.randn(1, 32) if family == "pi0" else None,
    )
    # Without inference mode, under which composite operations would be counted as one.
    sample = Pi0.sample_actions.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    return lambda: sample(model, inputs)


def lerobots_call(family: str, sizes: dict[str, Any]) -> Callable[[], object]:
    import importlib
    from dataclasses import dataclass

    import torch

    policy: Any = importlib.import_module(f"lerobot.policies.{family}.modeling_{family}")
    settings: Any = importlib.import_module(f"lerobot.policies.{family}.configuration_{family}")

    @dataclass
    class Size:
        width: int
        depth: int
        mlp_dim: int
        num_heads: int = HEADS
        num_kv_heads: int = 1
        head_dim: int = sizes["head_dim"]

    def size(variant: str) -> Size:
        chosen = sizes["language" if variant == "gemma_2b" else "expert"]
        return Size(chosen["width"], chosen["depth"], chosen["mlp"])

    policy.get_gemma_config = size
    build = policy.PaliGemmaForConditionalGenerationWithPiGemma

    def build_resized(config: Any) -> Any:
        tower, vision = config.vision_config, sizes["vision"]
        tower.hidden_size, tower.intermediate_size = vision["width"], vision["mlp"]
        tower.num_hidden_layers, tower.num_attention_heads = vision["depth"], vision["heads"]
        tower.projection_dim = sizes["language"]["width"]
        return build(config)

    policy.PaliGemmaForConditionalGenerationWithPiGemma = build_resized
    name = "PI05" if family == "pi05" else "PI0"
    config = getattr(settings, f"{name}Config")(chunk_size=HORIZON, n_action_steps=HORIZON, device="cpu")
    model = getattr(policy, f"{name}Pytorch")(config).eval()
    images = [torch.rand(1, 3, 224, 224) * 2 - 1 for _ in range(CAMERAS)]
    masks = [torch.ones(1, dtype=torch.bool) for _ in range(CAMERAS)]
    tokens, mask = torch.randint(0, 1024, (1, PROMPT)), torch.ones(1, PROMPT, dtype=torch.bool)
    state = (torch.randn(1, 32),) if family == "pi0" else ()
    noise = torch.randn(1, HORIZON, 32)
    return lambda: model.sample_actions(images, masks, tokens, mask, *state, noise=noise, num_steps=STEPS)


if __name__ == "__main__":
    raise SystemExit(main())
