"""What the ledger costs: 100,000 counters of months are added up and written with their days, and Redis is raised."""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.databases import in_each, main
from benchmarks.measure import Result, Table

COUNTERS = 100_000


def run(quick: bool = False) -> Result:
    """The first flush makes the rows, later ones add to them."""
    measured = in_each("benchmarks.ledger", quick)
    rows = [(name, *row) for name, one in measured.items() for row in one["rows"]]
    columns = ("database", "flush", "adding up, µs", "writing, µs", "together, µs", "database, µs", "Redis, µs")
    note = (
        f"A counter and flush, {COUNTERS:,} counters of months, each charged once by a check of its own: CPU of the "
        "process, of PostgreSQL's (SQLite works in the process), and the time of Redis' scripts. Later flushes add "
        "to the rows: medians."
    )
    figures = measured["PostgreSQL"]["figures"] if "PostgreSQL" in measured else {}
    return Result([Table("A flush", columns, rows, note)], figures)


def measure(quick: bool) -> dict[str, Any]:
    """What a process of its own hands back, as JSON values."""
    counters, times = (2_000, 1) if quick else (COUNTERS, 3)
    found = [_flush(counters) for _ in range(1 + times)]
    later = [median(each) for each in zip(*found[1:], strict=True)]
    return {
        "rows": [("first", *_row(found[0])), ("later", *_row(later))],
        "figures": {
            "ledger_us": later[0] + later[1],
            "ledger_database_us": later[2],
            "ledger_redis_us": later[3],
        },
    }


def _row(spent: Any) -> tuple[float, ...]:
    adding, writing, database, server = spent
    return adding, writing, adding + writing, database, server


def _note(counters: int) -> Any:
    """A ledger with the entries of this number of checks."""
    from django_ratequota.engine.rates import Rate
    from django_ratequota.engine.types import Bucket
    from django_ratequota.ledger.book import Ledger
    from django_ratequota.ledger.noted import Entry, Hold

    ledger, rate, now_us = Ledger(), Rate.parse("10000/month"), time.time_ns() // 1000
    for number in range(counters):
        bucket = Bucket(f"tenant:{number}", rate, endpoint_id=7, counted_per="caller", policy_id=3, durable=True)
        check = Hold([Entry(bucket, 1, now_us + number)])
        check.is_open, check.owner = False, None
        ledger.entries.append(check)
    return ledger


def _flush(counters: int) -> tuple[float, float, float, float]:
    """µs a counter: CPU of adding up and of writing, CPU of the database, time of Redis."""
    from django_ratequota.runtime import default_limiter

    limiter, ledger = default_limiter(), _note(counters)
    database, redis = _database_seconds(), _redis_seconds(limiter)
    begun = time.process_time()
    ledger.add_up(limiter.time_zone)
    added_up = time.process_time()
    if ledger.write(limiter.time_zone) != counters:
        raise RuntimeError("not all counters were written")
    ledger.raise_store(limiter)
    spent = (added_up - begun, time.process_time() - added_up)
    spent = (*spent, _database_seconds() - database, _redis_seconds(limiter) - redis)
    adding, writing, database, redis = (1e6 * seconds / counters for seconds in spent)
    return adding, writing, database, redis


def _database_seconds() -> float:
    """CPU seconds of the server's process for this connection; 0 for SQLite."""
    from django.db import connection

    if connection.vendor != "postgresql":
        return 0.0
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _redis_seconds(limiter: Any) -> float:
    """Seconds that scripts ran on the server."""
    text = limiter.store.execute(("INFO", "commandstats")).decode()
    stats = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    usec = [
        stats[name].split("usec=")[1].split(",")[0] for name in ("cmdstat_evalsha", "cmdstat_eval") if name in stats
    ]
    return sum(map(int, usec)) / 1e6


if __name__ == "__main__":
    main(measure, run)
