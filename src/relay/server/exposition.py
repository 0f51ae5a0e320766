"""The server's numbers in Prometheus' text format, for `/metrics`; needs prometheus-client, which is optional.

Reads `metrics.py` when it is asked, and keeps nothing itself.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from relay.server.histogram import Histogram
from relay.server.metrics import OUTCOMES, STAGES
from relay.server.policies import ServedPolicy

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

DIALECTS = ("openpi", "vllm")


def can_be_exposed() -> bool:
    """Whether prometheus-client is installed."""
    return importlib.util.find_spec("prometheus_client") is not None


def exposition(policies: Iterable[ServedPolicy], connections: int) -> bytes:
    """All numbers of a server as they are now; to be called on its event loop."""
    from prometheus_client.exposition import generate_latest
    from prometheus_client.registry import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Numbers(lambda: _metrics(list(policies), connections)))
    return generate_latest(registry)


class _Numbers:
    def __init__(self, metrics: Callable[[], Iterator[Metric]]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics()


def _metrics(policies: list[ServedPolicy], connections: int) -> Iterator[Metric]:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    gauge = GaugeMetricFamily("relay_open_connections", "Open WebSocket connections.")
    gauge.add_metric([], connections)
    yield gauge
    gauge = GaugeMetricFamily("relay_open_sessions", "Sessions that have had an answer.", labels=["model"])
    for policy in policies:
        gauge.add_metric([policy.name], sum(map(len, policy.metrics.open_sessions)))
    yield gauge
    gauge = GaugeMetricFamily("relay_requests_held", "Requests being prepared, waiting or running.", labels=["model"])
    for policy in policies:
        gauge.add_metric([policy.name], policy.scheduler.held)
    yield gauge
    gauge = GaugeMetricFamily("relay_queue_length", "Requests waiting for the device.", labels=["model"])
    for policy in policies:
        gauge.add_metric([policy.name], policy.scheduler.waiting)
    yield gauge
    counter = CounterMetricFamily(
        "relay_requests", "Requests by how they ended.", labels=["model", "dialect", "outcome"]
    )
    for policy in policies:
        for dialect in DIALECTS:
            for outcome in OUTCOMES:
                counter.add_metric([policy.name, dialect, outcome], policy.metrics.requests[dialect, outcome])
    yield counter
    counter = CounterMetricFamily("relay_received_bytes", "Bytes of requests.", labels=["model"])
    for policy in policies:
        counter.add_metric([policy.name], policy.metrics.received_bytes)
    yield counter
    counter = CounterMetricFamily("relay_sent_bytes", "Bytes of replies.", labels=["model"])
    for policy in policies:
        counter.add_metric([policy.name], policy.metrics.sent_bytes)
    yield counter
    histogram = HistogramMetricFamily("relay_batch_rows", "Requests that shared a batch.", labels=["model"])
    for policy in policies:
        histogram.add_metric([policy.name], *_cumulative(policy.scheduler.batch_rows))
    yield histogram
    histogram = HistogramMetricFamily("relay_stage_seconds", "Time of one request by stage.", labels=["model", "stage"])
    for policy in policies:
        for stage in STAGES:
            histogram.add_metric([policy.name, stage], *_cumulative(policy.metrics.stages[stage]))
    yield histogram


def _cumulative(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    below, buckets = 0, list[tuple[str, float]]()
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        below += count
        buckets.append((bound, below))
    return buckets, histogram.sum
