"""What a process notes of its decisions, what Redis keeps of that, and what operators read."""

from __future__ import annotations

import json
import os
import random
import re
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
import time_machine
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from rest_framework.test import APIClient

from django_ratequota import acheck_request, check_request
from django_ratequota.engine.keys import statistics_key
from django_ratequota.exceptions import StoreError
from django_ratequota.models import Endpoint, Plan, RatePolicy, UsageCount
from django_ratequota.monitoring import collector as collecting
from django_ratequota.monitoring import records
from django_ratequota.monitoring.attempts import recorded_attempts
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.packing import HOUR, OUTCOMES
from django_ratequota.monitoring.records import DecisionRecord, is_sampled, stored_name
from django_ratequota.monitoring.refusals import find_refusal, refusals
from django_ratequota.monitoring.timeline import Counts, timeline, top_callers
from tests.project.views import request_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

#: A port that nobody listens on.
CLOSED = "redis://127.0.0.1:1/0"


@pytest.fixture(autouse=True)
def counting(settings: Any, monkeypatch: Any, redis_client: redis.Redis) -> Iterator[None]:
    """Decisions are noted, and handed over when the test says so."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 1}
    monkeypatch.setattr(collecting._background, "keep", lambda: None)
    monkeypatch.setattr(collecting, "_CHUNK_SECONDS", 0.0)
    collector.clear()
    yield
    collector.clear()


@pytest.fixture
def search() -> Endpoint:
    return Endpoint.objects.create(name="search")


def total(counts: tuple[Counts, ...]) -> Counts:
    return Counts(*(sum(getattr(one, outcome) for one in counts) for outcome in OUTCOMES))


def noted(second: int, caller: str = "user:1", **more: Any) -> DecisionRecord:
    values = {"ip": "", "plan_id": None, "endpoint_ids": (), "cost": 1, "policy_ids": (), "allowed": True}
    return DecisionRecord(**{"second": second, "caller": caller, **values, "against": (), **more})


# --- From requests to counts. ---


@pytest.mark.parametrize("check", [check_request, async_to_sync(acheck_request)], ids=["sync", "async"])
def test_requests_are_counted_by_endpoint_and_policy(check: Callable[..., Any], search: Endpoint) -> None:
    tight = RatePolicy.objects.create(endpoint=search, rates="2/day")
    wide = RatePolicy.objects.create(rates="100/day")
    for _ in range(5):
        check(request_from(address="203.0.113.7"), scope="search")
    check(request_from(address="203.0.113.8"))
    collector.flush()
    for span in ("hour", "day", "week"):
        line = timeline(span)
        assert len(line.starts) == len(line.total) > 1
        assert line.starts[1] - line.starts[0] == line.step
        assert total(line.total) == Counts(3, 3, 0)
        assert {key: total(counts) for key, counts in line.endpoints.items()} == {
            search.pk: Counts(2, 3, 0),
            0: Counts(1, 0, 0),
        }
        # Refused by the other policy: that is nothing the wide one did.
        assert {key: total(counts) for key, counts in line.policies.items()} == {
            tight.pk: Counts(2, 3, 0),
            wide.pk: Counts(3, 0, 0),
        }


def test_log_mode_counts_what_would_have_been_refused(search: Endpoint) -> None:
    shadow = RatePolicy.objects.create(endpoint=search, rates="2/day", mode="log")
    closed = RatePolicy.objects.create(rates="blocked", mode="log")
    decisions = [check_request(request_from(address=f"203.0.113.{last}"), scope="search") for last in (7, 7, 7, 7, 8)]
    assert all(decision.allowed for decision in decisions)
    assert {decision.refusal_id for decision in decisions} == {""}
    collector.flush()
    line = timeline("hour")
    assert total(line.policies[shadow.pk]) == Counts(5, 0, 2)
    assert total(line.policies[closed.pk]) == Counts(5, 0, 5)
    assert total(line.total) == Counts(5, 0, 5)
    found = top_callers("hour", policy_id=shadow.pk)["would_refuse"]
    assert [(top.caller, top.counts) for top in found] == [("ip:203.0.113.7", Counts(0, 0, 2))]


def test_blocked_requests_are_refused_by_that_policy(search: Endpoint) -> None:
    block = RatePolicy.objects.create(endpoint=search, rates="blocked")
    assert check_request(request_from(), scope="search").refusal_id
    collector.flush()
    assert total(timeline("hour").policies[block.pk]) == Counts(0, 1, 0)


def test_a_request_at_two_endpoints_counts_once_in_all(search: Endpoint) -> None:
    other = Endpoint.objects.create(name="reading", methods="GET", routes="*")
    request = request_from()
    request.resolver_match = type("Match", (), {"route": "a/", "view_name": "a", "namespaces": []})()
    check_request(request, scope="search")
    collector.flush()
    line = timeline("hour")
    assert total(line.total) == Counts(1, 0, 0)
    assert {key: total(counts).admitted for key, counts in line.endpoints.items()} == {search.pk: 1, other.pk: 1}


def test_without_statistics_nothing_is_noted(settings: Any, redis_client: redis.Redis) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 0}
    RatePolicy.objects.create(rates="blocked")
    decision = check_request(request_from())
    assert (decision.allowed, decision.refusal_id) == (False, "")
    collector.flush()
    assert redis_client.keys("rqtest:{statistics}*") == []


def test_a_request_costs_no_further_round_trip(redis_client: redis.Redis, monkeypatch: Any) -> None:
    from django_ratequota.store.server import Server

    RatePolicy.objects.create(rates="3/day")
    check_request(request_from())
    sent: list[Any] = []
    plain = Server.send
    monkeypatch.setattr(
        Server, "send", lambda self, command, *rest: sent.append(command) or plain(self, command, *rest)
    )
    for _ in range(5):
        check_request(request_from())
    assert [command[0] for command in sent] == ["EVALSHA"] * 5


def test_a_thread_hands_over_every_so_often(monkeypatch: Any, settings: Any) -> None:
    monkeypatch.undo()
    settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 0.01}
    check_request(request_from())
    deadline = time.monotonic() + 30
    while total(timeline("hour").total) != Counts(1, 0, 0):
        assert time.monotonic() < deadline
    settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 0}


def test_with_redis_down_what_was_noted_is_let_go(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": CLOSED, "ON_ERROR": "deny"}
    RatePolicy.objects.create(rates="5/day")
    refused = check_request(request_from())
    assert (refused.allowed, refused.refusal_id) == (False, ""), "nobody would find it"
    assert len(collector._pending) == 1
    with pytest.raises(StoreError):
        collector.flush()
    assert not collector._pending
    for read in (lambda: timeline("day"), lambda: top_callers("day")["refused"], recorded_attempts, refusals):
        with pytest.raises(StoreError):
            read()
    with pytest.raises(StoreError):
        find_refusal("qk3c7m2xva")


# --- Refusals. ---


def test_a_refusal_has_an_id_that_tells_what_was_decided(search: Endpoint) -> None:
    plan = Plan.objects.create(name="Free", slug="free", default_for="authenticated")
    tight = RatePolicy.objects.create(endpoint=search, plan=plan, rates="1/day")
    alice = User.objects.create(username="alice")
    before = int(time.time())
    decisions = [check_request(request_from(user=alice, address="203.0.113.7"), scope="search") for _ in range(4)]
    ids = {decision.refusal_id for decision in decisions[1:]}
    assert decisions[0].refusal_id == ""
    assert all(re.fullmatch("[a-z2-7]{10}", one) for one in ids)
    collector.flush()
    found = [one for one in map(find_refusal, ids) if one]
    assert sum(one.count for one in found) == 3
    refusal = found[0]
    assert (refusal.caller, refusal.ip, refusal.plan_id) == (f"user:{alice.pk}", "ip:203.0.113.7", plan.pk)
    assert (refusal.scope, refusal.method, refusal.cost, refusal.error) == ("search", "GET", 1, "")
    assert before <= refusal.at.timestamp() <= time.time()
    assert refusal.violated == ("search/day",)
    assert refusal.revision == decisions[1].revision
    [bucket] = refusal.buckets
    assert (bucket.title, bucket.rate, bucket.policy_id) == ("search/day", "1/day", tight.pk)
    assert (bucket.subject, bucket.refused, bucket.limit, bucket.remaining) == (f"user:{alice.pk}", True, 1, 0)
    assert bucket.retry_after == pytest.approx(86_400, abs=60)
    assert {one.id for one in refusals()} == ids
    assert find_refusal(f"  {refusal.id.upper()}\n") == refusal


@pytest.mark.parametrize(
    "written", ["", "nothing", "a" * 10, "a" * 10_000, "refused_at", "aaaaaaaaa\x00", "ａｂｃｄｅｆｇｈｉｊ"]
)
def test_an_id_that_is_not_kept(written: str) -> None:
    assert find_refusal(written) is None


def test_different_callers_endpoints_and_reasons_have_different_ids(search: Endpoint) -> None:
    RatePolicy.objects.create(rates="blocked")
    ids = [check_request(request_from(address=ip), scope=scope).refusal_id for ip in ("203.0.113.7", "203.0.113.8")
           for scope in ("search", None)]  # fmt: skip
    assert len(set(ids)) == 4


def test_the_id_depends_on_the_secret_key(settings: Any) -> None:
    """An address could be found from its plain digest by trying all."""
    ids = set()
    for key in ("one", "two"):
        settings.SECRET_KEY = key
        ids.add(records.digest("ip:203.0.113.7"))
    assert len(ids) == 2


def test_refusals_of_one_caller(search: Endpoint) -> None:
    RatePolicy.objects.create(rates="blocked")
    for last in range(20):
        check_request(request_from(address=f"203.0.113.{last}"))
    collector.flush()
    assert [one.caller for one in refusals(caller="ip:203.0.113.3")] == ["ip:203.0.113.3"]
    assert len(refusals(most=5)) == 5


def test_clients_are_told_the_id() -> None:
    Endpoint.objects.create(name="search")
    RatePolicy.objects.create(rates="blocked")
    client = APIClient(headers={"accept": "application/json"})
    for path in ("/decorated/", "/search/"):
        response = client.get(path)
        assert response.status_code == 429, path
        collector.flush()
        assert find_refusal(response["X-RateLimit-Refusal"]) is not None
    problem = client.get("/decorated/")
    assert json.loads(problem.content)["refusal_id"] == problem["X-RateLimit-Refusal"]
    text = client.get("/decorated/", headers={"accept": "text/plain"})
    assert f"Reference: {text['X-RateLimit-Refusal']}." in text.content.decode()


def test_refusals_are_bounded_in_the_process(monkeypatch: Any) -> None:
    monkeypatch.setattr(collecting, "MAX_REFUSALS", 3)
    RatePolicy.objects.create(rates="blocked")
    ids = [check_request(request_from(address=f"203.0.113.{last}")).refusal_id for last in range(5)]
    assert [bool(one) for one in ids] == [True, True, True, False, False]


def test_refusals_are_bounded_in_redis_the_oldest_go(monkeypatch: Any, redis_client: redis.Redis) -> None:
    monkeypatch.setattr(collecting, "MAX_KEPT_REFUSALS", 3)
    RatePolicy.objects.create(rates="blocked")
    now = int(time.time())
    ids = []
    for ago in (5, 4, 3, 2, 1):
        decision = check_request(request_from())
        collector.clear()
        ids.append(collector._record_refusal(noted(now - ago * 60, f"user:{ago}"), "", "", "GET", decision))
        collector.flush()
    assert [find_refusal(one) is not None for one in ids] == [False, False, True, True, True]
    assert redis_client.hlen(statistics_key("rqtest", "refusals")) == 6


def test_refusals_go_after_48_hours_whatever_is_decided_then(search: Endpoint, redis_client: redis.Redis) -> None:
    RatePolicy.objects.create(endpoint=search, rates="blocked")
    decision = check_request(request_from(), scope="search")
    collector.clear()
    old = collector._record_refusal(noted(int(time.time()) - 50 * HOUR), "", "", "GET", decision)
    collector.flush()
    assert find_refusal(old) is None
    young = collector._record_refusal(noted(int(time.time()) - 47 * HOUR), "", "", "GET", decision)
    collector.flush()
    assert find_refusal(young) is not None
    redis_client.zadd(statistics_key("rqtest", "refused_at"), {young: time.time() - 50 * HOUR})
    check_request(request_from())
    collector.flush()
    assert find_refusal(young) is None


# --- Usage. ---


def test_usage_is_what_callers_asked_for(search: Endpoint) -> None:
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
        counted[one.caller, one.ip, one.plan_id, one.endpoint_ids, one.cost, "admitted"] += one.admitted
        counted[one.caller, one.ip, one.plan_id, one.endpoint_ids, one.cost, "refused"] += one.refused
    first = ("ip:203.0.113.7", "ip:203.0.113.7", None, (search.pk,), 2)
    second = ("ip:203.0.113.8", "ip:203.0.113.8", None, (), 1)
    assert +counted == {(*first, "admitted"): 2, (*first, "refused"): 1, (*second, "admitted"): 1}


def test_no_usage() -> None:
    found = recorded_attempts()
    assert (found.attempts, found.share, found.since) == ((), 1.0, None)


def test_equal_attempts_of_several_processes_are_one() -> None:
    now = int(time.time())
    for _ in range(3):
        collector._pending.extend([noted(now), noted(now), noted(now, allowed=False)])
        collector.flush()
    [attempt] = recorded_attempts().attempts
    assert (attempt.second, attempt.admitted, attempt.refused) == (now, 6, 3)


@pytest.mark.parametrize("level", [1, 3, 6])
def test_a_sample_is_a_part_of_the_callers(level: int) -> None:
    callers = [f"ip:198.51.{high}.{low}" for high in range(100) for low in range(100)]
    kept = [caller for caller in callers if is_sampled(caller, level)]
    assert len(kept) == pytest.approx(len(callers) / 2**level, rel=0.25)
    # A smaller sample is a part of a larger one: so hours at different levels can be read together.
    assert all(is_sampled(caller, level - 1) for caller in kept)
    assert all(is_sampled(caller, 0) for caller in callers)


def test_beyond_the_bound_callers_are_kept_whole_or_not_at_all(monkeypatch: Any, redis_client: redis.Redis) -> None:
    monkeypatch.setattr(collecting, "MAX_USAGE_BYTES", 20_000)
    now = int(time.time()) // HOUR * HOUR
    with time_machine.travel(now + 1800, tick=False):
        asked: Counter[str] = Counter()
        dice = random.Random(7)
        for round_ in range(30):
            for _ in range(300):
                caller = f"user:{dice.randrange(3000)}"
                asked[caller] += 1
                collector._pending.append(noted(now + round_ * 10, caller))
            collector.flush()
        found = recorded_attempts()
    kept: Counter[str] = Counter()
    for one in found.attempts:
        kept[one.caller] += one.admitted
    assert found.share < 1
    assert len(kept) == pytest.approx(len(asked) * found.share, rel=0.5)
    assert all(asked[caller] == times for caller, times in kept.items())
    stored = redis_client.lrange(statistics_key("rqtest", f"usage:{now // HOUR}"), 0, -1)
    assert 10_000 < sum(map(len, stored)) <= 20_000


def test_the_next_hour_begins_one_level_below(monkeypatch: Any) -> None:
    monkeypatch.setattr(collecting, "MAX_USAGE_BYTES", 4_000)
    now = int(time.time()) // HOUR * HOUR
    for round_ in range(10):
        collector._pending.extend(noted(now, f"user:{round_}-{number}") for number in range(300))
        collector.flush()
    hour, level = collector._level
    assert (hour, level > 1) == (now // HOUR, True)
    assert collector._level_for(hour) == level
    assert collector._level_for(hour + 1) == level - 1


# --- Callers. ---


def test_the_busiest_callers(search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="3/day")
    for last, times in ((7, 5), (8, 2), (9, 3)):
        for _ in range(times):
            check_request(request_from(address=f"203.0.113.{last}"), scope="search")
        check_request(request_from(address=f"203.0.113.{last}"))
    collector.flush()
    used = top_callers("hour")["admitted"]
    assert [(top.caller, top.counts.admitted) for top in used] == [
        ("ip:203.0.113.7", 4),
        ("ip:203.0.113.9", 4),
        ("ip:203.0.113.8", 3),
    ]
    assert [top.counts for top in top_callers("day")["refused"]] == [Counts(4, 2, 0)]
    assert [top.counts for top in top_callers("week", endpoint_id=search.pk)["refused"]] == [Counts(3, 2, 0)]
    assert len(top_callers("hour", endpoint_id=0, most=2)["admitted"]) == 2
    assert top_callers("hour")["would_refuse"] == ()


def test_the_busiest_stay_however_many_others_come(monkeypatch: Any, redis_client: redis.Redis) -> None:
    monkeypatch.setattr(collecting, "MAX_CALLERS", 20)
    now = int(time.time())
    for round_ in range(20):
        collector._pending.extend([noted(now, "user:busy")] * 5)
        collector._pending.extend(noted(now, f"user:{round_}-{number}") for number in range(50))
        collector.flush()
    assert top_callers("hour", most=1)["admitted"][0].counts == Counts(100, 0, 0)
    for key in redis_client.scan_iter("rqtest:{statistics}:admitted:*"):
        assert redis_client.zcard(key) <= 40 + 2 * collecting._SLICE


# --- Bounds and keys. ---


def test_counts_are_bounded_and_totals_go_on(monkeypatch: Any, redis_client: redis.Redis) -> None:
    monkeypatch.setattr(collecting, "MAX_FIELDS", 50)
    now = int(time.time())
    collector._pending.append(noted(now))
    collector.flush()
    collector._pending.extend(noted(now, policy_ids=(number,)) for number in range(500))
    collector.flush()
    line = timeline("hour")
    assert total(line.total) == Counts(501, 0, 0)
    assert 40 < len(line.policies) <= 50
    for key in redis_client.scan_iter("rqtest:{statistics}:minutes:*"):
        assert redis_client.hlen(key) <= 50


def test_every_key_goes_away(redis_client: redis.Redis) -> None:
    RatePolicy.objects.create(rates="1/day")
    for _ in range(3):
        check_request(request_from())
    collector.flush()
    keys = list(redis_client.scan_iter("rqtest:{statistics}*"))
    assert len(keys) == 8
    for key in keys:
        assert 0 < redis_client.ttl(key) <= 48 * HOUR, key


def test_a_process_holds_no_more_than_its_bound(monkeypatch: Any) -> None:
    monkeypatch.setattr(collecting, "MAX_PENDING", 10)
    for last in range(20):
        check_request(request_from(address=f"203.0.113.{last}"))
    assert len(collector._pending) == 10
    collector.flush()
    assert total(timeline("hour").total) == Counts(10, 0, 0)


def test_a_million_callers_stay_within_the_bounds(redis_client: redis.Redis) -> None:
    """Of what a process holds between two flushes, and of what Redis holds for one hour; 48 such are kept."""
    now = int(time.time())
    used = redis_client.info("memory")["used_memory"]
    for begin in range(0, 10**6, collecting.MAX_PENDING):
        if begin + collecting.MAX_PENDING == 10**6:
            tracemalloc.start()
        for caller in range(begin, begin + collecting.MAX_PENDING):
            name = f"ip:{caller >> 16}.{caller >> 8 & 255}.{caller & 255}.1"
            collector._pending.append(noted(now, name, ip=name, endpoint_ids=(1,), policy_ids=(1, 2)))
        collector.flush()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    grown = redis_client.info("memory")["used_memory"] - used
    print(f"\nprocess: {peak / 2**20:.1f} MiB at most, Redis: {grown / 2**20:.2f} MiB for the hour")
    assert peak < 64 * 2**20
    # Two hashes of counts, three lists of callers, and the usage.
    assert grown < 4 * 2**20
    assert recorded_attempts().share < 1
    assert total(timeline("hour").total).admitted == 10**6


# --- Hostile names, and what cannot be read. ---


@pytest.mark.parametrize(
    "name",
    ["tenant:" + "x" * 10_000, "tenant:<b>|:{}%\x00\n", "tenant:\ud800", "tenant:\u202egnol", "tenant:é😀", "|", ""],
)
def test_any_name_is_counted_and_read_back(name: str) -> None:
    collector._pending.append(noted(int(time.time()), stored_name(name)))
    collector.flush()
    [top] = top_callers("hour")["admitted"]
    assert top.caller == stored_name(name)
    assert len(top.caller) < 300
    [attempt] = recorded_attempts().attempts
    assert attempt.caller == stored_name(name)


def test_long_names_that_begin_alike_stay_apart() -> None:
    assert stored_name("t:" + "x" * 300) != stored_name("t:" + "x" * 301)


def test_the_week_goes_back_beyond_redis_by_what_was_rolled_up(search: Endpoint) -> None:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    UsageCount.objects.create(
        length="hour", starts_at=now - timedelta(days=5), place="t", admitted=7, refused=2, would_refuse=1
    )
    UsageCount.objects.create(
        length="day", starts_at=now - timedelta(days=5), place="t", admitted=70, refused=0, would_refuse=0
    )
    check_request(request_from(), scope="search")
    collector.flush()
    assert total(timeline("week").total) == Counts(8, 2, 1)
    assert total(timeline("day").total) == Counts(1, 0, 0)


def test_what_a_parent_noted_its_children_do_not(redis_client: redis.Redis) -> None:
    collector._pending.append(noted(int(time.time())))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, str(len(collector._pending)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"0"
    assert len(collector._pending) == 1
    os.close(read)
    os.close(write)


def test_usage_is_packed(redis_client: redis.Redis) -> None:
    now = int(time.time()) // 60 * 60  # ten seconds of one hour
    collector._pending.extend(noted(now + number % 10, f"ip:198.51.100.{number % 200}") for number in range(2000))
    collector.flush()
    [key] = redis_client.scan_iter("rqtest:{statistics}:usage:*")
    chunk = b"".join(redis_client.lrange(key, 0, -1))
    rows = json.loads(zlib.decompress(chunk))
    print(f"\n{len(chunk) / len(rows):.1f} bytes an attempt")
    assert len(rows) == len(recorded_attempts().attempts) == 200
