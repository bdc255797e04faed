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
from ..runtime import process
from ..store.base import memory_ratio
from ..utils.histogram import BOUNDS, Histogram
from .tally import tally as decisions

#: The values of a metric's labels, in their order, and its value.
Sample = tuple[tuple[str, ...], float]
#: Every fourth bound: 50 µs, 100 µs, 200 µs and so on are fine enough for a graph.
BUCKETS = BOUNDS[3::4]
PREFIX = "ratequota_"

#: Name of a metric -> its description.
HELP = {
    "decisions": "Requests decided, by endpoint; a request of several endpoints counts at each.",
    "policy_decisions": "Requests to which a policy applied; refused = by this policy. "
    "All overrides count as one policy.",
    "degraded_decisions": "Decisions made by on_error, by the reason why Redis or the database did not decide.",
    "store_up": "Whether the Redis server is in use; 0 = its circuit breaker is open.",
    "store_memory_ratio": "Part of the Redis server's maxmemory in use, where a full server refuses to count.",
    "policies_revision": "The revision of the policies in use; 0 before the first request.",
    "policies_age_seconds": "Seconds since the policies were last read, which happens when they change.",
    "policies_reloads": "Reads of policies from the database: of all policies, or of changed ones.",
    "policies_reload_seconds": "Total seconds spent reading policies from the database.",
    "checkpoint_age_seconds": "Seconds for which durable counts have waited to be written; 0 = none wait.",
    "decision_seconds": "How long decisions took, Redis included.",
    "decision_duration": "Duration of the last minute's decisions in seconds, Redis included.",
    "decision_duration_sum": "Total seconds of all decisions.",
    "decision_duration_count": "Number of decisions in the sum.",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One number, for each combination of its labels; described in ``HELP``."""

    #: As in Prometheus, less the prefix and ``_total``.
    name: str
    kind: Literal["counter", "gauge"]
    #: ``s``, or the counted thing in braces: ``{decision}``.
    unit: str
    read: Callable[[], Iterable[Sample]]
    labels: tuple[str, ...] = ()


def latency() -> Histogram:
    """Return how long this process's decisions took."""
    return process.limiter().latency


def _stores() -> Iterable[Sample]:
    return [((breaker.server,), float(not breaker.open)) for breaker in process.limiter().store.breakers]


def _memory() -> Iterable[Sample]:
    try:
        infos = process.limiter().store.info()
    except StoreError:
        return []
    ratios = {server: memory_ratio(info) for server, info in infos.items()}
    return [((server,), ratio) for server, ratio in ratios.items() if ratio is not None]


def _degraded() -> Iterable[Sample]:
    return [((reason,), count) for reason, count in health().degraded.items()]


METRICS = (
    Metric("decisions", "counter", "{decision}", decisions.by_endpoint, ("endpoint", "outcome")),
    Metric("policy_decisions", "counter", "{decision}", decisions.by_policy, ("endpoint", "policy", "outcome")),
    Metric("degraded_decisions", "counter", "{decision}", _degraded, ("reason",)),
    Metric("store_up", "gauge", "1", _stores, ("server",)),
    Metric("store_memory_ratio", "gauge", "1", _memory, ("server",)),
    Metric("policies_revision", "gauge", "1", lambda: [((), health().revision)]),
    Metric("policies_age_seconds", "gauge", "s", lambda: [((), health().policies_age)]),
    Metric("checkpoint_age_seconds", "gauge", "s", lambda: [((), health().checkpoint_age)]),
    Metric("policies_reloads", "counter", "{reload}", lambda: [((), policies.reloads)]),
    Metric("policies_reload_seconds", "counter", "s", lambda: [((), policies.reload_seconds)]),
)
