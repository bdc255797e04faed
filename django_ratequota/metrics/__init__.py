"""The metrics of a process: read when they are scraped or exported, so that requests pay nothing.

``prometheus.register()`` and ``opentelemetry.instrument()`` export them. No label names a caller: labels are names of
endpoints, plans, servers and reasons, and ids of policies that are for many callers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from ..exceptions import StoreError
from ..monitoring.health import health
from ..policies.cache import policies
from ..runtime import default_limiter
from ..utils.histogram import BOUNDS, Histogram
from .tally import tally as decisions

#: The values of a metric's labels, in their order, and its value.
Sample = tuple[tuple[str, ...], float]
#: Every fourth bound: 50 µs, 100 µs, 200 µs and so on are fine enough for a graph.
BUCKETS = BOUNDS[3::4]
PREFIX = "ratequota_"
LATENCY_HELP = "How long decisions took, Redis included."


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number, for each combination of its labels."""

    #: As in Prometheus, less the prefix and ``_total``.
    name: str
    kind: Literal["counter", "gauge"]
    help: str
    #: ``s``, or the counted thing in braces: ``{decision}``.
    unit: str
    read: Callable[[], Iterable[Sample]]
    labels: tuple[str, ...] = ()


def latency() -> Histogram:
    """Return how long this process's decisions took; empty where the settings name no Redis."""
    try:
        return default_limiter().latency
    except StoreError:
        return Histogram()


def _stores() -> Iterable[Sample]:
    try:
        breakers = default_limiter().store.breakers
    except StoreError:
        return []
    return [((breaker.server,), float(not breaker.open)) for breaker in breakers]


def _degraded() -> Iterable[Sample]:
    return [((reason,), count) for reason, count in health().degraded.items()]


METRICS = (
    Metric(
        name="decisions",
        kind="counter",
        help="Requests decided, by endpoint; a request of several endpoints counts at each.",
        unit="{decision}",
        read=decisions.by_endpoint,
        labels=("endpoint", "outcome"),
    ),
    Metric(
        name="policy_decisions",
        kind="counter",
        help="Requests to which a policy applied; refused = by this policy. All overrides count as one policy.",
        unit="{decision}",
        read=decisions.by_policy,
        labels=("endpoint", "policy", "outcome"),
    ),
    Metric(
        name="degraded_decisions",
        kind="counter",
        help="Decisions made by on_error, by the reason why Redis or the database did not decide.",
        unit="{decision}",
        read=_degraded,
        labels=("reason",),
    ),
    Metric(
        name="store_up",
        kind="gauge",
        help="Whether the Redis server is in use; 0 = its circuit breaker is open.",
        unit="1",
        read=_stores,
        labels=("server",),
    ),
    Metric(
        name="policies_revision",
        kind="gauge",
        help="The revision of the policies in use; 0 before the first request.",
        unit="1",
        read=lambda: [((), health().revision)],
    ),
    Metric(
        name="policies_age_seconds",
        kind="gauge",
        help="Seconds since the policies were last read, which happens when they change.",
        unit="s",
        read=lambda: [((), health().policies_age)],
    ),
    Metric(
        name="policies_reloads",
        kind="counter",
        help="Reads of policies from the database: of all policies, or of changed ones.",
        unit="{reload}",
        read=lambda: [((), policies.reloads)],
    ),
    Metric(
        name="policies_reload_seconds",
        kind="counter",
        help="Total seconds spent reading policies from the database.",
        unit="s",
        read=lambda: [((), policies.reload_seconds)],
    ),
)
