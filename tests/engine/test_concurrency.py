"""Many callers at once, on threads, in processes, on hosts whose clocks differ: exactly the limit is admitted."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis

from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.engine.rates import ALGORITHMS
from tests.enforcement.test_check import monitored
from tests.support import server
from tests.support.threads import on_threads


def bucket(rate: str, **more: Any) -> Bucket:
    return Bucket("user:1", Rate.parse(rate), **more)


@pytest.fixture
def real_limiter(redis_client: redis.Redis) -> Iterator[Limiter]:
    """A limiter by the server's clock."""
    limiter = Limiter(client=redis_client, prefix="rqtest", timeout=30)
    yield limiter
    limiter.store.close()


# --- Threads. ---


def test_sixty_four_threads_on_one_limit_of_a_thousand(real_limiter: Limiter) -> None:
    """DRF's own throttles read, add and write: 50 threads were admitted 400 of 400 at a limit of 100."""
    asked = [bucket("1000/3650day")]

    def work() -> int:
        return sum(real_limiter.check(asked).allowed for _ in range(25))

    assert sum(on_threads(64, work)) == 1000
    assert not real_limiter.check(asked).allowed


def test_threads_on_several_limits_waste_no_unit_of_any(real_limiter: Limiter) -> None:
    """Stacked limiters charge the first limit for what the second refuses."""
    tight, wide = bucket("50/3650day", scope="tight"), bucket("1000/3650day gcra", scope="wide")
    admitted = sum(on_threads(16, lambda: sum(real_limiter.check([wide, tight]).allowed for _ in range(10))))
    statuses = real_limiter.peek([wide, tight]).statuses
    assert admitted == 50
    assert [status.remaining for status in statuses] == [950, 0]


def test_queued_threads_get_slots_of_their_own(limiter: Limiter) -> None:
    queue = bucket("10/s burst 1 leaky_bucket")
    waits = on_threads(32, lambda: limiter.acquire(queue, timeout=60).retry_after_us or 0)
    assert sorted(waits) == [100_000 * slot for slot in range(32)]


def test_event_loops_on_threads_and_threads_share_one_limit(real_limiter: Limiter) -> None:
    asked = [bucket("100/3650day")]

    async def ask() -> int:
        decisions = await asyncio.gather(*(real_limiter.acheck(asked) for _ in range(10)))
        return sum(decision.allowed for decision in decisions)

    def work() -> int:
        return asyncio.run(ask()) + sum(real_limiter.check(asked).allowed for _ in range(10))

    assert sum(on_threads(8, work)) == 100


# --- Processes, and hosts. ---

CHILD = """
import sys
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta, timezone

import redis
import time_machine

from django_ratequota import Bucket, Limiter, Rate

url, zone, off, times, *rates = sys.argv[1:]
host = time_machine.travel(datetime.now(UTC) + timedelta(seconds=int(off))) if int(off) else nullcontext()
with host, redis.Redis.from_url(url) as client:
    zone = timezone(timedelta(hours=int(zone)))
    limiter = Limiter(client=client, prefix="rqtest", time_zone=zone, timeout=30)
    buckets = [Bucket("user:1", Rate.parse(rate)) for rate in rates]
    limiter.peek(buckets)
    print("ready", flush=True)
    sys.stdin.readline()
    print(sum(limiter.check(buckets).allowed for _ in range(int(times))), flush=True)
    limiter.store.close()
"""


def in_processes(client: redis.Redis, offsets: list[int], times: int, *rates: str) -> list[int]:
    """How many requests each process was admitted; all begin when the last one is ready."""
    # A zone in which it is about noon, so that no calendar window ends meanwhile.
    zone = 12 - datetime.fromtimestamp(client.time()[0], UTC).hour
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", CHILD, server.url(), str(zone), str(offset), str(times), *rates],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            text=True,
        )
        for offset in offsets
    ]
    try:
        assert [child.stdout.readline() for child in children] == ["ready\n"] * len(children)
        for child in children:
            child.stdin.write("go\n")
            child.stdin.flush()
        return [int(child.communicate(timeout=60)[0]) for child in children]
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_two_hosts_an_hour_and_a_month_apart_share_one_limit(redis_client: redis.Redis) -> None:
    """Limiters that send the application's clock mint capacity, or starve the slower host."""
    rates = [f"200/3650day {algorithm}" for algorithm in ALGORITHMS]
    admitted = in_processes(redis_client, [-3600, 3600, 32 * 86_400], 90, *rates)
    assert sum(admitted) == 200
    assert min(admitted) >= 20  # the others ask 180 times


# --- One round trip. ---


THREE = [bucket("10/min"), bucket("100/hour sliding_window_log"), bucket("1000/month")]


@pytest.mark.parametrize("verb", ["check", "peek", "charge", "refund"])
def test_three_buckets_are_one_evalsha_and_no_other_command(limiter: Limiter, verb: str) -> None:
    ask = getattr(limiter, verb)
    ask(THREE)  # connected, and the script loaded
    with monitored() as commands:
        ask(THREE)
        ask(THREE, 11)
    assert commands == ["EVALSHA", "EVALSHA"]
