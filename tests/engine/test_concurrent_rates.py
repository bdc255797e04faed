"""Rates such as ``8 concurrent``: each step of a random walk equals an exact model, in Redis and in this process."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.engine.decision import LimitRequest
from django_ratequota.engine.keys import bucket_key
from django_ratequota.engine.rates import normalize_rates, parse_rates
from django_ratequota.engine.slots import Lease, ids, unreleased
from django_ratequota.exceptions import InvalidRate
from tests.conftest import NOON_US, Clock
from tests.support import server
from tests.support.projects import run_python
from tests.support.properties import examples

SECOND = 10**6
LEASE_US = 60 * SECOND
_subjects = itertools.count(1)


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    """Leave nothing to the thread of another test."""
    yield
    unreleased.clear()


# --- Rate text. ---


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("20 concurrent", "20 concurrent"),
        (" 1_000  Concurrent requests , 5/s", "1000 concurrent, 5/s"),
        ("3concurrent", "3 concurrent"),
    ],
)
def test_a_concurrent_rate_is_read_and_normalized(text: str, canonical: str) -> None:
    assert normalize_rates(text) == canonical
    # A policy's default algorithm is for its other rates.
    assert str(parse_rates(text, "fixed_window")[0]) == canonical.split(",")[0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("1001 concurrent", "at most 1000 requests may be concurrent, not 1001"),
        ("0 concurrent", "limit must be a whole number from 1"),
        ("5 concurrent/min", "expected the end at character 13, not '/min' \\(example: 5 concurrent\\)"),
        ("5 concurrent burst 9", "expected the end at character 14, not 'burst 9'"),
        ("5 concurrent, 6 concurrent", "keep only the stricter one"),
    ],
)
def test_an_error_says_what_is_wrong_with_a_concurrent_rate(text: str, error: str) -> None:
    with pytest.raises(InvalidRate, match=error):
        parse_rates(text)


# --- An exact model. ---


@dataclass
class Model:
    """The slots of one counter: since when each is held, and until when. A slot that nobody asks about is kept."""

    limit: int
    stored: dict[int, tuple[int, int]] = field(default_factory=dict)

    def held(self, now: int) -> dict[int, tuple[int, int]]:
        return {name: slot for name, slot in self.stored.items() if now < slot[1] <= now + LEASE_US + 60 * SECOND}

    def drop(self, now: int) -> None:
        self.stored = self.held(now)

    def admits(self, slot_id: int, now: int) -> bool:
        return slot_id in self.held(now) or len(self.held(now)) < self.limit

    def take(self, slot_id: int, now: int) -> None:
        self.stored[slot_id] = self.stored.get(slot_id, (now, 0))[0], now + LEASE_US

    def renew(self, slot_ids: list[int], now: int) -> int:
        known = [one for one in slot_ids if one in self.stored]
        for one in known:
            self.take(one, now)
        for one in slot_ids:
            if one not in known and len(self.stored) < self.limit:
                self.take(one, now)
                known.append(one)
        return len(known)


IDS = st.integers(1, 5)
PLACES = st.sets(st.integers(0, 2), min_size=1)  # two concurrent counters, and 4/min
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [0, 0, 0, 0, 0, 0, 0, 1, 10 * SECOND, 30 * SECOND, LEASE_US - 1, LEASE_US, -40 * SECOND, -3000 * SECOND]
        ),
        st.one_of(
            st.tuples(st.just("check"), IDS, PLACES),
            st.tuples(st.just("check"), IDS, PLACES),
            st.tuples(st.just("peek"), st.none(), PLACES),
            st.tuples(st.just("release"), IDS, st.integers(0, 1)),
            st.tuples(st.just("renew"), st.lists(IDS, min_size=1, max_size=4, unique=True), st.integers(0, 1)),
            st.tuples(st.just("edit"), st.integers(1, 5), st.integers(0, 1)),
        ),
    ),
    min_size=30,
    max_size=60,
)


@settings(examples(300), phases=[Phase.generate])  # shrinking takes minutes
@given(steps=STEPS, limits=st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_each_step_equals_the_exact_model(
    redis_client: redis.Redis, clock: Clock, either: Limiter, steps: list[Any], limits: tuple[int, int]
) -> None:
    subject = f"user:{next(_subjects)}"
    models = [Model(limit) for limit in limits]
    buckets = [Bucket(subject, Rate.parse(f"{limit} concurrent"), scope=f"s{at}") for at, limit in enumerate(limits)]
    buckets.append(Bucket(subject, Rate.parse("4/min sliding_window_log"), scope="s0"))
    log: list[int] = []
    for pause, (verb, argument, where) in steps:
        clock.advance(us=pause)
        if pause < 0:  # the log would go on by the time before
            either.reset(buckets[2:])
            log.clear()
        now = clock.now_us
        log = [at for at in log if at > now - 60 * SECOND]
        if verb == "edit":
            models[where].limit = argument
            buckets[where] = replace(buckets[where], rate=Rate.parse(f"{argument} concurrent"))
        elif verb == "renew":
            models[where].drop(now)
            renewed = either.renew_slots([Lease(buckets[where], one, LEASE_US) for one in argument])
            assert renewed == models[where].renew(argument, now)
        elif verb == "release":
            models[where].drop(now)
            released = either.release_slots([Lease(buckets[where], argument, LEASE_US)])
            assert released == (models[where].stored.pop(argument, None) is not None)
        else:
            places = sorted(where)
            slot = (argument, LEASE_US) if argument else None
            asked = tuple(buckets[at] for at in places)
            decision = either.decide(LimitRequest(mode=verb, buckets=asked, slot=slot, settler=either))
            room = {at: model.admits(argument, now) for at, model in enumerate(models)} | {2: len(log) < 4}
            assert decision.allowed == all(room[at] for at in places)
            for at in places if verb == "check" else ():
                if at < 2:
                    models[at].drop(now)
            if decision.allowed and verb == "check":
                for at in places:
                    if at == 2:
                        log.append(now)
                    else:
                        models[at].take(argument, now)
            for at, status in zip(places, decision.statuses, strict=True):
                assert status.allowed == room[at]
                if at == 2:
                    assert status.remaining == 4 - len(log)
                    continue
                used = len(models[at].held(now))
                assert (status.remaining, status.debt) == (
                    max(0, models[at].limit - used),
                    max(0, used - models[at].limit),
                )
                assert status.retry_after_us == (0 if room[at] else SECOND)
                assert status.reset_after_us == (SECOND if used else 0)
        for bucket, model in zip(buckets, models, strict=False):
            held = {one.id: (one.since_us, one.ends_us) for one in either.slots(bucket)}
            assert held == model.held(now)
    either.reset(buckets)


# --- What the model does not say. ---


@pytest.mark.parametrize(
    ("drawn", "first", "second"),
    [
        (lambda below: 0, 2**32, 2**32 + 1),
        (lambda below: below - 1, 2**53 - 1, 2**53 - 2**32),  # the count starts over, below the next worker's
    ],
)
def test_ids_of_slots_name_their_worker(
    monkeypatch: pytest.MonkeyPatch, either: Limiter, drawn: Any, first: int, second: int
) -> None:
    bucket = Bucket("user:1", Rate.parse("2 concurrent"))
    with monkeypatch.context() as patch:
        patch.setattr(secrets, "randbelow", drawn)
        ids.clear()
    with either.check([bucket]), either.check([bucket]):
        assert {slot.id for slot in either.slots(bucket)} == {first, second}
        assert {slot.worker for slot in either.slots(bucket)} == {ids.number}
    ids.clear()


def test_a_decision_holds_its_slot_for_the_with_block(either: Limiter) -> None:
    bucket = Bucket("user:1", Rate.parse("1 concurrent"))
    with either.check([bucket]) as first:
        assert first.allowed
        with either.check([bucket]) as second:
            assert not second.allowed
            assert second.retry_after == 1.0
        assert not either.peek([bucket]).allowed
    assert either.check([bucket]).allowed


def test_an_awaited_decision_holds_its_slot_for_the_async_with_block(either: Limiter) -> None:
    bucket = Bucket("user:1", Rate.parse("1 concurrent"))

    async def ask() -> list[bool]:
        async with await either.acheck([bucket]) as first:
            refused = await either.acheck([bucket])
        return [first.allowed, refused.allowed, (await either.acheck([bucket])).allowed]

    assert async_to_sync(ask)() == [True, False, True]


def test_charges_and_refunds_leave_the_slot_alone(either: Limiter) -> None:
    buckets = [Bucket("user:1", Rate.parse("2 concurrent")), Bucket("user:1", Rate.parse("10/min"))]
    decision = either.check(buckets, cost=0)  # which takes a slot all the same
    decision.charge(3)
    decision.settle(1)
    decision.refund(1)
    either.refund(buckets)
    assert [status.remaining for status in either.peek(buckets).statuses] == [1, 10]


def test_the_deny_cache_never_repeats_a_refusal_for_want_of_a_slot(redis_client: redis.Redis) -> None:
    limiter = Limiter(client=redis_client, prefix="rqtest", timeout=5, deny_cache_seconds=60)
    slot, rate = Bucket("user:1", Rate.parse("1 concurrent")), Bucket("user:1", Rate.parse("1/min"))
    with limiter.check([slot]):
        assert not limiter.check([slot, rate]).allowed
    with limiter.check([slot, rate]) as decision:
        assert decision.allowed
        assert not limiter.check([rate]).allowed
    # A refusal by another rate is repeated all the same, although a slot was released.
    redis_client.delete(bucket_key("rqtest", rate))
    assert not limiter.check([rate]).allowed
    limiter.store.close()


def test_junk_under_the_key_counts_as_no_slot(redis_client: redis.Redis, limiter: Limiter) -> None:
    bucket = Bucket("user:1", Rate.parse("1 concurrent"))
    for junk in (b"x", b"\xff" * 32, b"\x42" * 24 * 8, b"\x7f\xf0" + b"\0" * 6, b"\0" * 32_032):
        redis_client.set(bucket_key("rqtest", bucket), junk)
        assert limiter.slots(bucket) == []
        assert limiter.check([bucket]).allowed
    redis_client.delete(bucket_key("rqtest", bucket))
    redis_client.lpush(bucket_key("rqtest", bucket), "x")
    assert limiter.check([bucket]).allowed


def test_a_lease_of_a_wrong_clock_ends_by_the_right_one(either: Limiter, clock: Clock) -> None:
    bucket = Bucket("user:1", Rate.parse("1 concurrent"))
    clock.now_us = NOON_US + 10**13
    held = either.check([bucket])
    clock.now_us = NOON_US
    with either.check([bucket]) as decision:
        assert decision.allowed
    clock.now_us = NOON_US + 10**13
    assert either.slots(bucket) == [], "it does not come back"
    assert held.allowed


def test_a_worker_with_a_shorter_lease_leaves_those_of_others_alone(either: Limiter, clock: Clock) -> None:
    """While a deploy changed CONCURRENCY_TTL, a second request was admitted beside one that ran."""
    bucket = Bucket("user:1", Rate.parse("1 concurrent"))

    def ask(*slot: int) -> bool:
        return either.decide(LimitRequest(mode="check", buckets=(bucket,), slot=slot, settler=either)).allowed  # type: ignore[arg-type]

    assert ask(1, 600 * SECOND)
    for _ in range(3):
        assert not ask(2, SECOND)
        assert either.renew_slots([Lease(bucket, 2, SECOND)]) == 0
        clock.advance(30)


def test_keys_outlive_their_leases_by_a_second_at_most(redis_client: redis.Redis, limiter: Limiter) -> None:
    bucket = Bucket("user:1", Rate.parse("3 concurrent"))
    decision = limiter.check([bucket])
    key = bucket_key("rqtest", bucket)
    assert key == "rqtest:{user:1}:0:co"
    assert 60_000 < redis_client.pttl(key) <= 61_000
    assert redis_client.strlen(key) == 32
    with limiter.check([bucket]):
        decision.slots.release()  # type: ignore[union-attr]
        assert 60_000 < redis_client.pttl(key) <= 61_000
    assert not redis_client.exists(key)
    assert limiter.renew_slots([Lease(bucket, 7, 120 * SECOND)]) == 1
    assert 120_000 < redis_client.pttl(key) <= 121_000


@pytest.mark.parametrize("step", [1, 59, 61, 119, 3000, 86_400])
def test_the_slots_of_a_killed_worker_are_free_soon_after_the_clock_was_set_back(
    clock: Clock, either: Limiter, step: int
) -> None:
    """They kept others out for 3,060 s after a step of 50 minutes."""
    bucket, found = Bucket("user:1", Rate.parse("1 concurrent")), list[int]()
    either.renew_slots([Lease(bucket, 7, LEASE_US)])
    clock.advance(-step)
    for second in range(0, 200 + step, 10):
        with either.check([bucket]) as decision:
            found += [second] * decision.allowed
        clock.advance(10)
    assert found[0] <= 120
    assert found == list(range(found[0], 200 + step, 10)), "once it is free it stays free"


def test_a_slot_that_lapsed_is_taken_again_only_where_there_is_room(clock: Clock, either: Limiter) -> None:
    bucket = Bucket("user:1", Rate.parse("2 concurrent"))
    leases = [Lease(bucket, number, LEASE_US) for number in (1, 2, 3)]
    assert either.renew_slots(leases[:2]) == 2
    clock.advance(60)  # as for a worker that was suspended
    with either.check([bucket]):
        assert either.renew_slots(leases) == 1
    assert either.renew_slots(leases) == 2
    assert either.release_slots([*leases, *leases]) == 2
    assert either.release_slots(leases) == 0


def test_many_slots_of_many_counters_are_renewed_by_one_command(redis_client: redis.Redis, limiter: Limiter) -> None:
    leases = [
        Lease(Bucket(f"user:{user}", Rate.parse("9 concurrent")), user * 9 + number + 1, LEASE_US)
        for user in range(100)
        for number in range(5)
    ]
    assert limiter.renew_slots(leases) == 500  # which loads the script
    before = redis_client.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert limiter.renew_slots(leases) == 500
    assert redis_client.info("commandstats")["cmdstat_evalsha"]["calls"] == before + 1
    assert limiter.release_slots(leases) == 500
    assert redis_client.keys("rqtest:*") == []


FORKED = """
import os, sys, redis
from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.engine.slots import ids
with redis.Redis.from_url(sys.argv[1]) as client:
    limiter = Limiter(client=client, prefix="rqtest", timeout=5)
bucket = Bucket("user:1", Rate.parse("1 concurrent"))
decision = limiter.check([bucket])
number = ids.number
child = os.fork()
if child == 0:
    decision.slots.release()
    os._exit(ids.number == number)
print(os.waitpid(child, 0)[1])
print(len(limiter.slots(bucket)))
decision.slots.release()
print(len(limiter.slots(bucket)))
limiter.store.close()
"""


def test_a_forked_child_releases_no_slot_of_its_parent(redis_client: redis.Redis) -> None:
    """And its own slots are those of another worker."""
    assert run_python(FORKED, server.url()) == ["0", "1", "0"]
