"""Metrics for Prometheus, by prometheus-client (``pip install 'django-ratequota[prometheus]'``).

Call ``register()`` in an AppConfig's ``ready`` to add them to the registry that the project exposes already; or add
``view`` to the URLconf, which exposes nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from django.http import HttpRequest, HttpResponse

from ..monitoring.collector import listeners
from ..policies.requests.view_declarations import DECLARED_ATTRIBUTE, Declaration
from ..utils import forks
from ..utils.histogram import BOUNDS
from ..utils.optional import require
from . import BUCKETS, HELP, METRICS, PREFIX, Metric, latency

if TYPE_CHECKING:
    import prometheus_client
    from prometheus_client import core, multiprocess
else:
    prometheus_client = require("prometheus_client", "prometheus")
    core = require("prometheus_client.core", "prometheus")
    multiprocess = require("prometheus_client.multiprocess", "prometheus")

#: Whether processes share their counts, by files in a directory.
_SHARED = "PROMETHEUS_MULTIPROC_DIR" in os.environ


class RateQuotaCollector:
    """Reads this process's metrics when it is scraped."""

    def describe(self) -> list[Any]:
        """Return nothing: registering reads neither settings nor Redis."""
        return []

    def collect(self) -> Iterator[Any]:
        """Return every metric with its current values."""
        families = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
        for metric in METRICS:
            family = families[metric.kind](PREFIX + metric.name, HELP[metric.name], labels=metric.labels)
            for labels, value in metric.read():
                family.add_metric(labels, value)
            yield family
        yield _latency()


def _latency() -> Any:
    histogram = latency()
    counts = list(histogram.counts)
    upto = dict(zip((*BOUNDS, float("inf")), accumulate(counts), strict=True))
    buckets = [(str(bound), upto[bound]) for bound in BUCKETS]
    family = core.HistogramMetricFamily(PREFIX + "decision_seconds", HELP["decision_seconds"])
    family.add_metric([], [*buckets, ("+Inf", sum(counts))], histogram.total)
    return family


#: How prometheus-client combines the gauges of all processes; revisions stay apart, by pid, to be compared.
_MODES: Mapping[str, Any] = {
    "store_up": "livemin",
    "store_memory_ratio": "livemax",
    "policies_age_seconds": "livemax",
    "policies_revision": "liveall",
    "checkpoint_age_seconds": "livemax",
}
#: Bins of ``histogram.Histogram`` in a bucket.
_BINS = 4


class _SharedFiles:
    """The metrics in prometheus-client's multiprocess mode: files, which any process reads for all.

    A collector that is read when scraped would show one process only, because prometheus-client writes just its own
    metrics to the files. So the thread that sends counts to Redis copies the values into such metrics, once a second.
    """

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


if _SHARED:
    _files = _SharedFiles()
    # After the tally's listener, which metrics/__init__ has added already.
    listeners.append(_files.write)
    forks.after_fork(_files.skip)


_registries: WeakSet[Any] = WeakSet()


def register(registry: Any = None) -> None:
    """Add the metrics to a registry, by default prometheus-client's own; once, however often it is called.

    In multiprocess mode this does nothing: they are in the files.
    """
    registry = registry or prometheus_client.REGISTRY
    if registry not in _registries and not _SHARED:
        registry.register(RateQuotaCollector())
        _registries.add(registry)


def view(request: HttpRequest) -> HttpResponse:
    """Return this process's metrics in the text format; in multiprocess mode, all metrics in the files.

    It asks for no authentication: let only the scraper reach it.
    """
    registry = prometheus_client.CollectorRegistry()
    if _SHARED:
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    register(registry)
    text = prometheus_client.generate_latest(registry)
    return HttpResponse(text, content_type=prometheus_client.CONTENT_TYPE_LATEST)


# Not limited by ENFORCE_ALL: scrapes go on when quotas are used up.
setattr(view, DECLARED_ATTRIBUTE, Declaration(None, None, checks=True))
