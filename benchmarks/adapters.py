"""What an adapter costs when it is applied beside the weights, as a ratio to the same work without one.

    python benchmarks/adapters.py [--rounds 7] [--rank 16]

Two measurements, on the CPU or on a GPU where there is one: whole calls of the demo policy, and one transformer block
of π0.5 at full size, with the tokens that its rows have. With and without take turns, and the median of the ratios is
printed, so that another program on the machine disturbs both alike.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from relay.engine.adapter_rows import RowChange
from relay.engine.adapters import Adapter, Pair
from relay.models.pi0.adapters import Pi0Adapter, pack
from relay.models.pi0.assemble import assemble
from relay.models.pi0.checkpoint import load_checkpoint
from relay.models.pi0.config import TransformerSize
from relay.models.pi0.gemma import UNCHANGED, BlockChange, GemmaBlock, KeyValueCache, rotation
from relay.models.pi0.model import Pi0
from relay.models.pi0.resident import ResidentAdapters
from relay.models.pi0.self_check import check_batch
from relay.models.pi0.weights import checkpoint_shapes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
EXPERT, PREFIX = TransformerSize(1024, 18, 4096), TransformerSize(2048, 18, 16384)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    print(f"rank {options.rank}, {DTYPE} on {DEVICE}, median of {options.rounds} rounds")
    with torch.inference_mode():
        measure_demo(options.rank, options.rounds)
        for name, size, tokens in (("expert", EXPERT, 50), ("prefix", PREFIX, 816)):
            for rows in (1, 4) if name == "expert" else (1,):
                measure_block(name, size, tokens, rows, options.rank, options.rounds)


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
            for name, shape in checkpoint_shapes(model.config).items()
            if len(shape) == 2
            and "vision" not in name
            and ((part in name and name.removesuffix(".weight").endswith(ends)) or (heads and "action_" in name))
        ]
        adapters = tuple(pack(random_adapter(model, names, rank), model) for _ in range(2))
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


def random_adapter(model: Pi0, names: Sequence[str], rank: int) -> Adapter:
    shapes = checkpoint_shapes(model.config)
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
    print(f"{label}: {statistics.median(ratios):.2f} times ({statistics.median(times) * 1e3:.2f} ms without)")


def elapsed(run: Callable[[], Tensor]) -> float:
    started = perf_counter()
    run()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - started


if __name__ == "__main__":
    main()
