"""The engine without Django: rates, buckets, decisions."""

from typing import assert_type

import redis

from django_ratequota import Bucket, BucketStatus, Decision, Limiter, Rate, RateQuotaError, turn


def limiter(client: redis.Redis) -> Limiter:
    return Limiter(client=client, prefix="sample", timeout=0.25)


def admitted(engine: Limiter, tenant: str) -> bool:
    bucket = Bucket(f"tenant:{tenant}", Rate.parse("100/min burst 200"), scope="search")
    try:
        decision = engine.check([bucket], cost=2)
    except RateQuotaError:
        return True
    assert_type(decision, Decision)
    assert_type(decision.allowed, bool)
    assert_type(decision.retry_after, float | None)
    assert_type(decision.statuses, tuple[BucketStatus, ...])
    assert_type(decision.binding, BucketStatus | None)
    decision.charge(3)
    return decision.allowed


async def waited(engine: Limiter, bucket: Bucket) -> int | None:
    decision = await engine.aacquire(bucket, timeout=1.5)
    assert_type(decision, Decision)
    return decision.binding.remaining if decision.binding else None


async def in_turn(engine: Limiter, bucket: Bucket) -> Decision:
    with turn(bucket):
        pass
    async with turn(bucket, timeout=2.5, cost=2, limiter=engine) as decision:
        assert_type(decision, Decision)
        return decision


def mistakes(engine: Limiter) -> None:
    Rate.parse(100)  # type: ignore[arg-type]
    engine.check([Rate.parse("1/s")])  # type: ignore[list-item]
    engine.check([], price=1)  # type: ignore[call-arg]
    print(engine.check([]).alowed)  # type: ignore[attr-defined]
