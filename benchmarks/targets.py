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
    #: What stands in the way, told where it is not met.
    why: str = ""


_WAITING = "What is left is waiting for the script, see Layers: its Python takes what the bare call's does."
_LOG = "The log reads both its ends and writes a list: two commands more than the others."
_FLOOR = (
    "One bare EVALSHA in the view is over it or near it already: a worker waits for each reply, see Whole request."
)
_INTEGER = (
    "Packages that keep a bare integer have 32 bytes less; ours holds an instant as well, so that no clock but Redis'"
    " counts, and an edited limit keeps what was used."
)


TARGETS = (
    Target("`Limiter.check`, 1 bucket, against bare `evalsha`", "check_1", 1.15, why=_WAITING),
    Target("`Limiter.check`, 1 bucket, the slowest algorithm", "check_1_slowest", 1.15, why=_LOG),
    Target("`Limiter.check`, 3 buckets", "check_3", 1.4, why=_WAITING),
    Target("`Limiter.check`, 3 buckets, the slowest algorithm", "check_3_slowest", 1.4, why=_LOG),
    Target("`check_request`, 3 policies, warm", "check_request_3", 1.6, why=_WAITING),
    Target("`QuotaThrottle`, 3 policies, headers written", "throttle_3", 1.5, why=_WAITING),
    Target(
        "1 limit, remaining and reset known: best peer's time / ours",
        "peers_1",
        1.0,
        at_most=False,
        why="The closest sends one INCRBY and reckons the reset by its own clock: no script can be as short.",
    ),
    Target(
        "3 limits, remaining and reset known: best peer's time / ours",
        "peers_3",
        2.5,
        at_most=False,
        why="As above: three INCRBY, one after the other, none taken back when the next refuses.",
    ),
    Target("statistics: what counting adds to `check_request`", "statistics_percent", 3, "%"),
    Target("script on the server, 1 bucket, of the rate of `return 1`", "script_1", 0.55, at_most=False),
    Target(
        "script on the server, 1 bucket, the slowest algorithm", "script_1_slowest", 0.55, at_most=False, why=_LOG
    ),
    Target("script on the server, 3 buckets", "script_3", 0.35, at_most=False),
    Target(
        "script on the server, 3 buckets, the slowest algorithm", "script_3_slowest", 0.35, at_most=False, why=_LOG
    ),
    Target("refused client with deny cache: a Redis decision's time / ours", "refused_speedup", 20, at_most=False),
    Target("calls to Redis per DENY_CACHE_SECONDS, bucket and process", "refused_calls", 1, "calls"),
    Target("DRF request under gunicorn: fewer requests/s than without", "wsgi_loss_percent", 12, "%", why=_FLOOR),
    Target("DRF request under uvicorn: fewer requests/s than without", "asgi_loss_percent", 12, "%", why=_FLOOR),
    Target("`turn`: p95 of waking late, 4 processes at 100 slots/s", "turn_late_ms", 2, "ms"),
    Target("warm resolve, 10 -> 10,000 policies", "resolve_growth", 1.2),
    Target("warm resolve, 10,000 policies", "resolve_us", 5, "µs"),
    Target("cold user", "cold_queries", 2, "queries"),
    Target("entries dropped by a change that touches one user", "dropped_users", 1, "entries"),
    Target("an edit of one policy, taken in by a process with 100,000 others", "edit_ms", 20, "ms"),
    Target(
        "p99 of requests while another process saves 400 times a second, over a quiet one's", "burst_ms", 10, "ms"
    ),
    Target("ledger: CPU of the process a counter and flush, days included", "ledger_us", 15, "µs"),
    Target("ledger: PostgreSQL's CPU a counter and flush", "ledger_database_us", 70, "µs"),
    Target("ledger: Redis' time a counter and flush", "ledger_redis_us", 8, "µs"),
    Target(
        "ledger: p99 of another thread's gaps during a flush of 100,000, over a quiet one's",
        "ledger_gap_ms",
        10,
        "ms",
    ),
    *(
        Target(f"Redis bytes per client, {name}: ours / best peer's", f"bytes_{name}", 1.0, why=_INTEGER)
        for name in ALGORITHMS
        if name != "sliding_window_log"
    ),
    Target(
        "Redis bytes per client, sliding_window_log: ours / best peer's",
        "bytes_sliding_window_log",
        1.0,
        why="A list has some 100 bytes of its own; DRF pickles bare times, which it reads and writes whole.",
    ),
    Target("sliding log, bytes an entry", "log_entry_bytes", 16, "bytes"),
    Target("`import django_ratequota` over Django's own", "import_ms", 15, "ms"),
)


def compare(figures: Mapping[str, float], *, whole: bool) -> Table:
    """Each target beside what was measured; in a ``whole`` run, one that no part measured says so."""
    rows: list[tuple[Cell, ...]] = []
    reasons: dict[str, list[str]] = {}
    for target in TARGETS:
        bound = f"{'≤' if target.at_most else '≥'} {target.bound:g} {target.unit}"
        measured = figures.get(target.figure)
        if measured is None:
            if whole:
                rows.append((target.text, bound, "", "not measured"))
            continue
        met = measured <= target.bound if target.at_most else measured >= target.bound
        verdict = "met" if met else f"not met, by {abs(measured / target.bound - 1):.0%}"
        rows.append((target.text, bound, f"{measured:.3g} {target.unit}", verdict))
        if not met and target.why:
            reasons.setdefault(target.why, []).append(target.text)
    note = "\n".join(f"- {', '.join(texts)}: {why}" for why, texts in reasons.items())
    return Table("Targets", ("what", "to reach", "measured", ""), rows, note)
