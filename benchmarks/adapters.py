"""What an adapter costs when it is applied beside the weights, as a ratio to the same work without one.

    python benchmarks/adapters.py [--rounds 7] [--rank 16]

Three measurements, on the CPU or on a GPU where there is one: whole calls of the demo policy, whole calls of a narrow
GR00T at true depth, and one transformer block of π0.5 at full size, with the tokens that its rows have. With and
without take turns, and the median of the ratios is printed, so that another program on the machine disturbs both alike.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import groot_calls
import record
from relay.engine.adapter_rows import RowChange
from relay.engine.adapters import Adapter, Pair
from relay.models.groot import weights as groot
from relay.models.groot.adapters import pack as pack_groot
from relay.models.groot.assemble import assemble as groot_inputs
from relay.models.groot.resident import ResidentAdapters as GrootAdapters
from relay.models.pi0 import weights as pi0
from relay.models.pi0.adapters import Pi0Adapter, pack
from relay.models.pi0.assemble import assemble
from relay.models.pi0.checkpoint import load_checkpoint
from relay.models.pi0.config import TransformerSize
from relay.models.pi0.gemma import UNCHANGED, BlockChange, GemmaBlock, KeyValueCache, rotation
from relay.models.pi0.resident import ResidentAdapters
from relay.models.pi0.self_check import check_batch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
MEASURED: list[dict[str, Any]] = []
EXPERT, PREFIX = TransformerSize(1024, 18, 4096), TransformerSize(2048, 18, 16384)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    print(f"rank {options.rank}, {DTYPE} on {DEVICE}, median of {options.rounds} rounds")
    with torch.inference_mode():
        measure_demo(options.rank, options.rounds)
        measure_groot(options.rank, options.rounds)
        for name, size, tokens in (("expert", EXPERT, 50), ("prefix", PREFIX, 816)):
            for rows in (1, 4) if name == "expert" else (1,):
                measure_block(name, size, tokens, rows, options.rank, options.rounds)
    record.write("adapters", {"rows": MEASURED}, vars(options), packages=("torch", "numpy"))


def measure_demo(rank: int, rounds: int) -> None:
    """Whole calls: lerobot's default targets, then every linear layer of the expert, then of both transformers."""
    import relay.demo

    folder = Path(relay.demo.__file__).parent / "weights"
    model = load_checkpoint(
        folder, tokenizer=None, device=DEVICE, dtype=torch.float32, progress=lambda phase, share: None
    ).model
    targets = {
        "q and v of the expert, action projections": (".gemma_expert.", ("q_proj", "v_proj"), True),
        "all of the expert": (".gemma_expert.", ("_proj",), True),
        "all of both transformers": (".layers.", ("_proj",), True),
    }
    for label, (part, ends, heads) in targets.items():
        names = [
            name
            for name, shape in pi0.checkpoint_shapes(model.config).items()
            if len(shape) == 2
            and "vision" not in name
            and ((part in name and name.removesuffix(".weight").endswith(ends)) or (heads and "action_" in name))
        ]
        shapes = pi0.checkpoint_shapes(model.config)
        adapters = tuple(pack(random_adapter(shapes, names, rank), model) for _ in range(2))
        for count, mixed in ((1, False), (4, False), (4, True)):
            batch, noise = check_batch(model.config, count)
            inputs = assemble(model, batch, noise)
            resident = ResidentAdapters(model, lambda adapters=adapters: adapters, 2**30)
            rows: Sequence[Pi0Adapter | None] = [adapters[0]] * count
            if mixed:
                rows = [(*adapters, None)[row % 3] for row in range(count)]
            images = [len(row.images) for row in batch]
            resident.groups(rows)

            def with_adapter(inputs=inputs, resident=resident, rows=rows, images=images) -> Tensor:
                network, changed = resident.apply(inputs, rows, images)
                return network.sample_actions(changed)

            def without(inputs=inputs) -> Tensor:
                return model.sample_actions(inputs)

            shared = "of two adapters and none" if mixed else "of one adapter"
            report(f"demo, {label}, {count} rows {shared}", without, with_adapter, rounds)


def measure_groot(rank: int, rounds: int) -> None:
    """Whole calls: queries and values of the diffusion transformer, all of its layers, layers of every part."""
    model, row = groot_calls.our_network(groot_calls.WIDTHS["small"])
    model.to(DEVICE, DTYPE)
    shapes = groot.checkpoint_shapes(model.config)
    targets = {
        "q and v of the diffusion transformer": ("action_head.model.", ("to_q.weight", "to_v.weight")),
        "all of the diffusion transformer": ("action_head.model.", (".weight",)),
        "layers of every part": (
            "",
            ("_proj.weight", ".qkv.weight", ".proj.weight", "fc1.weight", "fc2.weight", "to_q.weight"),
        ),
    }
    for label, (part, ends) in targets.items():
        names = [name for name, shape in shapes.items() if part in name and name.endswith(ends) and len(shape) == 2]
        adapters = [pack_groot(random_adapter(shapes, names, rank), model) for _ in range(2)]
        for count, mixed in ((1, False), (3, True)):
            noise = torch.randn(count, 40, groot_calls.ACTION_DIM)
            inputs = groot_inputs(model, [row] * count, noise, groot_calls.STEPS)
            resident = GrootAdapters(model, lambda adapters=adapters: adapters, 2**30)
            rows = [(*adapters, None)[number % 3] if mixed else adapters[0] for number in range(count)]
            resident.groups(rows)

            def with_adapter(inputs=inputs, resident=resident, rows=rows) -> Tensor:
                network, changed = resident.apply(inputs, rows, [groot_calls.IMAGES] * len(rows))
                return network.sample_actions(changed)

            def without(inputs=inputs) -> Tensor:
                return model.sample_actions(inputs)

            shared = "of two adapters and none" if mixed else "of one adapter"
            report(f"narrow GR00T, {label}, {count} rows {shared}", without, with_adapter, rounds)


def measure_block(name: str, size: TransformerSize, tokens: int, rows: int, rank: int, rounds: int) -> None:
    """One Gemma block at full size, all its linear layers adapted."""
    with torch.device(DEVICE):
        block = GemmaBlock(size, 8, 256, modulated=False).to(DTYPE)
        x = torch.randn(rows, tokens, size.width, dtype=DTYPE)
        tables = rotation(torch.arange(tokens)[None].expand(rows, -1), 256)
        cache = KeyValueCache(torch.empty(2, 1, rows, tokens, 256, dtype=DTYPE))
        changes = {
            kind: RowChange(
                torch.randn(rows, linear.in_features, parts * rank, dtype=DTYPE),
                torch.randn(rows, parts * rank, linear.out_features, dtype=DTYPE),
            )
            for kind, parts in (("qkv", 3), ("out", 1), ("gate_up", 2), ("down", 1))
            for linear in [getattr(block, kind)]
        }
    changed = BlockChange(**changes)

    def run(change: BlockChange) -> Tensor:
        cache.start = 0
        return block(x, tables, cache, 0, change=change)

    label = f"{name} block at full size, {rows} x {tokens} tokens"
    report(label, lambda: run(UNCHANGED), lambda: run(changed), rounds)


def random_adapter(shapes: Mapping[str, tuple[int, ...]], names: Sequence[str], rank: int) -> Adapter:
    pairs = {
        name: Pair(torch.randn(rank, shapes[name][1]), 0.01 * torch.randn(shapes[name][0], rank)) for name in names
    }
    return Adapter(pairs, {})


def report(label: str, without: Callable[[], Tensor], with_: Callable[[], Tensor], rounds: int) -> None:
    for run in (without, with_):
        run()
    ratios, times = [], []
    for _ in range(rounds):
        base, adapted = elapsed(without), elapsed(with_)
        ratios.append(adapted / base)
        times.append(base)
    row = {"label": label, "ratio": statistics.median(ratios), "ms_without": statistics.median(times) * 1e3}
    MEASURED.append(row)
    print(f"{label}: {row['ratio']:.2f} times ({row['ms_without']:.2f} ms without)")


def elapsed(run: Callable[[], Tensor]) -> float:
    started = perf_counter()
    run()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - started


if __name__ == "__main__":
    main()
