"""Fixtures shared by the suite: a limiter with an injected clock on a real server, emptied around each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from django_ratequota import Limiter
from tests import server

#: 2025-11-21 05:20:00 UTC, in µs: where injected clocks begin.
NOON_US = 1_763_702_400_000_000


class Clock:
    """An injected clock: µs since the Unix epoch, moved by hand."""

    def __init__(self, now_us: int = NOON_US) -> None:
        self.now_us = now_us

    def __call__(self) -> int:
        return self.now_us

    def advance(self, seconds: float = 0, *, us: int = 0) -> None:
        self.now_us += round(seconds * 10**6) + us


def _forget_keys(client: redis.Redis) -> None:
    for key in client.scan_iter("rqtest:*", count=1000):
        client.delete(key)


@pytest.fixture
def redis_client() -> Iterator[redis.Redis]:
    """A client of the test server; this suite's keys are gone before and after."""
    with redis.Redis.from_url(server.url()) as client:
        _forget_keys(client)
        yield client
        _forget_keys(client)


@pytest.fixture
def fresh_policies(redis_client: redis.Redis) -> Iterator[None]:
    """This process as just started: no snapshot, no user in memory, no key in Redis, nothing noted."""
    from django_ratequota.snapshot import policies

    policies.forget()
    yield
    policies.forget()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limiter(redis_client: redis.Redis, clock: Clock) -> Iterator[Limiter]:
    """An engine on the test server under the injected clock."""
    limiter = Limiter(client=redis_client, clock=clock, prefix="rqtest", timeout=5)
    yield limiter
    limiter.store.close()
