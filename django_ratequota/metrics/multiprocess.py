"""Metrics in prometheus-client's multiprocess mode: written to its files, which any process can read for all.

Only values that prometheus-client wrote itself are in these files, so a collector that is read when scraped would
tell of one process. What the thread that hands counts to Redis adds up is written here right after, once a second.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import prometheus_client

from ..monitoring import collector as collecting
from . import BUCKETS, LATENCY_HELP, METRICS, PREFIX, latency

#: How the gauges of all processes become one; revisions stay apart, by pid, to be compared.
_MODES: Mapping[str, Any] = {"store_up": "livemin", "policies_age_seconds": "livemax", "policies_revision": "liveall"}
#: Bins of ``histogram.Histogram`` in a bucket.
_BINS = 4


class Writer:
    """Writes what has changed since it last did."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}
        for metric in METRICS:
            name, labels = PREFIX + metric.name, metric.labels
            if metric.kind == "counter":
                self._families[metric.name] = prometheus_client.Counter(name, metric.help, labels, registry=None)
            else:
                self._families[metric.name] = prometheus_client.Gauge(
                    name, metric.help, labels, registry=None, multiprocess_mode=_MODES[metric.name]
                )
        self._latency: Any = prometheus_client.Histogram(
            f"{PREFIX}decision_seconds", LATENCY_HELP, buckets=BUCKETS, registry=None
        )
        self._written: dict[tuple[str, tuple[str, ...]], float] = {}
        self._bins: list[int] = []
        self._total = 0.0

    def skip(self) -> None:
        """Take what there is as written: a forked child's numbers begin with its parent's."""
        self._written = {
            (metric.name, labels): value for metric in METRICS for labels, value in metric.read() if _counts(metric)
        }
        durations = latency()
        self._bins, self._total = list(durations.counts), durations.total

    def write(self, notes: object = None) -> None:
        """Bring the files up to date."""
        for metric in METRICS:
            family = self._families[metric.name]
            for labels, value in metric.read():
                one = family.labels(*labels) if labels else family
                if not _counts(metric):
                    one.set(value)
                    continue
                key = (metric.name, labels)
                one.inc(max(0.0, value - self._written.get(key, 0.0)))
                self._written[key] = value
        self._write_latency()

    def _write_latency(self) -> None:
        durations = latency()
        counts, total = list(durations.counts), durations.total
        if total < self._total:  # the settings have changed, and with them the limiter
            self._bins, self._total = [], 0.0
        for place, count in enumerate(counts):
            grown = count - (self._bins[place] if self._bins else 0)
            if grown:
                # Observing each by itself would take as long as the decisions' own counting.
                self._latency._buckets[place // _BINS].inc(grown)
        self._latency._sum.inc(total - self._total)
        self._bins, self._total = counts, total


def _counts(metric: Any) -> bool:
    return bool(metric.kind == "counter")


writer = Writer()
# After the listener that adds up: it was there first.
collecting.listeners.append(writer.write)
os.register_at_fork(after_in_child=writer.skip)
