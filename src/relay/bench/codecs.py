"""Which codec is fastest over the link at hand: the same observations under each in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relay.bench.calls import Call, Policy, completed, make_calls
from relay.bench.stages import outside_model_ms
from relay.protocol.images import Codec

COMPARED = (Codec.RAW, Codec.LOSSLESS, Codec.JPEG_Q90, Codec.JPEG_Q50)
"""From the most faithful to the smallest."""

_AS_GOOD = 1.05
_AS_GOOD_MS = 0.5
"""So much slower than the fastest, a more faithful codec is still the better one."""


@dataclass(frozen=True, slots=True)
class CodecFigures:
    """One codec's calls in numbers: medians, in bytes and milliseconds.

    Attributes:
        outside_model_ms: the whole call without the policy's own work, which no codec changes.
    """

    codec: Codec
    bytes_sent: float
    encode_ms: float
    whole_ms: float
    outside_model_ms: float


def compare_codecs(
    policies: Mapping[Codec, Policy],
    observations: Iterator[dict[str, Any]],
    rounds: int,
    timeout: float | None = None,
    on_call: Callable[[int], None] = lambda done: None,
) -> dict[Codec, list[Call]]:
    """Let the codecs take turns, each with the same observation; the first turn warms up and doesn't count."""
    calls: dict[Codec, list[Call]] = {codec: [] for codec in policies}
    for turn in range(rounds + 1):
        observation = next(observations)
        for codec, policy in policies.items():
            call = make_calls(policy, iter([observation]), 1, timeout=timeout)[0]
            if turn > 1:
                calls[codec][-1] = completed(calls[codec][-1], call)
            if turn:
                calls[codec].append(call)
        on_call(turn)
    return calls


def figures(codec: Codec, calls: Sequence[Call]) -> CodecFigures:
    """The medians of one codec's calls."""
    return CodecFigures(
        codec,
        float(np.median([call.bytes_sent for call in calls])),
        float(np.median([call.encode_ms for call in calls])),
        float(np.median([call.whole_ms for call in calls])),
        float(np.median([outside_model_ms(call) for call in calls])),
    )


def recommended(compared: Sequence[CodecFigures]) -> CodecFigures:
    """The most faithful of those that are as fast as the fastest, or nearly so."""
    best = min(each.outside_model_ms for each in compared)
    good = [each for each in compared if each.outside_model_ms <= max(_AS_GOOD * best, best + _AS_GOOD_MS)]
    return min(good, key=lambda each: COMPARED.index(each.codec))
