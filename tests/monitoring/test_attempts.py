"""Recorded attempts: sampled by caller, packed, and read back."""

from __future__ import annotations

import json
import random
import time
import zlib
from collections import Counter
from typing import Any

import pytest
import redis
import time_machine

from django_ratequota import check_request
from django_ratequota.engine.keys import statistics_key
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.monitoring.attempts import RecordedAttempts, recorded_attempts
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.packing import HOUR
from django_ratequota.monitoring.records import is_sampled
from tests.monitoring.support import record
from tests.project.views import request_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "recording")]


def test_attempts_are_recorded_by_caller_endpoint_and_cost(search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="4/day")
    for _ in range(3):
        check_request(request_from(address="203.0.113.7"), scope="search", cost=2)
    collector.flush()
    check_request(request_from(address="203.0.113.8"))
    collector.flush()
    found = recorded_attempts()
    assert found.share == 1.0
    assert found.since is not None
    counted: Counter[Any] = Counter()
    for one in found.attempts:
        assert (one.ip, one.plan_id, one.costs) == (one.caller, None, ())
        counted[one.caller, one.endpoint_ids, one.cost, "admitted"] += one.admitted
        counted[one.caller, one.endpoint_ids, one.cost, "refused"] += one.refused
    first, second = ("ip:203.0.113.7", (search.pk,), 2), ("ip:203.0.113.8", (), 1)
    assert +counted == {(*first, "admitted"): 2, (*first, "refused"): 1, (*second, "admitted"): 1}


def test_without_requests_there_are_no_attempts() -> None:
    assert recorded_attempts() == RecordedAttempts(attempts=(), share=1.0, since=None)


def test_attempts_are_read_in_order_of_one_endpoint_and_some_hours() -> None:
    now = int(time.time()) // HOUR * HOUR + 1800
    with time_machine.travel(now, tick=False):
        for ago, endpoint, allowed in ((60, 4, True), (HOUR + 60, 4, True), (120, 4, False), (90, 5, True)):
            collector.pending.append(record(now - ago, endpoint_ids=(endpoint,), allowed=allowed))
            collector.flush()
        found = recorded_attempts(1, 4)
        assert [now - one.second for one in found.attempts] == [120, 60]
        assert found.since is not None
        assert now - found.since.timestamp() == 120


def test_equal_attempts_of_several_processes_are_merged() -> None:
    now = int(time.time())
    for _ in range(3):
        collector.pending.extend([record(now), record(now), record(now, allowed=False)])
        collector.flush()
    [attempt] = recorded_attempts().attempts
    assert (attempt.second, attempt.admitted, attempt.refused) == (now, 6, 3)


@pytest.mark.parametrize("level", [1, 3, 6])
def test_a_sample_contains_every_smaller_sample(level: int) -> None:
    callers = [f"ip:198.51.{high}.{low}" for high in range(100) for low in range(100)]
    kept = [caller for caller in callers if is_sampled(caller, level)]
    assert len(kept) == pytest.approx(len(callers) / 2**level, rel=0.25)
    # Hours with different levels can be read together, because a smaller sample is part of every larger one.
    assert all(is_sampled(caller, level - 1) for caller in kept)
    assert all(is_sampled(caller, 0) for caller in callers)


def test_beyond_the_bound_callers_are_sampled_with_all_their_attempts(
    monkeypatch: Any, redis_client: redis.Redis
) -> None:
    monkeypatch.setattr("django_ratequota.monitoring.collector.MAX_USAGE_BYTES", 20_000)
    now = int(time.time()) // HOUR * HOUR
    with time_machine.travel(now + 1800, tick=False):
        attempts_of: Counter[str] = Counter()
        dice = random.Random(7)
        for round_ in range(30):
            for _ in range(300):
                caller = f"user:{dice.randrange(3000)}"
                attempts_of[caller] += 1
                collector.pending.append(record(now + round_ * 10, caller))
            collector.flush()
        found = recorded_attempts()
    kept: Counter[str] = Counter()
    for one in found.attempts:
        kept[one.caller] += one.admitted
    assert found.share < 1
    assert len(kept) == pytest.approx(len(attempts_of) * found.share, rel=0.5)
    assert all(attempts_of[caller] == times for caller, times in kept.items())
    stored = redis_client.lrange(statistics_key("rqtest", f"usage:{now // HOUR}"), 0, -1)
    assert 10_000 < sum(map(len, stored)) <= 20_000


def test_the_next_hour_starts_one_sampling_level_lower(monkeypatch: Any) -> None:
    monkeypatch.setattr("django_ratequota.monitoring.collector.MAX_USAGE_BYTES", 4_000)
    now = int(time.time()) // HOUR * HOUR
    for round_ in range(10):
        collector.pending.extend(record(now, f"user:{round_}-{number}") for number in range(300))
        collector.flush()
    hour, level = collector._level
    assert (hour, level > 1) == (now // HOUR, True)
    assert collector._level_for(hour) == level
    assert collector._level_for(hour + 1) == level - 1


def test_attempts_are_compressed(redis_client: redis.Redis) -> None:
    now = int(time.time()) // 60 * 60  # ten seconds of one hour
    collector.pending.extend(record(now + number % 10, f"ip:198.51.100.{number % 200}") for number in range(2000))
    collector.flush()
    [key] = redis_client.scan_iter("rqtest:{statistics}:usage:*")
    chunk = b"".join(redis_client.lrange(key, 0, -1))
    rows = json.loads(zlib.decompress(chunk))
    assert len(rows) == len(recorded_attempts().attempts) == 200
