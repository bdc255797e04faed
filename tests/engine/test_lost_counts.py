"""Counts that a store has lost: since when it has its data, and seeds, the units that a caller knows to be used."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
import redis

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.engine.decision import LimitRequest, Mode
from django_ratequota.engine.keys import birth_key, bucket_key, revision_key
from django_ratequota.exceptions import NewerRevision
from django_ratequota.utils.sansio import drive
from tests.conftest import NOON_US, Clock

REVISION, BIRTH = revision_key("rqtest"), birth_key("rqtest")
DAY = Bucket("user:1", Rate.parse("10/day fixed_window"))
MONTH = Bucket("user:1", Rate.parse("100/month"))
MINUTE = Bucket("user:1", Rate.parse("10/min"))


def ask(limiter: Limiter, *buckets: Bucket, verb: Mode = "check", **how: Any) -> Decision:
    return drive(limiter.steps(LimitRequest(mode=verb, buckets=buckets, **how)), limiter.store.execute)


def moment(us: int) -> datetime:
    return datetime.fromtimestamp(us / 10**6, UTC)


def remaining(decision: Decision) -> list[int]:
    return [status.remaining for status in decision.statuses]


def born(limiter: Limiter, revision: int) -> int:
    """What a caller of that revision learns on its way to the newest one."""
    with pytest.raises(NewerRevision):
        ask(limiter, revision=revision)
    return limiter.born_us


# --- Since when the store has its data. ---


def test_the_first_publication_says_since_when_the_store_has_its_data(
    redis_client: redis.Redis, limiter: Limiter
) -> None:
    assert limiter.stored_revision() == limiter.born_us == 0
    first = limiter.publish()
    assert limiter.stored_revision() == limiter.born_us == first
    later = limiter.publish()
    assert born(limiter, first) == first < later
    assert redis_client.ttl(BIRTH) == -1


def test_it_is_now_once_the_revision_is_missing(redis_client: redis.Redis, limiter: Limiter, clock: Clock) -> None:
    before = limiter.publish()
    redis_client.flushall()
    assert born(limiter, before) == clock.now_us
    assert int(redis_client.get(BIRTH) or 0) == clock.now_us


def test_it_is_now_once_an_older_copy_of_the_data_is_back(
    redis_client: redis.Redis, limiter: Limiter, clock: Clock
) -> None:
    before = limiter.publish()
    redis_client.set(REVISION, before - 1)
    clock.now_us = before + 5
    assert born(limiter, before) == before + 5


def test_it_is_now_when_a_caller_has_seen_that_counts_are_lost(limiter: Limiter) -> None:
    first = limiter.publish()
    second = limiter.publish(lost=True)
    assert born(limiter, first) == second > first


@pytest.mark.parametrize("value", [None, "x", "-1", "1.5", "nan", "9" * 18, "list"])
def test_a_time_that_nobody_can_have_written_becomes_now(
    redis_client: redis.Redis, limiter: Limiter, clock: Clock, value: str | None
) -> None:
    first = limiter.publish()
    redis_client.delete(BIRTH)
    if value == "list":
        redis_client.rpush(BIRTH, 1)
    elif value is not None:
        redis_client.set(BIRTH, value)
    assert born(limiter, first - 1) == clock.now_us == int(redis_client.get(BIRTH) or 0)
    clock.advance(5)
    assert born(limiter, first - 1) == clock.now_us - 5 * 10**6, "once"


def test_a_publication_writes_a_missing_one(redis_client: redis.Redis, limiter: Limiter) -> None:
    first = limiter.publish()
    redis_client.delete(BIRTH)
    second = limiter.publish()
    assert born(limiter, first) == second


# --- Seeds. ---


@pytest.mark.parametrize("bucket", [DAY, MONTH], ids=str)
def test_a_lost_count_goes_on_from_its_seed(redis_client: redis.Redis, limiter: Limiter, bucket: Bucket) -> None:
    limit = bucket.rate.limit
    assert remaining(ask(limiter, bucket, seeds=(limit - 2,))) == [1]
    assert remaining(ask(limiter, bucket)) == [0]
    assert not ask(limiter, bucket).allowed
    assert redis_client.ttl(bucket_key("rqtest", bucket)) > 0


def test_a_seed_never_lowers_a_count_and_is_never_added_twice(limiter: Limiter) -> None:
    assert remaining(ask(limiter, DAY, cost=6)) == [4]
    assert remaining(ask(limiter, DAY, seeds=(3,))) == [3]
    assert remaining(ask(limiter, DAY, seeds=(8,))) == [1]
    assert remaining(ask(limiter, DAY, seeds=(8,))) == [0]


def test_a_refusal_and_a_peek_count_the_seed_and_write_nothing(redis_client: redis.Redis, limiter: Limiter) -> None:
    refused = ask(limiter, DAY, seeds=(10,))
    assert (refused.allowed, remaining(refused)) == (False, [0])
    assert refused.statuses[0].retry_after_us == refused.statuses[0].reset_after_us > 0
    assert remaining(ask(limiter, DAY, verb="peek", seeds=(4,))) == [6]
    assert redis_client.keys("rqtest:*") == []


def test_units_by_hand_go_on_from_the_seed(limiter: Limiter) -> None:
    assert remaining(ask(limiter, MONTH, verb="refund", cost=2, seeds=(4,))) == [98]
    decision = ask(limiter, DAY, verb="charge", cost=2, seeds=(4,), settler=limiter)
    assert remaining(decision) == [4]
    assert remaining(decision.refund(2)) == [6]


def test_each_bucket_has_its_own_seed_and_cost(limiter: Limiter) -> None:
    requests = Bucket("user:1", Rate.parse("10 requests/day fixed_window"))
    first = ask(limiter, requests, DAY, MINUTE, cost=3, seeds=(2, 4, 0))
    assert remaining(first) == [7, 3, 7]
    assert first.cost == 3


def test_a_refusal_by_another_bucket_leaves_the_seed_to_the_next_call(limiter: Limiter) -> None:
    full = Bucket("user:2", Rate.parse("1/day fixed_window"))
    assert not ask(limiter, DAY, full, seeds=(4, 1)).allowed
    assert remaining(ask(limiter, DAY, seeds=(4,))) == [5]


def test_the_seed_counts_in_its_own_window_only(limiter: Limiter, clock: Clock) -> None:
    assert remaining(ask(limiter, DAY, seeds=(9,))) == [0]
    clock.now_us = NOON_US + 24 * 3600 * 10**6
    assert remaining(ask(limiter, DAY)) == [9]


def test_the_end_of_one_window_drops_the_seeds_of_no_other(
    redis_client: redis.Redis,
) -> None:
    """A process that first asked after midnight, by the store's clock, lost the month with the day."""
    times = iter([NOON_US, *[NOON_US + 24 * 3600 * 10**6] * 5])
    limiter = Limiter(client=redis_client, prefix="rqtest", timeout=5, clock=lambda: next(times))
    assert remaining(ask(limiter, DAY, MONTH, seeds=(3, 40))) == [9, 59]


def test_a_seed_counts_in_a_month_that_goes_on_until_another_day(limiter: Limiter, clock: Clock) -> None:
    """The store holds an older copy of it, by which it began later than the caller's month."""
    clock.now_us = NOON_US
    first, later = (replace(MONTH, anchor=anchor) for anchor in (1, moment(NOON_US).day + 1))
    ask(limiter, first, cost=20)
    assert remaining(ask(limiter, later, seeds=(40,))) == [59]


def test_a_seed_does_not_count_in_a_window_that_begins_when_the_caller_s_ends(limiter: Limiter, clock: Clock) -> None:
    clock.now_us = NOON_US + 24 * 3600 * 10**6
    ask(limiter, DAY)
    clock.now_us = NOON_US  # the clock went back
    assert remaining(ask(limiter, DAY, seeds=(7,))) == [8]
