"""A measurement in words: the table of stages, a histogram, advice on the codec, and the same as numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from relay.bench.codecs import COMPARED, CodecFigures, recommended
from relay.bench.run import Measurement
from relay.bench.stages import EXPLAINED, mean_stages, stages_at
from relay.client.access import shown
from relay.protocol.images import Codec

PERCENTILES = (50, 90, 99)
_BARS, _BAR_WIDTH = 12, 40
_WIDTH = 100


def summary(measurement: Measurement) -> dict[str, Any]:
    """The numbers of the report, in milliseconds and bytes."""
    calls, link = measurement.calls, measurement.link
    best = recommended(measurement.compared) if measurement.compared else None
    return {
        "counted": len(calls),
        "left_out": measurement.parameters.warm_up,
        "bytes_sent": float(np.median([call.bytes_sent for call in calls])),
        "bytes_received": float(np.median([call.bytes_received for call in calls])),
        "whole_ms": {f"p{share}": _percentile(measurement, share) for share in PERCENTILES},
        "stages_ms": {f"p{share}": stages_at(share, calls, link) for share in PERCENTILES}
        | {"mean": mean_stages(calls, link)},
        "link": asdict(link) if link else None,
        "codecs": [asdict(each) | {"codec": each.codec.name} for each in measurement.compared],
        "recommended": best.codec.name if best else None,
    }


def as_json(measurement: Measurement) -> dict[str, Any]:
    """Everything, the single calls included, for `json.dumps`."""
    parameters = asdict(measurement.parameters)
    parameters |= {"codec": measurement.parameters.codec.name, "url": shown(measurement.parameters.url)}
    return {
        "date": measurement.started,
        **measurement.environment,
        "note": measurement.busy,
        "parameters": {key: str(value) if isinstance(value, Path) else value for key, value in parameters.items()},
        "policy": _plain(measurement.metadata),
        "sent_as": measurement.sent.name if measurement.sent else "arrays",
        "route": measurement.route,
        **summary(measurement),
        "calls": [asdict(call) for call in measurement.calls],
    }


def as_text(measurement: Measurement) -> str:
    """The report for a terminal."""
    parts = [_head(measurement), _table(measurement), _how(measurement), _histogram(measurement), _advice(measurement)]
    return "\n\n".join(part for part in parts if part)


def _head(measurement: Measurement) -> str:
    parameters, calls = measurement.parameters, measurement.calls
    sent = measurement.sent.name if measurement.sent else "plain arrays, which is all that this server takes"
    up, down = (np.median([getattr(call, name) for call in calls]) for name in ("bytes_sent", "bytes_received"))
    lines = [
        f"{shown(parameters.url)}, policy {measurement.metadata.get('model', 'without a name')!r}",
        f"route       {_ROUTES.get(measurement.route, measurement.route)}",
        f"calls       {len(calls)}, after {parameters.warm_up} for warm-up that are left out",
        f"frames      {sent}; {up:,.0f} bytes a request, {down:,.0f} a reply",
    ]
    if measurement.busy:
        lines.append(f"note        {measurement.busy}; compare ratios, not milliseconds")
    return "\n".join(lines)


_ROUTES = {
    "proxied": "the address that was given",
    "direct": "direct, to the server's own address",
}


def _table(measurement: Measurement) -> str:
    calls, link = measurement.calls, measurement.link
    columns = [stages_at(share, calls, link) for share in PERCENTILES]
    mean = mean_stages(calls, link)
    whole = sum(mean.values())
    lines = [
        f"{'milliseconds':18}" + "".join(f"{f'p{share}':>9}" for share in PERCENTILES) + f"{'share':>8}",
        f"{'whole call':18}" + "".join(f"{_percentile(measurement, share):9.2f}" for share in PERCENTILES),
    ]
    for name in mean:
        cells = "".join(f"{column[name]:9.2f}" for column in columns)
        lines.append(f"  {name:16}{cells}{mean[name] / whole:8.1%}   {EXPLAINED[name]}")
    return "\n".join([*lines, f"{'  sum':18}" + "".join(f"{sum(column.values()):9.2f}" for column in columns)])


def _how(measurement: Measurement) -> str:
    """How the table came about, for those of its rows that nobody measured."""
    lines = [
        "The stages of a column are the means of the 5 % of all calls around that percentile, or those of the nearest "
        "two where few are near; the share is that of all calls."
    ]
    link = measurement.link
    if "upload" in mean_stages(measurement.calls, link) and link is not None:
        lines.append(
            "Link: the client's time from the first byte sent to the reply received, less what the server says it "
            "spent from the request's arrival to the reply sent. Upload: half of what a request without bytes would "
            f"take ({link.fixed_ms:.2f} ms), and {link.ms_per_byte * 1000:.4f} ms for each KB; both come from a line "
            "through the codecs' medians over bytes. Download: the rest."
        )
    elif "link" in mean_stages(measurement.calls, link):
        lines.append(
            "Link: the client's time from the first byte sent to the reply received, less what the server says it "
            "spent; how it divides into the two directions cannot be told from that."
        )
    elif measurement.bare_replies:
        lines.append(
            "Only the client's timings exist on this path: vLLM-Omni's replies are bare actions. On a relay server, "
            "the same address without /v1/realtime/robot/openpi tells the others."
        )
    else:
        lines.append("Only the client's timings exist: this server's replies hold none.")
    return "\n".join(textwrap.fill(line, _WIDTH) for line in lines)


def _histogram(measurement: Measurement) -> str:
    """Whole calls by duration; the slowest percent is one bar with what is above it."""
    times = [call.whole_ms for call in measurement.calls]
    low, high = min(times), float(np.percentile(times, 99))
    edges = np.linspace(low, high if high > low else low + 1.0, _BARS + 1)
    counts = np.histogram(np.minimum(times, edges[-1]), edges)[0]
    lines = [
        f"{left:9.2f} ms  {'#' * max(round(count / max(counts) * _BAR_WIDTH), int(count > 0)):{_BAR_WIDTH}}  {count}"
        for left, count in zip(edges[:-1], counts, strict=True)
    ]
    return "\n".join(lines)


def _advice(measurement: Measurement) -> str:
    """The codecs in numbers, and which to take."""
    compared = measurement.compared
    if not compared:
        return ""
    best = recommended(compared)
    lines = [f"{'codec':10}{'request':>12}{'encode':>10}{'whole p50':>12}{'beside the policy':>20}"]
    lines += [
        f"{each.codec.name:10}{each.bytes_sent / 1000:9.1f} KB{each.encode_ms:7.2f} ms{each.whole_ms:9.2f} ms"
        f"{each.outside_model_ms:17.2f} ms"
        for each in compared
    ]
    return "\n".join([*lines, _verdict(best, compared)])


def _verdict(best: CodecFigures, compared: Sequence[CodecFigures]) -> str:
    fastest = min(compared, key=lambda each: each.outside_model_ms)
    if best is fastest:
        reason = "the fastest over this link"
    else:
        reason = f"nearly as fast over this link as {fastest.codec.name}, and truer to the picture"
    fidelity = {
        Codec.RAW: "exact pixels",
        Codec.LOSSLESS: "exact pixels",
        Codec.JPEG_Q90: "small losses",
        Codec.JPEG_Q50: "visible losses: check that the policy still works with it",
    }[best.codec]
    truer = [each for each in compared if COMPARED.index(each.codec) < COMPARED.index(best.codec)]
    verdict = f"take {best.codec.name}: {reason} ({fidelity})"
    if best.codec is not Codec.JPEG_Q50 or not truer:
        return verdict
    second = min(truer, key=lambda each: each.outside_model_ms)
    more = second.outside_model_ms - best.outside_model_ms
    return f"{verdict}; {second.codec.name} takes {more:.1f} ms more"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _percentile(measurement: Measurement, share: float) -> float:
    return float(np.percentile([call.whole_ms for call in measurement.calls], share))
