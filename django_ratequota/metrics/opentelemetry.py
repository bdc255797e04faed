"""Metrics for OpenTelemetry (``pip install 'django-ratequota[opentelemetry]'``).

Call ``instrument()`` in an AppConfig's ``ready``: it creates observable instruments, which the SDK reads before each
export.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from .. import __version__
from ..utils.histogram import quantile
from ..utils.optional import require
from . import HELP, METRICS, Metric, latency

if TYPE_CHECKING:
    from opentelemetry import metrics as otel
else:
    otel = require("opentelemetry.metrics", "opentelemetry")

_PREFIX = "ratequota."
_QUANTILES = (0.5, 0.9, 0.99)

_providers: WeakSet[Any] = WeakSet()


def instrument(meter_provider: Any = None) -> None:
    """Create the instruments with a provider, by default the global one; once, however often it is called."""
    provider = meter_provider or otel.get_meter_provider()
    if provider in _providers:
        return
    _providers.add(provider)
    meter = provider.get_meter("django_ratequota", __version__)
    for metric in (*METRICS, *_LATENCY):
        counts = metric.kind == "counter"
        create = meter.create_observable_counter if counts else meter.create_observable_gauge
        name = _PREFIX + metric.name.removesuffix("_seconds")
        create(name, callbacks=[partial(_observe, metric)], unit=metric.unit, description=HELP[metric.name])


def _observe(metric: Metric, options: Any) -> list[Any]:
    return [otel.Observation(value, dict(zip(metric.labels, labels, strict=True))) for labels, value in metric.read()]


def _quantiles() -> list[tuple[tuple[str, ...], float]]:
    counts = latency().last_minute()
    found = [((str(share),), quantile(counts, share)) for share in _QUANTILES]
    return [(labels, value) for labels, value in found if value is not None]


# No histogram: OpenTelemetry has no observable one, and recording each decision would cost requests.
_LATENCY = (
    Metric("decision_duration", "gauge", "s", _quantiles, ("quantile",)),
    Metric("decision_duration_sum", "counter", "s", lambda: [((), latency().total)]),
    Metric("decision_duration_count", "counter", "{decision}", lambda: [((), sum(latency().counts))]),
)
