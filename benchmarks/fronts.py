"""What a front costs a call: a server of ours directly, through HAProxy and through nginx, in one interleaved run.

    python benchmarks/fronts.py               about a minute
    python benchmarks/fronts.py --rounds 3    a first look

One robot, three cameras, a policy that does nothing; the fronts run with the configurations of `deploy/`, without TLS,
so that the hop alone is seen. The ways take turns in every round (A B C, B C A, ...); compare the ratios, not the
milliseconds. "by round" is the middle half of the ratios of p50 within one round. `make fronts` fetches what is missing
of Debian's programs. Results go to benchmarks/results/ as JSON.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

import record
import relay
import wire
from relay.bench.calls import make_calls
from relay.bench.observations import PROMPT, observations

sys.path[:0] = [str(record.HERE.parent / "tests/deploy"), str(record.HERE.parent / "scripts")]

from running_fronts import front  # noqa: E402

import fronts  # noqa: E402

WAYS = ("direct", "haproxy", "nginx")
CODECS = (relay.Codec.JPEG_Q90, relay.Codec.RAW)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="turns that each way gets (default 20)")
    parser.add_argument("--calls", type=int, default=50, help="calls in each turn (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic frames (default 0)")
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder for the JSON file")
    chosen = parser.parse_args()
    fronts.ensure()
    if missing := [name for name in fronts.PACKAGES if fronts.program(name) is None]:
        sys.exit(f"{' and '.join(missing)} not found")
    if busy := record.how_busy():
        print(f"warning: {busy}; even the ratios will be rough")
    rows: list[dict[str, Any]] = []
    for codec in CODECS:
        rows += compare(codec, chosen.rounds, chosen.calls, chosen.seed)
    record.write("fronts", {"rows": rows}, vars(chosen) | {"policy_ms": 0}, folder=chosen.results)


def compare(codec: relay.Codec, rounds: int, calls: int, seed: int) -> list[dict[str, Any]]:
    """The three ways under one codec, as rows of the table that is printed."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = wire.start_server(stack, wire.RAW, 0)
        urls = {"direct": server}
        for kind in WAYS[1:]:
            urls[kind] = stack.enter_context(front(kind, [int(server.rpartition(":")[2])], None, folder))
        policies = {way: stack.enter_context(relay.Policy(url, codec)) for way, url in urls.items()}
        metadata = policies["direct"].get_server_metadata()
        source = observations(metadata, robot=None, file=None, prompt=PROMPT, size=224, seed=seed)
        sent = cycle([next(source) for _ in range(8)])
        turns: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        size = 0
        for turn in range(rounds + 1):
            first = turn % len(WAYS)
            for way in (*WAYS[first:], *WAYS[:first]):
                done = make_calls(policies[way], sent, calls)
                size = done[0].bytes_sent
                if turn:  # the first turn warms up
                    turns[way].append([call.round_trip_ms for call in done])
    return [_row(way, codec, size, turns[way], turns["direct"]) for way in WAYS]


def _row(way: str, codec: relay.Codec, size: int, ours: list[list[float]], base: list[list[float]]) -> dict[str, Any]:
    if way == "direct":
        print(f"\n{codec.name}, {size / 1e3:.0f} KB{'':18}{'p50':>8}{'p99':>11}{'p50 to direct':>18}{'by round':>14}")
    p50, p99 = np.percentile(np.concatenate(ours), (50, 99))
    ratio = p50 / np.percentile(np.concatenate(base), 50)
    quartiles = np.percentile([np.median(a) / np.median(b) for a, b in zip(ours, base, strict=True)], (25, 75))
    print(f"  {way:30}{p50:8.2f} ms{p99:8.2f} ms{ratio:15.2f}{quartiles[0]:10.2f}-{quartiles[1]:.2f}")
    return {
        "way": way,
        "codec": codec.name,
        "request_bytes": size,
        "samples": sum(map(len, ours)),
        "round_trip_p50_ms": float(p50),
        "round_trip_p99_ms": float(p99),
        "p50_to_direct": float(ratio),
        "p50_to_direct_quartiles_by_round": [float(each) for each in quartiles],
    }


if __name__ == "__main__":
    main()
