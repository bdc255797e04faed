"""Asking a limiter, plainly or awaiting, and the limits that these tests ask about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.engine.rates import ALGORITHMS
from django_ratequota.exceptions import StoreError, StoreLeftAlone

Ask = Callable[..., Decision]
Way = Callable[[], AbstractContextManager[Ask]]

#: A limit out of reach.
ENDLESS = Bucket("user:1", Rate.parse("1000000/day"))


@contextmanager
def plainly() -> Iterator[Ask]:
    """``check``, as ``ask(limiter, buckets, cost=1)``."""
    yield lambda limiter, buckets, cost=1: limiter.check(buckets, cost)


@contextmanager
def awaiting() -> Iterator[Ask]:
    """``acheck`` in one event loop, so that its connections last as long as the block."""
    with asyncio.Runner() as runner:
        yield lambda limiter, buckets, cost=1: runner.run(limiter.acheck(buckets, cost))


def failure(ask: Ask, limiter: Limiter, buckets: Sequence[Bucket]) -> str:
    """The reason of the store's error; "" when it decided."""
    try:
        ask(limiter, buckets)
    except StoreError as error:
        return error.reason
    return ""


def outcome(limiter: Limiter, bucket: Bucket = ENDLESS) -> str:
    """What became of a check: "decided", the failure's reason, or "left alone" while the breaker is open."""
    try:
        limiter.check([bucket])
    except StoreError as error:
        return "left alone" if isinstance(error, StoreLeftAlone) else error.reason
    return "decided"


async def aoutcome(limiter: Limiter, bucket: Bucket = ENDLESS) -> str:
    """``outcome``, awaited."""
    try:
        await limiter.acheck([bucket])
    except StoreError as error:
        return "left alone" if isinstance(error, StoreLeftAlone) else error.reason
    return "decided"


def decides(limiter: Limiter, *buckets: Bucket) -> bool:
    """Whether the store decides about these; changes nothing."""
    return failure(lambda limiter, buckets: limiter.peek(buckets), limiter, buckets) == ""


def slow(algorithm: str, limit: int, user: int = 1) -> Bucket:
    """A limit that frees no unit while a test lasts."""
    return Bucket(f"user:{user}", Rate.parse(f"{limit}/3650day {algorithm}"))


def one_of_each(limit: int) -> list[Bucket]:
    """Such a limit by each algorithm."""
    return [slow(algorithm, limit) for algorithm in ALGORITHMS]
