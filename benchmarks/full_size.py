"""Load a full-size checkpoint of random weights and run it on the CPU: time, memory, share of the matmul speed.

    python benchmarks/full_size.py FOLDER               about 7 GB in FOLDER, deleted afterwards; 8 GB of memory
    python benchmarks/full_size.py FOLDER --scale small a twelfth of it, in half a minute
    python benchmarks/full_size.py FOLDER --model groot GR00T N1.7 instead of π0.5: as much

Writes `FOLDER/model.safetensors` (bfloat16; for π0.5 openpi's PyTorch names, the two heads as openpi leaves them)
tensor by tensor, then loads it in a fresh process as `relay serve` does and answers one call of DROID's shape: for π0.5
two cameras, 51 prompt tokens, 15 actions, 10 steps; for GR00T as `full_size_groot.py` says. Ends with code 1 if the
process ever needed more than its weights and 1 GB while loading, or if the call runs at less than half the speed of its
own matrix products alone.

The machine should be quiet: where other work takes the cores, the threads of every small operation wait for each other
(measured on two busy cores: 0.42 to 0.49 of the products' speed with two threads, 0.91 with OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import full_size_groot
from relay.engine.weights import SafetensorsSource
from relay.models.groot.model import Groot
from relay.models.pi0.config import Pi0Config, TransformerSize, VisionSize
from relay.models.pi0.model import Inputs, Pi0
from relay.models.pi0.prefix import RowTokens, lay_out
from relay.models.pi0.weights import checkpoint_shapes, load_weights, read_sizes

CAMERAS, PROMPT, HORIZON, STEPS = 2, 51, 15, 10
SPARE_BYTES = 10**9
LEAST_RATIO = 0.5
_PIECE = 2**24 - 3  # values drawn, and written at once; odd, so that the rows of a matrix differ

_PALIGEMMA = "paligemma_with_expert.paligemma."
_EMBEDDING = _PALIGEMMA + "model.language_model.embed_tokens.weight"


def config(scale: str) -> Pi0Config:
    """π0.5 as it is published, or a small one of the same proportions."""
    full = scale == "full"
    return Pi0Config(
        family="pi05",
        vision=VisionSize(1152, 27, 4304, 16) if full else VisionSize(576, 8, 2152, 8),
        language=TransformerSize(2048, 18, 16384) if full else TransformerSize(1024, 6, 8192),
        expert=TransformerSize(1024, 18, 4096) if full else TransformerSize(512, 6, 2048),
        heads=8,
        head_dim=256 if full else 128,
        vocab_size=257_152 if full else 32_144,
        action_dim=32,
        action_horizon=HORIZON,
        state_dim=8,
        max_token_len=200,
        state_in_prompt=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=["pi05", "groot"], default="pi05")
    parser.add_argument("--scale", choices=["full", "small"], default="full")
    parser.add_argument("--rounds", type=int, default=3, help="calls that are timed; the best one counts")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint there, and use one that is there")
    parser.add_argument("--load-only", action="store_true", help="measure loading, run nothing")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        rounds = 0 if options.load_only else options.rounds
        print(json.dumps(measure(options.folder, options.model, options.scale, rounds)))
        return

    weights = options.folder / "model.safetensors"
    if not (options.keep and weights.is_file()):
        started = time.monotonic()
        options.folder.mkdir(parents=True, exist_ok=True)
        groots = options.model == "groot"
        of_groot = full_size_groot.stored_shapes(full_size_groot.config(options.scale)) if groots else None
        write_random(weights, of_groot or stored_shapes(config(options.scale)))
        print(f"wrote {weights.stat().st_size / 1e9:.2f} GB in {time.monotonic() - started:.1f} s", flush=True)
    try:
        again = [sys.executable, __file__, *sys.argv[1:], "--measure"]
        done = subprocess.run(again, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        if not options.keep:
            weights.unlink()
    raise SystemExit(report(json.loads(done.stdout)))


def report(result: dict[str, float]) -> int:
    """Print the result; 1 if it is not good enough."""
    spare = result["peak_bytes"] - result["weight_bytes"]
    print(
        f"{result['parameters'] / 1e9:.2f} billion parameters, {result['weight_bytes'] / 1e9:.2f} GB in memory\n"
        f"loading   {result['load_s']:.1f} s; at its peak the process held {spare / 1e6:.0f} MB beside the weights, "
        f"{result['start_bytes'] / 1e6:.0f} MB of which before loading"
    )
    if "ratio" in result:
        print(
            f"one call  {result['call_s']:.2f} s, {result['flop'] / 1e12:.2f} TFLOP, "
            f"{result['flop'] / result['call_s'] / 1e9:.0f} GFLOP/s\n"
            f"products  {result['matmul_s']:.2f} s, {result['matmul_flop'] / 1e12:.2f} TFLOP, "
            f"{result['matmul_flop'] / result['matmul_s'] / 1e9:.0f} GFLOP/s\n"
            f"the call runs at {result['ratio']:.2f} of the speed of its matrix products; with it the process held "
            f"{(result['call_peak_bytes'] - result['weight_bytes']) / 1e6:.0f} MB beside the weights"
        )
    failures = []
    if spare > SPARE_BYTES:
        failures.append(f"loading needed {spare / 1e9:.2f} GB beside the weights, more than {SPARE_BYTES / 1e9:g}")
    if result.get("ratio", 1.0) < LEAST_RATIO:
        failures.append(f"the call is slower than {LEAST_RATIO} of its matrix products")
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def stored_shapes(config: Pi0Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint as openpi's converter leaves it."""
    shapes = checkpoint_shapes(config)
    shapes[_PALIGEMMA + "lm_head.weight"] = shapes.pop(_EMBEDDING)
    shapes[_PALIGEMMA + "model.language_model.norm.weight"] = (config.language.width,)
    shapes["paligemma_with_expert.gemma_expert.lm_head.weight"] = (config.vocab_size, config.expert.width)
    return shapes


def write_random(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A checkpoint of random values, the same ones over and over, written piece by piece."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    noise = torch.randn(_PIECE, generator=torch.Generator().manual_seed(0))
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            deviation = 1 / math.sqrt(shape[-1]) if len(shape) > 1 else 0.02
            values = (noise[: math.prod(shape)] * deviation).bfloat16().view(torch.uint8).numpy().data
            left = 2 * math.prod(shape)
            while left:
                left -= file.write(values[:left])


def measure(folder: Path, name: str, scale: str, rounds: int) -> dict[str, float]:
    """Load the checkpoint of `folder` in this process and time a call in so many rounds."""
    start_bytes = _status("VmRSS")
    started = time.monotonic()
    model = load(folder, name, scale)
    result: dict[str, float] = {
        "load_s": time.monotonic() - started,
        "start_bytes": start_bytes,
        "peak_bytes": _status("VmHWM"),
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    if rounds:
        inputs: Any = full_size_groot.droid_inputs(model) if isinstance(model, Groot) else droid_inputs(model.config)
        assert bool(model.sample_actions(inputs).isfinite().all())  # tables are made and pages touched
        result["call_s"] = result["matmul_s"] = math.inf
        for _ in range(rounds):  # in turns, so that whatever else the machine does hits both
            result["call_s"] = min(result["call_s"], _seconds(lambda: model.sample_actions(inputs)))
            result["matmul_flop"], seconds = matrix_products(model)
            result["matmul_s"] = min(result["matmul_s"], seconds)
        result["call_peak_bytes"] = _status("VmHWM")
        if isinstance(model, Groot):
            result["flop"] = result["matmul_flop"] + full_size_groot.attention_flop(model.config)
        else:
            result["flop"] = count_flop(model.config)
        result["ratio"] = result["flop"] / result["call_s"] / (result["matmul_flop"] / result["matmul_s"])
    return result


def load(folder: Path, name: str, scale: str) -> Pi0 | Groot:
    """The network through its own loader."""
    if name == "groot":
        return full_size_groot.load(folder, full_size_groot.config(scale), _show)
    source = SafetensorsSource(folder)
    assert read_sizes(source.shapes).language == config(scale).language
    return load_weights(config(scale), source, torch.device("cpu"), torch.bfloat16, _show)


def droid_inputs(config: Pi0Config) -> Inputs:
    """One row of DROID's shape."""
    generator = torch.Generator().manual_seed(1)
    side = config.vision.image_size
    return Inputs(
        images=torch.randint(0, 256, (CAMERAS, side, side, 3), dtype=torch.uint8, generator=generator),
        tokens=torch.randint(0, config.vocab_size, (PROMPT,), generator=generator),
        layout=lay_out([RowTokens([True] * CAMERAS, [True] * PROMPT)], config.vision.tokens),
        noise=torch.randn(1, HORIZON, config.action_dim, generator=generator),
        num_steps=[STEPS],
    )


def count_flop(config: Pi0Config) -> float:
    """Multiplications and additions of one call: two per weight and token, and attention."""
    vision, language, expert = config.vision, config.language, config.expert
    query, key_value = config.heads * config.head_dim, 2 * config.head_dim
    images, prefix = CAMERAS * vision.tokens, CAMERAS * vision.tokens + PROMPT

    def block(size: TransformerSize, tokens: int, keys: int) -> float:
        weights = size.width * (query + key_value) + query * size.width + 3 * size.width * size.mlp
        return 2 * tokens * weights + 4 * tokens * keys * query

    tower = vision.depth * (4 * vision.width**2 + 2 * vision.width * vision.mlp) + vision.width * language.width
    see = 2 * images * (tower + 3 * vision.patch**2 * vision.width)
    see += vision.depth * 4 * images * vision.tokens * vision.width
    read = (language.depth - 1) * block(language, prefix, prefix) + 2 * prefix * language.width * key_value
    step = expert.depth * block(expert, HORIZON, prefix + HORIZON) + 4 * HORIZON * config.action_dim * expert.width
    return see + read + STEPS * step


@torch.inference_mode()
def matrix_products(model: Pi0 | Groot) -> tuple[float, float]:
    """The call's large products with nothing between them: their FLOP and seconds, on the model's own weights."""
    flop = seconds = 0.0
    if isinstance(model, Groot):
        for times, count, weights in full_size_groot.products(model):
            inputs = {w.shape[0]: torch.randn(count, w.shape[0]).bfloat16() for w in weights}
            seconds += times * _seconds(lambda w=weights, x=inputs: [x[m.shape[0]] @ m for m in w])
            flop += times * sum(2 * count * w.numel() for w in weights)
        return flop, seconds
    config = model.config
    images, prefix = (CAMERAS, config.vision.tokens), (1, CAMERAS * config.vision.tokens + PROMPT)
    groups: list[tuple[int, Sequence[Tensor], tuple[int, ...]]] = [
        (1, _matrices(model.vision.blocks, ("qkv", "out", "fc1", "fc2")), images),
        (1, _matrices(model.language[:-1], ("qkv", "out", "gate_up", "down")), prefix),
        (STEPS, _matrices(model.expert, ("qkv", "out", "gate_up", "down")), (1, HORIZON)),
    ]
    for times, weights, rows in groups:
        inputs = {w.shape[1]: torch.randn(*rows, w.shape[1]).bfloat16() for w in weights}
        seconds += times * _seconds(lambda w=weights, x=inputs: [F.linear(x[m.shape[1]], m) for m in w])
        flop += times * sum(2 * math.prod(rows) * w.numel() for w in weights)
    return flop, seconds


def _matrices(blocks: Any, names: Sequence[str]) -> list[Tensor]:
    return [getattr(block, name).weight for block in blocks for name in names]


def _seconds(work: Callable[[], object]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


def _status(key: str) -> int:
    """A size of this process in bytes: `VmRSS` is what it holds now, `VmHWM` the most it ever held."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return 1024 * int(line.split()[1])


def _show(phase: str, share: float) -> None:
    if sys.stderr.isatty():
        print(f"\r{phase} {share:4.0%}", end="\n" if share == 1 else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
