"""Metrics in prometheus-client's multiprocess mode: written to its files, which any process can read for all.

A collector that is read when scraped would show one process only, because prometheus-client writes just its own
metrics to the files. So the thread that sends counts to Redis copies the values into such metrics, once a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import prometheus_client

from ..monitoring.collector import listeners
from . import BUCKETS, HELP, METRICS, PREFIX, Metric, latency

#: How prometheus-client combines the gauges of all processes; revisions stay apart, by pid, to be compared.
_MODES: Mapping[str, Any] = {
    "store_up": "livemin",
    "policies_age_seconds": "livemax",
    "policies_revision": "liveall",
    "checkpoint_age_seconds": "livemax",
}
#: Bins of ``histogram.Histogram`` in a bucket.
_BINS = 4


class Writer:
    """Writes what has changed since the last call."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}
        for metric in METRICS:
            make: Any = prometheus_client.Counter
            if metric.kind == "gauge":
                make = partial(prometheus_client.Gauge, multiprocess_mode=_MODES[metric.name])
            self._families[metric.name] = make(PREFIX + metric.name, HELP[metric.name], metric.labels, registry=None)
        self._latency: Any = prometheus_client.Histogram(
            f"{PREFIX}decision_seconds", HELP["decision_seconds"], buckets=BUCKETS, registry=None
        )
        self._written: dict[object, float] = {}

    def skip(self) -> None:
        """Mark the current values as written: a forked child's numbers begin with its parent's."""
        self._written = {key: value for key, _increment, value in self._counts()}

    def write(self, records: object = None) -> None:
        """Update the files."""
        for metric in METRICS:
            for labels, value in metric.read() if metric.kind == "gauge" else ():
                self._child(metric, labels).set(value)
        for key, increment, value in self._counts():
            before = self._written.get(key, 0.0)
            if value != before:
                # It is lower when it began again: the settings have changed, and with them the limiter.
                increment(value - before if value > before else value)
                self._written[key] = value

    def _child(self, metric: Metric, labels: tuple[str, ...]) -> Any:
        family = self._families[metric.name]
        return family.labels(*labels) if labels else family

    def _counts(self) -> Iterator[tuple[object, Callable[[float], None], float]]:
        """Yield what only grows: its key, the method that adds to the files, and its value in this process."""
        for metric in METRICS:
            for labels, value in metric.read() if metric.kind == "counter" else ():
                yield (metric.name, labels), self._child(metric, labels).inc, value
        durations = latency()
        yield "seconds", self._latency._sum.inc, durations.total
        for position, count in enumerate(durations.counts):
            # observe() once per decision would take as long as counting the decisions.
            yield position, self._latency._buckets[position // _BINS].inc, count


def start() -> None:
    """Write from now on."""
    writer = Writer()
    # After the tally's listener, which metrics/__init__ has added already.
    listeners.append(writer.write)
    os.register_at_fork(after_in_child=writer.skip)
