"""Metrics for Prometheus, by prometheus-client (``pip install 'django-ratequota[prometheus]'``).

Call ``register()`` in an AppConfig's ``ready`` to add them to the registry that the project exposes already; or add
``view`` to the URLconf, which exposes nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from django.http import HttpRequest, HttpResponse

from ..policies.requests.view_declarations import SCOPE_ATTRIBUTE
from ..utils.histogram import BOUNDS
from ..utils.optional import require
from . import BUCKETS, HELP, METRICS, PREFIX, latency

if TYPE_CHECKING:
    import prometheus_client
    from prometheus_client import core, multiprocess
else:
    prometheus_client = require("prometheus_client", "prometheus")
    core = require("prometheus_client.core", "prometheus")
    multiprocess = require("prometheus_client.multiprocess", "prometheus")

#: Whether processes share their counts, by files in a directory.
_SHARED = "PROMETHEUS_MULTIPROC_DIR" in os.environ
if _SHARED:
    from .multiprocess import start

    start()


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
    return HttpResponse(
        prometheus_client.generate_latest(registry), content_type=prometheus_client.CONTENT_TYPE_LATEST
    )


# Not limited by ENFORCE_ALL: scrapes go on when quotas are used up.
setattr(view, SCOPE_ATTRIBUTE, "")
