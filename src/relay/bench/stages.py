"""Where the time of calls went: each call split into stages that add up to the whole of it.

What each end measures is taken as it is; the rest is the link's. How that divides into the two directions is estimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relay.bench.calls import Call

EXPLAINED: Mapping[str, str] = {
    "encode": "compress the frames, pack the message",
    "upload": "the message on the link (estimated)",
    "link": "both messages on the link",
    "link and server": "the server tells no timings here",
    "parse": "unpack and check the message",
    "prepare": "decode and resize frames, tokenize",
    "queue": "wait for the device",
    "model": "the batch on the device",
    "policy": "the server's infer_ms: everything from the unpacked request to its actions",
    "reply": "hand over, encode and send the actions",
    "download": "the reply on the link (estimated)",
    "decode": "unpack the reply",
}
"""Every stage that a table may have, in a call's order."""

_NEIGHBOURS = 0.05
"""Share of all calls over which the stages at a percentile are averaged, around it."""

_SMOOTHING = 0.02
"""How far the mean of the neighbours may lie from the percentile itself."""


@dataclass(frozen=True, slots=True)
class Link:
    """A model of the link: milliseconds = `fixed_ms` + `ms_per_byte` times the bytes of the request.

    `fixed_ms` is what a request without bytes would take there and back, the reply included.
    """

    fixed_ms: float
    ms_per_byte: float

    def upload_ms(self, call: Call, link_ms: float) -> float:
        """The upload's part of the time that a call spent on the link."""
        return min(link_ms, self.fixed_ms / 2 + self.ms_per_byte * call.bytes_sent)


def fitted_link(groups: Sequence[Sequence[Call]]) -> Link | None:
    """The link that explains calls whose requests differ in size: a line through each group's median.

    None if the server doesn't tell what it spent, or there are fewer than two sizes.
    """
    points: list[tuple[float, float]] = []
    for calls in groups:
        left = [call.round_trip_ms - spent for call in calls if (spent := _server_ms(call)) is not None]
        if left:
            points.append((float(np.median([call.bytes_sent for call in calls])), float(np.median(left))))
    if len({size for size, _ in points}) < 2:
        return None
    sizes, times = np.array(points).T  # (groups,) each
    slope = max(0.0, float(np.polyfit(sizes, times, 1)[0]))
    return Link(max(0.0, float(np.median(times - slope * sizes))), slope)


def stages(call: Call, link: Link | None = None) -> dict[str, float]:
    """A call's stages in their order, milliseconds; they add up to `whole_ms`.

    With a server that times every step, all of them; with openpi's, its `infer_ms` as one; else the client's alone.
    """
    on_the_way = call.round_trip_ms
    told = call.server
    server: dict[str, float]
    if "prepare_ms" in told:
        server = {name: told.get(f"{name}_ms", 0.0) for name in ("parse", "prepare", "queue", "model")}
        server["reply"] = max(0.0, (_server_ms(call) or 0.0) - sum(server.values()))
    elif "infer_ms" in told:
        server = {"parse": told["parse_ms"]} if "parse_ms" in told else {}
        server["policy"] = told["infer_ms"]
    else:
        server = {}
    link_ms = max(0.0, on_the_way - sum(server.values()))
    decode = max(0.0, call.whole_ms - call.encode_ms - call.round_trip_ms)
    if not server:
        return {"encode": call.encode_ms, "link and server": link_ms, "decode": decode}
    if link is None or "reply" not in server:
        return {"encode": call.encode_ms, "link": link_ms, **server, "decode": decode}
    upload = link.upload_ms(call, link_ms)
    return {"encode": call.encode_ms, "upload": upload, **server, "download": link_ms - upload, "decode": decode}


def stages_at(percentile: float, calls: Sequence[Call], link: Link | None = None) -> dict[str, float]:
    """The stages at a percentile of `whole_ms`; they add up to it, within `_SMOOTHING`.

    The mean over the calls around it, as many below as above. Where these lie too far apart, as the slowest may, only
    the two calls between which the percentile lies, each by its distance to it.
    """
    ranked = sorted(calls, key=lambda call: call.whole_ms)
    value = float(np.percentile([call.whole_ms for call in ranked], percentile))
    place = percentile / 100 * (len(ranked) - 1)
    middle = round(place)
    reach = min(round(_NEIGHBOURS / 2 * len(ranked)), middle, len(ranked) - 1 - middle)
    mean = mean_stages(ranked[middle - reach : middle + reach + 1], link)
    if abs(sum(mean.values()) - value) <= _SMOOTHING * value:
        return mean
    below, share = int(place), place - int(place)
    low, high = (stages(ranked[min(at, len(ranked) - 1)], link) for at in (below, below + 1))
    return {name: (1 - share) * low.get(name, 0.0) + share * high.get(name, 0.0) for name in {**low, **high}}


def mean_stages(calls: Sequence[Call], link: Link | None = None) -> dict[str, float]:
    """The mean of each stage; they add up to the mean of `whole_ms`."""
    split = [stages(call, link) for call in calls]
    return {name: float(np.mean([each.get(name, 0.0) for each in split])) for name in split[0]}


def outside_model_ms(call: Call) -> float:
    """What a call took beside the policy's own work, as far as the server tells."""
    told = call.server
    own = told.get("queue_ms", 0.0) + told["model_ms"] if "model_ms" in told else told.get("infer_ms", 0.0)
    return max(0.0, call.whole_ms - own)


def _server_ms(call: Call) -> float | None:
    """From the arrival of the request to its reply sent; None from servers that don't tell."""
    if "prepare_ms" not in call.server:
        return None
    if call.server_ms is not None:
        return call.server_ms
    return sum(call.server.get(name, 0.0) for name in ("parse_ms", "infer_ms", "encode_ms"))
