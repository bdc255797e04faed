"""Refunds give back the units of their own charge, as far as these are still counted, and no others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.engine.keys import bucket_key
from django_ratequota.engine.rates import ALGORITHMS, BURST_ALGORITHMS
from tests.conftest import NOON_US, Clock

SECOND = 10**6
METERS = sorted(BURST_ALGORITHMS)


def bucket(rate: str, subject: str = "user:1", **more: Any) -> Bucket:
    return Bucket(subject, Rate.parse(rate), **more)


def left(limiter: Limiter, asked: Bucket) -> int:
    return limiter.peek([asked]).statuses[0].remaining


# --- Late. ---


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_refund_a_window_later_mints_no_room(limiter: Limiter, clock: Clock, algorithm: str) -> None:
    """Three were charged, three more admitted a window later, the first three refunded: three more were admitted."""
    asked = bucket(f"3/min {algorithm}")
    first = [limiter.check([asked]) for _ in range(3)]
    clock.advance(120)
    assert [limiter.check([asked]).allowed for _ in range(4)] == [True] * 3 + [False]
    for decision in first:
        decision.refund(1)
    assert not limiter.check([asked]).allowed


def test_a_log_s_refund_is_of_the_request_that_was_charged(
    redis_client: redis.Redis, limiter: Limiter, clock: Clock
) -> None:
    asked = bucket("20/min sliding_window_log")
    decisions = []
    for units in (1, 4, 2, 3):
        decisions.append(limiter.check([asked], units))
        clock.advance(10)
    decisions[1].refund(1)
    decisions[2].refund(2)
    entries = [int(item) for item in redis_client.lrange(bucket_key("rqtest", asked), 0, -1)]
    assert entries == [NOON_US, 1, NOON_US + 10 * SECOND, 4, NOON_US + 30 * SECOND, 7]
    decisions[3].refund(3)
    assert limiter.peek([asked]).statuses[0].reset_after == 30
    clock.advance(30)  # the first two have expired
    assert decisions[0].refund(1).statuses[0].remaining == 20
    assert redis_client.keys("rqtest:*") == []


# --- Overlapping. ---


def fill(limiter: Limiter, asked: Bucket) -> int:
    """Reserve all whole units that are free; returns how many."""
    free = left(limiter, asked)
    return free if limiter.check([asked], free).allowed else 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_overlapping_refunds_return_their_share_of_what_has_not_drained(
    either: Limiter, clock: Clock, algorithm: str
) -> None:
    """15 of 10 units were counted at once: the second refund returned units that had drained unnoticed."""
    asked = bucket(f"10/min {algorithm}")
    first, second = either.check([asked], 5), either.check([asked], 5)
    first.refund(5)
    clock.advance(30)
    counted = fill(either, asked)
    second.refund(5)
    assert counted + fill(either, asked) == (12 if algorithm in METERS else 10)


@pytest.mark.parametrize("meter", METERS)
def test_overlapping_refunds_never_admit_more_than_another_bucket_at_once(
    either: Limiter, clock: Clock, meter: str
) -> None:
    """Reservations were worth their units up to a minute, and renewed after it: five minutes of them were one burst.

    Each is made on top of another, which is refunded at once, so it seems to drain last.
    """
    asked = bucket(f"10/min {meter}")
    held: list[tuple[int, Decision]] = []

    def reserve() -> None:
        if room := left(either, asked):
            below = either.check([asked], room - 1)
            held.append((clock.now_us, either.check([asked])))
            below.refund(10)

    for _ in range(50):
        while held and clock.now_us - held[0][0] >= 50 * SECOND:
            held.pop(0)[1].refund(1)
            reserve()
        reserve()
        clock.advance(6)
    burst = fill(either, asked)
    for _, decision in held:
        decision.refund(1)
        burst += fill(either, asked)
    assert burst <= 20


@pytest.mark.parametrize("meter", METERS)
def test_units_used_pay_first_for_what_has_drained(either: Limiter, clock: Clock, meter: str) -> None:
    """Two of five units have drained, and two were used: the other three come back."""
    asked = bucket(f"10/min {meter}")
    either.check([asked], 5)
    decision = either.check([asked], 5)
    clock.advance(24)
    assert left(either, asked) == 4
    decision.settle(2)
    assert left(either, asked) == 7


# --- Its own units only. ---


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("awaited", [False, True])
def test_a_decision_gives_back_what_it_charged_and_no_more(limiter: Limiter, algorithm: str, awaited: bool) -> None:
    asked = [bucket(f"1000/hour {algorithm}"), bucket(f"2000/hour {algorithm}", "everyone")]
    limiter.check(asked, 100)
    decision = limiter.check(asked, 2)

    def settle(verb: str, cost: int) -> list[int]:
        settled = asyncio.run(getattr(decision, f"a{verb}")(cost)) if awaited else getattr(decision, verb)(cost)
        return [status.remaining for status in settled.statuses]

    assert settle("charge", 350) == [548, 1548]
    assert settle("refund", 350) == [898, 1898]
    assert settle("charge", 50) == [848, 1848]
    assert settle("refund", 1000) == [900, 1900]
    assert (decision.refund(1), decision.refund(0)) == (decision, decision)
    assert [left(limiter, one) for one in asked] == [900, 1900]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_refund_in_parts_is_no_more_than_in_one(limiter: Limiter, clock: Clock, algorithm: str) -> None:
    """What is left of a charge drains as if the rest had never been charged."""
    asked = bucket(f"60/min {algorithm}")
    decision = limiter.check([asked], 10)
    decision.refund(5)
    clock.advance(5)
    limiter.check([asked], 20)
    decision.refund(5)
    assert left(limiter, asked) == 40


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_log_mode_without_room_is_neither_charged_nor_refunded(limiter: Limiter, algorithm: str) -> None:
    """A charge of 5 and a refund of 5 left 5 on a full bucket in log mode."""
    logged = bucket(f"3/hour {algorithm}", scope="a", mode="log")
    enforced = bucket(f"50/hour {algorithm}", scope="b")
    limiter.check([logged], 3)
    decision = limiter.check([logged, enforced])
    assert [status.allowed for status in decision.statuses] == [False, True]
    assert [status.bucket for status in decision.charge(5).statuses] == [enforced]
    limiter.refund([logged], 1)
    assert [left(limiter, one) for one in (logged, enforced)] == [1, 44]
    assert [status.bucket for status in decision.refund(6).statuses] == [enforced]
    assert [left(limiter, one) for one in (logged, enforced)] == [1, 50]


# --- After an edit. ---


@pytest.mark.parametrize("meter", METERS)
def test_a_refund_takes_no_more_than_an_edit_left_of_its_charge(either: Limiter, meter: str) -> None:
    """10,000 units count as one bucket of the lowered limit; the refund took those charged since as well."""
    before = either.check([bucket(f"10000/hour {meter}")], 10_000)
    lowered = bucket(f"10/hour {meter}")
    either.charge([lowered], 5)
    before.refund(10_000)
    assert left(either, lowered) == 5


# --- Slots. ---

QUEUE = bucket("10/s burst 1 leaky_bucket")


def book(limiter: Limiter, queue: Bucket = QUEUE, cost: int = 1) -> Decision:
    decision = limiter.acquire(queue, timeout=20, cost=cost)
    assert decision.allowed
    return decision


def test_a_slot_behind_which_others_wait_is_not_given_back(either: Limiter, clock: Clock) -> None:
    """The next one to book got the slot of the last."""
    turns = [book(either) for _ in range(3)]
    turns[0].refund(1)
    turns[1].refund(1)
    either.refund([QUEUE], 1)  # no slot: the bucket's other counter
    assert book(either).retry_after == 0.3
    clock.advance(0.25)
    assert book(either).retry_after == 0.15


def test_a_slot_of_many_units_is_given_back_in_parts(either: Limiter) -> None:
    queue = bucket("7/s burst 3 leaky_bucket")
    book(either, queue, 3)
    turn = book(either, queue, 3)
    turn.refund(1)
    turn.refund(1)
    interval_us = -(-SECOND // 7)
    assert book(either, queue).retry_after_us == 2 * interval_us
    turn.refund(1)
    assert book(either, queue).retry_after_us == 3 * interval_us


def test_a_slot_of_a_queue_that_was_reset_is_not_given_back(either: Limiter) -> None:
    turn = book(either)
    either.reset([QUEUE])
    assert turn.refund(1).remaining == 1
    assert [book(either).retry_after for _ in range(2)] == [0, 0.1]


# --- Nothing counted is nothing stored. ---


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "calendar"])
@pytest.mark.parametrize("by_clock", [True, False], ids=["simulated", "server"])
def test_a_count_of_zero_has_no_key(redis_client: redis.Redis, clock: Clock, algorithm: str, by_clock: bool) -> None:
    limiter = Limiter(client=redis_client, clock=clock if by_clock else None, prefix="rqtest", timeout=5)
    asked = [bucket("10/month" if algorithm == "calendar" else f"10/hour {algorithm}")]
    limiter.check(asked, 0)
    limiter.charge(asked, 0)
    limiter.refund(asked, 3)
    assert redis_client.keys("rqtest:*") == []
    limiter.check(asked, 2)
    assert redis_client.keys("rqtest:*") != []
    limiter.refund(asked, 2)
    assert redis_client.keys("rqtest:*") == []
    limiter.check(asked, 2).refund(2)
    assert redis_client.keys("rqtest:*") == []
    limiter.store.close()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_free_request_writes_nothing(
    redis_client: redis.Redis, limiter: Limiter, clock: Clock, algorithm: str
) -> None:
    asked = bucket(f"10/hour {algorithm}")
    limiter.check([asked], 4)
    key = bucket_key("rqtest", asked)
    before = redis_client.dump(key), redis_client.pexpiretime(key)
    clock.advance(60)
    assert limiter.check([asked], 0).allowed
    assert (redis_client.dump(key), redis_client.pexpiretime(key)) == before
