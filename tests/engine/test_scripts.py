"""The scripts: invalid arguments, errors, and the protocol of revisions."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import redis

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.engine.decision import LimitRequest, Mode
from django_ratequota.engine.keys import bucket_key, revision_key
from django_ratequota.engine.rates import ALGORITHMS
from django_ratequota.engine.scripts import DECIDE
from django_ratequota.exceptions import NewerRevision, StoreError
from django_ratequota.store.commands import Script, ScriptCall
from django_ratequota.utils.sansio import drive
from tests.conftest import NOON_US, Clock

MINUTE = Bucket("user:1", Rate.parse("10/min"))
LOG = Bucket("user:1", Rate.parse("10/min sliding_window_log"))
REVISION = revision_key("rqtest")
#: The keys of a publication.
PUBLISHED = {REVISION.encode()}
#: mode, clock, revision, patience; then algorithm, limit, period, burst, enforced, start, finish, cost, past.
HEADER: tuple[object, ...] = ("check", NOON_US, -1, 0)
MINUTE_ARGS: tuple[object, ...] = ("token_bucket", 10, 60_000_000, 10, 1, 0, 0, 1, 0)
GOOD = HEADER + MINUTE_ARGS


def run(limiter: Limiter, script: Script, keys: Sequence[str], args: Sequence[object]) -> Any:
    return limiter.store.execute(ScriptCall(script, keys, args))


def judge(limiter: Limiter, *buckets: Bucket, revision: int, verb: Mode = "check") -> Decision:
    request = LimitRequest(mode=verb, buckets=tuple(buckets), revision=revision)
    return drive(limiter.ask(request), limiter.store.execute)


def broken_script() -> Script:
    """The script with an error in ``sliding_window_log``."""
    source = DECIDE.source.replace("redis.pcall('LLEN', key)", "redis.call('LLEN')")
    return replace(DECIDE, source=source, sha=hashlib.sha1(source.encode()).hexdigest())


# --- Arguments. ---


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, "chek", "unknown mode chek"),
        (0, "", "unknown mode "),
        (1, -1, r"ARGV\[2\] must be a whole number from 0"),
        (1, "nan", r"ARGV\[2\] must be a whole number from 0"),
        (1, "inf", r"ARGV\[2\] must be a whole number from 0"),
        (1, 2**53, r"ARGV\[2\] must be a whole number from 0"),
        (1, "1.5", r"ARGV\[2\] must be a whole number from 0"),
        (1, "soon", r"ARGV\[2\] must be a whole number from 0 to 2\^53, not soon"),
        (2, -2, r"ARGV\[3\] must be a whole number from -1"),
        (3, "-inf", r"ARGV\[4\] must be a whole number from 0"),
        (4, "leaky", "unknown algorithm leaky"),
        (5, 0, r"ARGV\[15\] must be a whole number from 1"),
        (6, 0, r"ARGV\[16\] must be a whole number from 1"),
        (7, "0.5", r"ARGV\[17\] must be a whole number from 1"),
        (8, "yes", r"ARGV\[18\] must be a whole number from 0"),
        (9, "nan", r"ARGV\[19\] must be a whole number from 0"),
        (10, -1, r"ARGV\[20\] must be a whole number from 0"),
        (11, "", r"ARGV\[21\] must be a whole number from 0"),
        (12, -1, r"ARGV\[22\] must be a whole number from 0"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_is_written(
    redis_client: redis.Redis, limiter: Limiter, position: int, value: object, message: str
) -> None:
    """A Lua error does not roll back earlier writes; the invalid bucket is the last one here."""
    args = [*GOOD, *MINUTE_ARGS]
    args[position + (len(MINUTE_ARGS) if position >= len(HEADER) else 0)] = value
    with pytest.raises(StoreError, match=message) as caught:
        run(limiter, DECIDE, ["rqtest:1", "rqtest:2"], args)
    assert caught.value.reason == "response"
    assert redis_client.keys("rqtest:*") == []


@pytest.mark.parametrize("args", [(), HEADER, GOOD[:-1], (*GOOD, 1), GOOD + MINUTE_ARGS], ids=len)
def test_a_wrong_number_of_arguments_is_refused(
    redis_client: redis.Redis, limiter: Limiter, args: tuple[object, ...]
) -> None:
    with pytest.raises(StoreError, match="ratequota: "):
        run(limiter, DECIDE, ["rqtest:1"], args)
    assert redis_client.keys("rqtest:*") == []


# --- TTLs. ---


@pytest.mark.parametrize(("algorithm", "periods"), [("fixed_window", 1), ("sliding_window_counter", 2)])
def test_a_window_keeps_the_expiry_that_its_first_request_gave_it(
    redis_client: redis.Redis, algorithm: str, periods: int
) -> None:
    limiter = Limiter(client=redis_client, prefix="rqtest")
    asked = Bucket("user:1", Rate.parse(f"10/365days {algorithm}"))
    year_us = asked.rate.period_us
    seen = set()
    for verb in (limiter.check, limiter.charge, limiter.refund, limiter.check):
        finish_us = (verb([asked]).at_us // year_us + periods) * year_us
        seen.add(redis_client.pexpiretime(bucket_key("rqtest", asked)))
    assert limiter.peek([asked]).statuses[0].remaining == 8
    [expires_ms] = seen
    assert abs(expires_ms - finish_us // 1000 - 1000) < 500


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if "window" not in name] + ["sliding_window_log"])
def test_the_ttl_follows_the_time_until_the_bucket_is_full(redis_client: redis.Redis, algorithm: str) -> None:
    limiter = Limiter(client=redis_client, prefix="rqtest")
    asked = Bucket("user:1", Rate.parse(f"10/hour {algorithm}"))
    expiries = []
    for _ in range(3):
        decision = limiter.check([asked])
        full_us = decision.at_us + decision.statuses[0].reset_after_us
        expiries.append(redis_client.pexpiretime(bucket_key("rqtest", asked)) - full_us // 1000 - 1000)
    assert max(map(abs, expiries)) < 500


# --- Errors. ---


def test_an_error_in_an_algorithm_writes_nothing(redis_client: redis.Redis, limiter: Limiter) -> None:
    log = ("sliding_window_log", *MINUTE_ARGS[1:])
    with pytest.raises(StoreError) as caught:
        run(limiter, broken_script(), ["rqtest:1", "rqtest:2"], (*GOOD, *log))
    assert caught.value.reason == "response"
    assert redis_client.keys("rqtest:*") == []


# --- Flushed scripts. ---


def test_loading_takes_one_more_command_once(redis_client: redis.Redis, limiter: Limiter) -> None:
    redis_client.script_flush()
    redis_client.config_resetstat()
    for _ in range(2):
        limiter.check([MINUTE])
    calls = {name: stat["calls"] for name, stat in redis_client.info("commandstats").items()}
    assert (calls["cmdstat_evalsha"], calls["cmdstat_eval"]) == (2, 1)


# --- Revisions. ---


def test_a_caller_behind_the_stored_revision_gets_newer_revision_and_consumes_nothing(
    redis_client: redis.Redis, limiter: Limiter
) -> None:
    published = limiter.publish()
    for revision in (0, 1, published - 1):
        for verb in ("check", "peek", "charge", "refund"):
            with pytest.raises(NewerRevision) as caught:
                judge(limiter, MINUTE, LOG, revision=revision, verb=verb)
            assert caught.value.revision == published
    assert set(redis_client.keys("rqtest:*")) == PUBLISHED
    decision = judge(limiter, MINUTE, revision=published)
    assert (decision.allowed, decision.revision, decision.statuses[0].remaining) == (True, published, 9)


@pytest.mark.parametrize("verb", ["check", "peek"])
@pytest.mark.parametrize("stored", [None, 1, 499])
def test_a_missing_or_older_stored_revision_is_published_again(
    redis_client: redis.Redis, limiter: Limiter, clock: Clock, stored: int | None, verb: Mode
) -> None:
    """A store that lost data may have lost an unread publication: restoring the old number hid that."""
    if stored:
        redis_client.set(REVISION, stored)
    with pytest.raises(NewerRevision) as caught:
        judge(limiter, MINUTE, revision=500, verb=verb)
    assert caught.value.revision == clock.now_us
    assert redis_client.get(REVISION) == str(clock.now_us).encode()
    assert redis_client.ttl(REVISION) == -1
    assert set(redis_client.keys("rqtest:*")) == PUBLISHED, "nothing was consumed"
    assert judge(limiter, MINUTE, revision=clock.now_us, verb=verb).allowed


def test_the_revision_published_again_is_newer_than_the_caller_s_for_any_clock(
    redis_client: redis.Redis, limiter: Limiter, clock: Clock
) -> None:
    """``tostring`` in Lua writes 1.7637000001235e+15."""
    with pytest.raises(NewerRevision) as caught:
        judge(limiter, revision=clock.now_us + 123_456)
    assert caught.value.revision == clock.now_us + 123_457
    assert redis_client.get(REVISION) == str(clock.now_us + 123_457).encode()


def test_the_first_check_publishes_where_nobody_has(
    redis_client: redis.Redis, limiter: Limiter, clock: Clock
) -> None:
    """Else callers without a revision would not notice that the store has lost its data."""
    assert judge(limiter, MINUTE, revision=0, verb="peek").allowed
    assert redis_client.keys("rqtest:*") == []
    with pytest.raises(NewerRevision) as newer:
        judge(limiter, MINUTE, revision=0)
    assert newer.value.revision == clock.now_us
    assert redis_client.get(REVISION) == str(clock.now_us).encode()
    assert judge(limiter, MINUTE, revision=clock.now_us).allowed


def test_callers_without_a_revision_touch_none(redis_client: redis.Redis, limiter: Limiter) -> None:
    published = limiter.publish()
    assert limiter.check([MINUTE]).allowed
    assert redis_client.get(REVISION) == str(published).encode()


def test_revisions_grow_whatever_happens_to_the_store(redis_client: redis.Redis, limiter: Limiter) -> None:
    """After a FLUSHALL revisions began at 1 again, and no process reloaded."""
    revisions = [limiter.publish(), limiter.publish()]
    redis_client.delete(REVISION)
    revisions.append(limiter.publish())
    redis_client.set(REVISION, 5)
    revisions.append(limiter.publish())
    redis_client.set(REVISION, "garbage")
    revisions.append(limiter.publish())
    assert revisions == sorted(set(revisions))
    assert redis_client.get(REVISION) == str(revisions[-1]).encode()


def test_a_revision_ahead_of_the_clock_is_followed_by_the_next_number(
    redis_client: redis.Redis, limiter: Limiter
) -> None:
    ahead = time.time_ns() // 1000 + 3600 * 10**6
    redis_client.set(REVISION, ahead)
    assert [limiter.publish(), limiter.publish()] == [ahead + 1, ahead + 2]
