"""Attackers with write access to Redis: their effect on the revision and counters, and its limits."""

from __future__ import annotations

import io
import json
import random
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import redis
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_ratequota import Bucket, Decision, Limiter, Rate, check_request
from django_ratequota.engine.decision import Charged, LimitRequest
from django_ratequota.engine.keys import bucket_key, revision_key, statistics_key
from django_ratequota.engine.rates import ALGORITHMS
from django_ratequota.exceptions import NewerRevision, StoreError
from django_ratequota.headers import decision_headers
from django_ratequota.models import RatePolicy
from django_ratequota.monitoring import health
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.refusals import find_refusal
from django_ratequota.policies.cache import policies
from django_ratequota.runtime import default_limiter
from django_ratequota.utils.sansio import drive
from tests.admin.test_permissions import client_of
from tests.conftest import Check
from tests.enforcement.test_check import left, monitored
from tests.project.views import request_from
from tests.support.properties import thorough_after

Write = Callable[[redis.Redis, str], object]
REVISION = revision_key("rqtest")
DAY_US = 86_400 * 10**6
#: Commands that put something else than a string at a key.
TYPES: dict[str, Write] = {
    "a list": lambda client, key: client.rpush(key, "x"),
    "a hash": lambda client, key: client.hset(key, "a", "1"),
    "a set": lambda client, key: client.sadd(key, "1"),
    "a sorted set": lambda client, key: client.zadd(key, {"1": 1}),
    "a stream": lambda client, key: client.xadd(key, {"a": "1"}),
}
#: Texts that no publication stores.
TEXTS = ("9007199254740993", 2**53, 2**53 - 1, 2**63, "garbage", "", -5, "nan", "-inf", "inf", "1e300", "1e15.5")


def storing(value: object) -> Write:
    def write(client: redis.Redis, key: str) -> object:
        return client.set(key, value)  # type: ignore[arg-type]

    return write


def far_ahead(client: redis.Redis, key: str) -> None:
    client.set(key, time.time_ns() // 1000 + DAY_US + 10**9)


def half_ahead(client: redis.Redis, key: str) -> None:
    client.set(key, f"{time.time_ns() // 1000 + 10**9}.5")


def overwritten(write: Write) -> Write:
    def overwrite(client: redis.Redis, key: str) -> None:
        client.delete(key)
        write(client, key)

    return overwrite


POISONS = {
    **TYPES,
    **{repr(text): storing(text) for text in TEXTS},
    "two days ahead": far_ahead,
    "half a microsecond": half_ahead,
}
poisoned = pytest.mark.parametrize("poison", [pytest.param(overwritten(w), id=name) for name, w in POISONS.items()])


def is_a_revision(client: redis.Redis) -> bool:
    stored: Any = client.get(REVISION)
    return bool(stored.isdigit()) and int(stored) <= time.time_ns() // 1000 + DAY_US


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies")
class TestRevision:
    @poisoned
    def test_an_impossible_revision_in_redis(self, check: Check, redis_client: redis.Redis, poison: Write) -> None:
        """One SET of 9007199254740993 lifted every limit for good."""
        policy = RatePolicy.objects.create(rates="3/hour")
        assert left(check(request_from())) == [2]
        poison(redis_client, REVISION)
        found = [check(request_from()) for _ in range(4)]
        assert [(one.allowed, one.error) for one in found] == [(True, "")] * 2 + [(False, "")] * 2
        assert is_a_revision(redis_client)

        poison(redis_client, REVISION)
        policy.rates = "5/hour"
        policy.save()
        assert is_a_revision(redis_client)
        assert left(check(request_from())) == [1]

    @poisoned
    def test_the_first_publication_of_all_arrives_in_a_process_that_starts(
        self, check: Check, redis_client: redis.Redis, poison: Write
    ) -> None:
        poison(redis_client, REVISION)
        replaced = default_limiter().stored_revision()
        assert default_limiter().stored_revision() == replaced, "once"
        poison(redis_client, REVISION)
        assert check(request_from()).statuses == ()
        poison(redis_client, REVISION)
        RatePolicy.objects.create(rates="2/hour")
        assert left(check(request_from())) == [1]

    @pytest.mark.parametrize("name", ["'garbage'", "a list", "'9007199254740993'"])
    def test_writing_it_again_and_again_costs_one_look_per_request(
        self, check: Check, redis_client: redis.Redis, name: str
    ) -> None:
        RatePolicy.objects.create(rates="100/hour")
        check(request_from())
        reloads = policies.reloads
        with CaptureQueriesContext(connection) as queries, monitored() as commands:
            for _ in range(5):
                overwritten(POISONS[name])(redis_client, REVISION)
                assert check(request_from()).error == ""
        assert commands.count("EVALSHA") <= 10
        assert len(queries) <= 5, "one look for changes, which finds none"
        assert policies.reloads == reloads

    @pytest.mark.parametrize("stored", ["the true one", "the same", "nothing"])
    @pytest.mark.parametrize("ahead", [DAY_US + 10**9, 10 * 365 * DAY_US, 2**53, 2**60])
    def test_a_process_that_took_an_impossible_one_over_recovers(
        self, check: Check, redis_client: redis.Redis, ahead: int, stored: str
    ) -> None:
        """As after Redis' clock was set back; it stored a number beyond its own, and all others followed."""
        policy = RatePolicy.objects.create(rates="10/hour")
        check(request_from())
        published = default_limiter().stored_revision()
        assert policies._snapshot is not None
        policies._snapshot = policies._snapshot.copied(revision=published + ahead)
        policies._wanted = published + ahead
        if stored != "the true one":
            redis_client.delete(REVISION)
        if stored == "the same":
            redis_client.set(REVISION, published + ahead)
        decision = check(request_from())
        assert (decision.error, left(decision)) == ("", [8])
        assert stored != "the true one" or decision.revision == published
        policy.rates = "20/hour"
        policy.save()
        with monitored() as commands:
            decisions = [check(request_from()) for _ in range(2)]
        assert [left(decision) for decision in decisions] == [[17], [16]]
        assert published < decisions[0].revision == decisions[1].revision < published + DAY_US
        assert commands.count("EVALSHA") == 3, "one of them was told of the edit"


def test_processes_do_not_push_each_other_ahead(redis_client: redis.Redis, limiter: Limiter) -> None:
    published, ahead = limiter.publish(), time.time_ns() // 1000 + 2 * DAY_US
    for _ in range(3):
        with pytest.raises(NewerRevision) as caught:
            drive(limiter.ask(LimitRequest(mode="check", buckets=(), revision=ahead)), limiter.store.execute)
        assert (caught.value.revision, caught.value.instead_of) == (published, ahead)
        request = LimitRequest(mode="check", buckets=(), revision=published)
        assert drive(limiter.ask(request), limiter.store.execute).allowed
    assert redis_client.get(REVISION) == str(published).encode()


# --- Counters. ---

NUMBERS = (float("nan"), float("inf"), float("-inf"), 1e300, -1e300, -1.0, 0.0, 0.5, 1e15, 1e16)


def hostile_values(rng: random.Random) -> list[bytes]:
    """Strings of every size that an algorithm reads, and of others."""
    values = [b"", b"x", *(b"x" * size for size in (16, 20, 24, 32, 56, 57))]
    values += [rng.randbytes(size) for size in (16, 20, 24, 32, 56) for _ in range(20)]
    for size in (2, 3, 4, 7):
        values += [struct.pack(f">{size}d", *[number] * size) for number in NUMBERS]
        values += [struct.pack(f">{size}d", *rng.choices(NUMBERS, k=size)) for _ in range(20)]
    values += [struct.pack(">ddI", *rng.choices(NUMBERS, k=2), rng.choice([0, 1, 2**32 - 1])) for _ in range(40)]
    return values


def hostile_lists(rng: random.Random, now_us: int) -> list[list[object]]:
    items: tuple[object, ...] = ("x", "", "nan", "inf", "-inf", "1e300", -1, 0, "0x10", now_us, now_us - 10**6, 5)
    return [[item] * size for item in items for size in (1, 2, 3)] + [
        rng.choices(items, k=rng.randint(1, 9)) for _ in range(200)
    ]


def hostile_writes(algorithm: str, now_us: int) -> list[Write]:
    """Values of the type that the algorithm stores, and one of each other type: what is in those is never read."""
    rng = random.Random(13)

    def pushing(items: list[object]) -> Write:
        return lambda client, key: client.rpush(key, *items)  # type: ignore[arg-type]

    if algorithm == "sliding_window_log":
        return [*TYPES.values(), storing("x"), *(pushing(items) for items in hostile_lists(rng, now_us))]
    return [*TYPES.values(), *(storing(value) for value in hostile_values(rng))]


class TestCounters:
    """A counter that cannot be read failed the script: ``on_error`` decided, and let everything through."""

    @pytest.mark.parametrize("real_time", thorough_after(1, [False, True]))
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_garbage_in_a_counter(
        self, redis_client: redis.Redis, limiter: Limiter, clock: Any, algorithm: str, real_time: bool
    ) -> None:
        if real_time:
            limiter = Limiter(client=redis_client, prefix="rqtest", timeout=5)
        victim = Bucket("user:1", Rate.parse(f"10/hour {algorithm}"))
        other = Bucket("user:1", Rate.parse("1/day token_bucket"), scope="other")
        key = bucket_key("rqtest", victim)
        assert limiter.check([other]).allowed
        for write in hostile_writes(algorithm, clock.now_us):
            for verb in ("check", "charge", "refund", "peek"):
                overwritten(write)(redis_client, key)
                is_sane(getattr(limiter, verb)([victim]))
                is_sane(getattr(limiter, verb)([victim], cost=3))
                if verb in ("check", "peek"):
                    decision = getattr(limiter, verb)([victim, other])
                    is_sane(decision)
                    assert not decision.allowed
            charged = Charged(limiter.now_us - 10, (10**6,), 2)
            limiter.decide(LimitRequest(mode="refund", buckets=(victim,), cost=2, charged=charged))
        limiter.reset([victim])
        assert [limiter.check([victim], cost=10).allowed for _ in range(2)] == [True, False]
        limiter.store.close()

    @pytest.mark.parametrize(
        ("algorithm", "name"),
        [(a, n) for a in ALGORITHMS for n in TYPES if (a, n) != ("sliding_window_log", "a list")],
    )
    def test_a_key_of_another_type_is_an_empty_counter(
        self, redis_client: redis.Redis, limiter: Limiter, algorithm: str, name: str
    ) -> None:
        bucket = Bucket("user:1", Rate.parse(f"3/hour {algorithm}"))
        overwritten(TYPES[name])(redis_client, bucket_key("rqtest", bucket))
        assert [limiter.check([bucket]).allowed for _ in range(4)] == [True] * 3 + [False]

    def test_a_queue_goes_on(self, redis_client: redis.Redis, limiter: Limiter, clock: Any) -> None:
        queue = Bucket("everyone", Rate.parse("10/s leaky_bucket"), scope="calls")
        for write in hostile_writes("leaky_bucket", clock.now_us):
            overwritten(write)(redis_client, bucket_key("rqtest", replace(queue, queued=True)))
            is_sane(limiter.acquire(queue, timeout=5))


def is_sane(decision: Decision) -> None:
    for status in decision.statuses:
        assert 0 <= status.remaining < 2**53
        assert 0 <= status.reset_after_us < 2**53
        assert status.retry_after_us is None or 0 <= status.retry_after_us < 2**53
        assert status.next_after_us is None or 0 <= status.next_after_us < 2**53
    assert decision_headers(decision)


# --- What operators see. ---


def everywhere(write: Write) -> Callable[[redis.Redis], None]:
    """Write to every key of statistics and reports that exists."""

    def run(client: redis.Redis) -> None:
        for key in [*client.scan_iter("rqtest:{statistics}:*"), *client.scan_iter("rqtest:{workers}*")]:
            write(client, key.decode())

    return run


def another_value(client: redis.Redis, key: str) -> None:
    """One that the key's type may hold, and nobody reads."""
    kind = client.type(key)
    junk = random.Random(key).randbytes(12) + b":t:0"
    if kind == b"hash":
        for field in client.hkeys(key):
            client.hset(key, field, "junk")
        client.hset(key, junk, junk)
    elif kind == b"zset":
        client.zadd(key, {junk: float("inf"), "worker:1": time.time()})
    elif kind == b"list":
        client.rpush(key, junk)
    else:
        client.set(key, "[1]")


def a_huge_count(client: redis.Redis, key: str) -> None:
    for field in client.hkeys(key) if client.type(key) == b"hash" else ():
        if field.endswith(b":t:0"):
            client.hset(key, field, str(10**400))


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies")
@pytest.mark.parametrize("write", [another_value, a_huge_count, *(overwritten(one) for one in TYPES.values())])
def test_forged_statistics(redis_client: redis.Redis, settings: Any, write: Write) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 60}
    RatePolicy.objects.create(rates="1/hour")
    for _ in range(2):
        check_request(request_from())
    collector.flush()
    health.report()
    everywhere(write)(redis_client)
    client = client_of("superuser")
    for page in ("", "traffic/", "traffic/?span=day", "health/", "explain/?ip=203.0.113.7"):
        assert client.get(f"/admin/django_ratequota/ratepolicy/{page}").status_code == 200, page
    assert client.get("/admin/").status_code == 200
    for verb in ("status", "explain --ip 203.0.113.7"):
        with suppress(CommandError):  # which says so
            call_command("ratequota", *verb.split(), stdout=io.StringIO())


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies", "recording")
@pytest.mark.parametrize("value", ["[{}]", '"\\ud800"', "NaN", str(10**400)])
def test_statistics_of_another_type(redis_client: redis.Redis, value: str) -> None:
    """Pages failed with a 500 where a name was a number, or a text that cannot be sent."""
    RatePolicy.objects.create(rates="1/hour")
    refused = [check_request(request_from(), again=True) for _ in range(2)][-1].refusal_id
    collector.flush()
    health.report()
    kept = statistics_key("rqtest", "refusals")
    refusal = json.loads(str(redis_client.hget(kept, refused), "utf-8"))
    for name in refusal:
        redis_client.hset(kept, refused, json.dumps({**refusal, name: "?"}).replace('"?"', value))
        with pytest.raises(StoreError):
            find_refusal(refused)
    [bucket] = refusal["buckets"]
    for name in bucket:
        redis_client.hset(
            kept, refused, json.dumps({**refusal, "buckets": [{**bucket, name: "?"}]}).replace('"?"', value)
        )
        with pytest.raises(StoreError):
            find_refusal(refused)
    [report] = redis_client.scan_iter("rqtest:{workers}:*")
    fields = json.loads(redis_client.get(report))
    for name in fields:
        redis_client.set(report, json.dumps({**fields, name: "?"}).replace('"?"', value))
        assert health.reports() == [], name
