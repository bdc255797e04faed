"""Metrics in prometheus-client's multiprocess mode: written to its files, which any process can read for all.

A collector that is read when scraped would show one process only, because prometheus-client writes just its own
metrics to the files. So the thread that sends counts to Redis copies the values into such metrics, once a second.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import prometheus_client

from ..monitoring.collector import listeners
from . import BUCKETS, HELP, METRICS, PREFIX, latency

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
        self._written: dict[tuple[str, tuple[str, ...]], float] = {}
        self._bins: list[int] = []
        self._total = 0.0

    def skip(self) -> None:
        """Mark the current values as written: a forked child's numbers begin with its parent's."""
        self._written = {
            (metric.name, labels): value
            for metric in METRICS
            for labels, value in metric.read()
            if metric.kind == "counter"
        }
        durations = latency()
        self._bins, self._total = list(durations.counts), durations.total

    def write(self, records: object = None) -> None:
        """Update the files."""
        for metric in METRICS:
            family = self._families[metric.name]
            for labels, value in metric.read():
                child = family.labels(*labels) if labels else family
                if metric.kind == "gauge":
                    child.set(value)
                    continue
                key = (metric.name, labels)
                child.inc(max(0.0, value - self._written.get(key, 0.0)))
                self._written[key] = value
        self._write_latency()

    def _write_latency(self) -> None:
        durations = latency()
        counts, total = list(durations.counts), durations.total
        if total < self._total:  # the settings have changed, and with them the limiter
            self._bins, self._total = [], 0.0
        for position, count in enumerate(counts):
            added = count - (self._bins[position] if self._bins else 0)
            if added:
                # observe() once per decision would take as long as counting the decisions.
                self._latency._buckets[position // _BINS].inc(added)
        self._latency._sum.inc(total - self._total)
        self._bins, self._total = counts, total


def start() -> None:
    """Write from now on."""
    writer = Writer()
    # After the tally's listener, which metrics/__init__ has added already.
    listeners.append(writer.write)
    os.register_at_fork(after_in_child=writer.skip)
