"""A measurement as a picture: the stages of each call, stacked, and how often each duration came. Needs Matplotlib."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from relay.bench.run import Measurement
from relay.bench.stages import mean_stages, stages
from relay.client.access import shown


class NoMatplotlib(RuntimeError):
    """Matplotlib is not installed; the text says how to get it."""


def save_plot(measurement: Measurement, path: Path) -> None:
    """Draw to a file whose ending chooses the format.

    Raises:
        NoMatplotlib: it isn't installed.
        ValueError: Matplotlib doesn't know the ending.
        OSError: the file cannot be written.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise NoMatplotlib("drawing needs matplotlib; install it with: pip install 'relay-robotics[demo]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    calls = measurement.calls
    names = list(mean_stages(calls, measurement.link))
    layers = np.array([[stages(call, measurement.link)[name] for call in calls] for name in names])  # (stages, calls)
    whole = [call.whole_ms for call in calls]

    figure, (over_time, spread) = pyplot.subplots(
        1, 2, figsize=(11, 4), width_ratios=(2, 1), sharey=True, layout="constrained"
    )
    over_time.stackplot(range(1, len(calls) + 1), layers, labels=names, step="mid")
    over_time.set(xlabel="call", ylabel="milliseconds", title=f"{shown(measurement.parameters.url)}, by stage")
    handles, labels = over_time.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize="small")
    spread.hist(whole, bins=40, orientation="horizontal", color="0.6")
    for share in (50, 90, 99):
        value = float(np.percentile(whole, share))
        spread.axhline(value, color="black", linewidth=0.8)
        spread.annotate(
            f"p{share} {value:.1f} ms", (1.0, value), xycoords=("axes fraction", "data"), ha="right", va="bottom"
        )
    spread.set(xlabel="calls", title="whole call")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
