"""Draw the latest results of `benchmarks/wire.py`: `python benchmarks/plot.py [RESULTS.json] [--output FILE.png]`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COLOURS = {"stock": "#9aa4b2", "relay RAW": "#5b8def", "relay JPEG_Q90": "#2f5fd0"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", help="a JSON file (default: the newest in benchmarks/results)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "wire.png")
    chosen = parser.parse_args()
    results = chosen.results or max((HERE / "results").glob("wire-*.json"), key=lambda path: path.stat().st_mtime)
    draw(json.loads(results.read_text()), chosen.output)
    print(f"{results.name} -> {chosen.output}")


def draw(report: dict[str, Any], output: Path) -> None:
    """One panel per case: the median call of each system, with its 99th percentile as a whisker."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = report["cases"]
    figure, panels = pyplot.subplots(1, len(cases), figsize=(11, 2.8), layout="constrained")
    for panel, case in zip(panels, cases, strict=True):
        rows = [row for row in case["rows"] if row["system"] in COLOURS]
        names = [row["system"] for row in rows]
        medians = [row["p50_ms"] for row in rows]
        panel.bar(names, medians, color=[COLOURS[name] for name in names], width=0.65)
        tails = [row["p99_ms"] - row["p50_ms"] for row in rows]
        panel.errorbar(names, medians, yerr=[[0] * len(rows), tails], fmt="none", ecolor="#444", capsize=3, lw=1)
        for i, row in enumerate(rows):
            panel.annotate(f"{row['p50_ratio']:.2f}×", (i, row["p50_ms"]), ha="center", va="bottom", fontsize=8)
        robots = f"{case['robots']} robot{'s' if case['robots'] > 1 else ''}"
        link = ", 20 Mbit/s" if case["slow_link"] else ""
        panel.set_title(f"{robots}, {case['policy_ms']:g} ms policy{link}", fontsize=9)
        panel.tick_params(labelsize=7)
        panel.set_xticks(range(len(names)), [name.replace("relay ", "relay\n") for name in names])
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("round trip, ms", fontsize=8)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
