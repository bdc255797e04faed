"""What is to be reached, and which figure of which part says whether it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.measure import Cell, Table
from django_ratequota.engine.rates import ALGORITHMS


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on one figure."""

    text: str
    #: Name in ``Result.figures``.
    figure: str
    bound: float
    #: What the figure counts.
    unit: str = "×"
    #: The bound is a maximum; else a minimum.
    at_most: bool = True
    #: The known reason where it is not met.
    why: str = ""
    #: Measured only where DATABASE_URL names a PostgreSQL server.
    postgresql: bool = False


_REQUEST = (
    "The same EVALSHA is given its keys. `check_request` also finds the caller, the plan and the policies, and "
    "records statistics, which another thread sends. QuotaThrottle also writes the headers."
)
_PLUS = (
    "drf-ratelimit-plus has its limits in code and sends one INCRBY for a fixed window. QuotaThrottle finds the "
    "caller's policies, which operators change at run time, and describes each of them in the headers."
)
_INTEGER = (
    "Packages that store a bare integer need 32 bytes less. Ours also stores a time, so that only Redis' clock is "
    "used and a changed limit keeps what was used."
)


TARGETS = (
    Target("`Limiter.check`, 1 bucket / the same EVALSHA by redis-py", "check_1", 1.0),
    Target("`Limiter.check`, 3 buckets / the same EVALSHA", "check_3", 1.0),
    Target("`check_request`, 3 policies / the same EVALSHA", "check_request_3", 1.05, why=_REQUEST),
    Target("QuotaThrottle with headers, 3 policies / the same EVALSHA", "throttle_3", 1.2, why=_REQUEST),
    Target(
        "one limit: DRF's own throttle / QuotaThrottle with headers",
        "peers_1_drf",
        1.3,
        at_most=False,
        why="DRF's throttle has its limit in code and writes no headers.",
    ),
    Target(
        "one limit: closest peer with a request and headers / QuotaThrottle with headers",
        "peers_1_headers",
        1.1,
        at_most=False,
        why=_PLUS,
    ),
    Target("three limits: closest peer that tells remaining and reset / ours", "peers_3", 1.3, at_most=False),
    Target(
        "three limits: closest peer of all / ours",
        "peers_3_any",
        1.3,
        at_most=False,
        why="`check_batch` of django-smart-ratelimit sends three fixed windows in one pipeline. It does not tell "
        "when they reset, and a request that one of them refuses is charged to the others.",
    ),
    Target(
        "realistic view, three limits: more CPU than without, the worst of three servers",
        "view_percent",
        10,
        "%",
        why="The same EVALSHA by redis-py takes more than half of it. When requests are milliseconds apart, a "
        "command costs the worker and Redis several times what it costs in a loop, because other code has used the "
        "processor's caches.",
    ),
    Target("statistics: more CPU for a decision", "statistics_percent", 4, "%"),
    Target("`django.setup()`: more CPU with the app", "setup_ms", 60, "ms"),
    Target("decisions per second and Redis core, 3 buckets", "decisions_3", 40_000, "", at_most=False),
    Target(
        "repeated refusal from the deny cache: a decision by Redis / ours",
        "refused_speedup",
        20,
        at_most=False,
        why="A repeated refusal is still a Decision with a status for each bucket, made in Python.",
    ),
    Target("calls to Redis per DENY_CACHE_SECONDS, bucket and process", "refused_calls", 1, "calls"),
    Target("`turn`: p95 of waking late, 4 processes at 100 slots/s", "turn_late_ms", 2, "ms"),
    Target("finding policies, warm, 10 -> 10,000 policies", "resolve_growth", 1.2),
    Target("finding policies, warm, 10,000 policies", "resolve_us", 5, "µs"),
    Target("a user's first request", "cold_queries", 2, "queries"),
    Target("users forgotten by a change for one of them", "dropped_users", 1, "users"),
    Target("`warm()` with 110,000 policies", "load_ms", 1_000, "ms"),
    Target("taking in an edit of one of 110,000 policies", "edit_ms", 20, "ms"),
    Target("ledger: CPU of the process a counter and flush", "ledger_us", 15, "µs", postgresql=True),
    Target("ledger: PostgreSQL's CPU a counter and flush", "ledger_database_us", 70, "µs", postgresql=True),
    Target("ledger: Redis' time a counter and flush", "ledger_redis_us", 8, "µs", postgresql=True),
    *(
        Target(f"Redis bytes per client, {name}: ours / best peer's", f"bytes_{name}", 1.0, why=_INTEGER)
        for name in ALGORITHMS
        if name != "sliding_window_log"
    ),
    Target(
        "Redis bytes per client, sliding_window_log: ours / best peer's",
        "bytes_sliding_window_log",
        1.0,
        why="A list itself takes some 100 bytes. DRF stores a pickled list, which it reads and writes whole.",
    ),
    Target("sliding log, bytes an entry", "log_entry_bytes", 16, "bytes"),
)


def compare(figures: Mapping[str, float], *, whole: bool) -> Table:
    """Each target beside what was measured; in a ``whole`` run, one that no part measured says so."""
    rows: list[tuple[Cell, ...]] = []
    reasons: dict[str, list[str]] = {}
    for target in TARGETS:
        bound = f"{'≤' if target.at_most else '≥'} {target.bound:,g} {target.unit}".strip()
        measured = figures.get(target.figure)
        if measured is None:
            if whole:
                rows.append((target.text, bound, "", "needs PostgreSQL" if target.postgresql else "not measured"))
            continue
        met = measured <= target.bound if target.at_most else measured >= target.bound
        verdict = "met" if met else f"not met, by {abs(measured / target.bound - 1):.0%}"
        shown = f"{measured:,.0f}" if measured >= 1000 else f"{measured:.3g}"
        rows.append((target.text, bound, f"{shown} {target.unit}".strip(), verdict))
        if not met and target.why:
            reasons.setdefault(target.why, []).append(target.text)
    note = "\n".join(f"- {'; '.join(texts)}: {why}" for why, texts in reasons.items())
    return Table("Targets", ("what", "to reach", "measured", ""), rows, note)
