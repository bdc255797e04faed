"""A client that is refused over and over: what the deny cache saves, and what it still asks of Redis."""

from __future__ import annotations

import time
from collections.abc import Callable

import redis

from benchmarks import server
from benchmarks.measure import US, Cell, Result, Table, interleave
from django_ratequota import Bucket, Limiter, Rate

DENY_SECONDS = 1.0
_COUNTS = (1, 3)


def run(quick: bool = False) -> Result:
    """On a server that nobody else asks."""
    with server.running() as url, redis.Redis.from_url(url) as client, server.cpu_clock(url) as cpu:
        calls = {
            (count, seconds): _refused(client, count, seconds) for count in _COUNTS for seconds in (0, DENY_SECONDS)
        }
        names = {
            case: f"{case[0]} limit{'s' * (case[0] > 1)}, deny cache {'on' if case[1] else 'off'}" for case in calls
        }
        spent = interleave(
            {names[case]: call for case, call in calls.items()}, *((3, 50) if quick else (21, 300)), cpu
        )
        rows: list[tuple[Cell, ...]] = []
        speedups, asked = [], []
        for case, call in calls.items():
            count, seconds = case
            mine = spent[names[case]]
            if not seconds:
                rows.append((names[case], "", *mine.us(), "every request"))
                continue
            speedups.append(spent[names[count, 0]].times(mine))
            asked.append(_calls_a_second(client, call, 2 if quick else 5) * DENY_SECONDS)
            rows.append((names[case], speedups[-1], *mine.us(), f"{asked[-1]:.2f}"))
    note = (
        "One client refused by one limit of 1/day, in one process, as fast as it can ask. Calls are the scripts that "
        f"the server ran per DENY_CACHE_SECONDS ({DENY_SECONDS:g})."
    )
    table = Table("A refused client", ("", "times cheaper", *US, "calls to Redis"), rows, note)
    return Result([table], {"refused_speedup": min(speedups), "refused_calls": max(asked)})


def _refused(client: redis.Redis, count: int, deny_seconds: float) -> Callable[[], object]:
    limiter = Limiter(client=client, timeout=10, deny_cache_seconds=deny_seconds)
    rates = ("1/day", "1000000/hour", "1000000/min")[:count]
    buckets = tuple(Bucket("user:refused", Rate.parse(rate), scope=f"refused{count}") for rate in rates)
    limiter.check(buckets)
    if limiter.check(buckets).allowed:
        raise RuntimeError("the client is not refused")
    return lambda: limiter.check(buckets)


def _calls_a_second(client: redis.Redis, ask: Callable[[], object], seconds: float) -> float:
    """Scripts that the server runs each second while ``ask`` is called over and over."""
    before = _scripts_run(client)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ask()
    # Two that are a second apart fit into one second.
    return (_scripts_run(client) - before - 1) / seconds


def _scripts_run(client: redis.Redis) -> int:
    stats = client.info("commandstats")
    return sum(int(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in ("evalsha", "eval"))
