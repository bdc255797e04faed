"""Many callers at once, on threads and in event loops: exactly the limit is admitted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import redis

from django_ratequota import Bucket, Limiter, Rate
from tests.enforcement.test_check import monitored
from tests.support.threads import on_threads


@pytest.fixture
def real_limiter(redis_client: redis.Redis) -> Iterator[Limiter]:
    """A limiter by the server's clock."""
    limiter = Limiter(client=redis_client, prefix="rqtest", timeout=30)
    yield limiter
    limiter.store.close()


def test_requests_in_parallel(real_limiter: Limiter) -> None:
    """DRF's own throttles read, add and write: 50 threads were admitted 400 of 400 at a limit of 100."""
    asked = [Bucket("user:1", Rate.parse("1000/3650day"))]

    def work() -> int:
        return sum(real_limiter.check(asked).allowed for _ in range(25))

    assert sum(on_threads(64, work)) == 1000
    assert not real_limiter.check(asked).allowed


def test_event_loops_on_threads_and_threads_share_one_limit(real_limiter: Limiter) -> None:
    asked = [Bucket("user:1", Rate.parse("100/3650day"))]

    async def ask() -> int:
        decisions = await asyncio.gather(*(real_limiter.acheck(asked) for _ in range(10)))
        return sum(decision.allowed for decision in decisions)

    def work() -> int:
        return asyncio.run(ask()) + sum(real_limiter.check(asked).allowed for _ in range(10))

    assert sum(on_threads(8, work)) == 100


THREE = [Bucket("user:1", Rate.parse(rate)) for rate in ("10/min", "100/hour sliding_window_log", "1000/month")]


@pytest.mark.parametrize("verb", ["check", "peek", "charge", "refund"])
def test_three_buckets_are_one_evalsha_and_no_other_command(limiter: Limiter, verb: str) -> None:
    ask = getattr(limiter, verb)
    ask(THREE)  # connected, and the script loaded
    with monitored() as commands:
        ask(THREE)
        ask(THREE, 11)
    assert commands == ["EVALSHA", "EVALSHA"]
