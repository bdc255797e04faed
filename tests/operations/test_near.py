"""Who is near a limit: what is kept, in which window, and how the list follows resets, edits and boosts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.core.management import CommandError
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_ratequota import Limiter, Rate, check_caller
from django_ratequota.engine.types import Bucket, BucketStatus
from django_ratequota.exceptions import StoreError
from django_ratequota.models import Endpoint, Plan, PlanAssignment, RatePolicy
from django_ratequota.monitoring import near
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.near import Noted, Window
from django_ratequota.operations.counters import reset_caller
from django_ratequota.operations.ledger import Chosen
from django_ratequota.operations.near import RedisList, Rows, all_near, lists, near_rows
from django_ratequota.policies.requests.caller import DescribedCaller
from django_ratequota.runtime import default_limiter, process
from tests.conftest import Clock
from tests.faults.cluster import Cluster
from tests.support.commands import run
from tests.support.requests import check_from
from tests.support.worker import Process

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "recording")]

MONTH, DAY, ROLLING = Window("fixed_window", "month"), Window("fixed_window", 86_400), Window("token_bucket", 86_400)


def spend(user: Any, times: int, **more: Any) -> None:
    """Make that many requests of one unit, and send what was noted."""
    for _ in range(times):
        check_from(user, **more)
    collector.flush()


def part(window: Window = MONTH, level: int = 50, start: str = "", most: int = 50) -> Rows:
    return near_rows(RedisList(window), Chosen(level=level), start, most)


def listed(window: Window = MONTH, level: int = 50, start: str = "", most: int = 50) -> list[tuple[str, int, int]]:
    """(subject, used, limit) of each row."""
    found = part(window, level, start, most)
    return [(row.status.bucket.subject, row.status.used, row.status.limit) for row in found.rows]


def near_counts() -> list[tuple[Window, dict[int, int]]]:
    """Each window, with how many of its subjects have used 50, 80 and 100 %."""
    found, error = lists()
    if error:
        near.windows()  # raises it
    return [(one.window, near_rows(one, Chosen(level=50), "", 1).counts) for one in found]


def kept(client: redis.Redis) -> int:
    """The subjects kept in Redis, of all windows."""
    return sum(client.zcard(key) for key in client.scan_iter("rqtest:{statistics}:near:*") if b"policies" not in key)


def status_of(subject: str, used: int, rate: str = "10/month", policy_id: int = 1) -> BucketStatus:
    """A status as a decision has it."""
    bucket = Bucket(subject, Rate.parse(rate), policy_id=policy_id, counted_per="caller")
    status = BucketStatus(
        bucket=bucket, allowed=True, remaining=10 - used, retry_after_us=0, reset_after_us=0, window_us=0
    )
    return replace(status, window_us=bucket.rate.period_us, reset_after_us=10**6)


def test_a_subject_is_listed_from_half_of_its_limit_on(alice: User) -> None:
    RatePolicy.objects.create(rates="10/month")
    spend(alice, 4)
    assert near_counts() == []
    spend(alice, 1)
    assert near_counts() == [(MONTH, {50: 1, 80: 0, 100: 0})]
    assert listed() == [(f"user:{alice.pk}", 5, 10)]
    spend(alice, 3)
    assert near_counts() == [(MONTH, {50: 1, 80: 1, 100: 0})]
    assert listed(level=80) == [(f"user:{alice.pk}", 8, 10)]
    spend(alice, 4)
    assert listed(level=100) == [(f"user:{alice.pk}", 10, 10)]


def test_only_windows_of_an_hour_or_more_are_kept(alice: User, redis_client: redis.Redis) -> None:
    RatePolicy.objects.create(rates="1/min fixed_window, 2/59min gcra, 2/hour, 2/day, 2/day fixed_window, 2/month")
    spend(alice, 2)
    hour = Window("token_bucket", 3600)
    assert [window for window, _counts in near_counts()] == [MONTH, DAY, ROLLING, hour]
    assert [window.title for window in (MONTH, DAY, hour)] == ["month", "day fixed_window", "hour"]
    assert Window.named(DAY.name) == DAY


def test_a_burst_is_the_limit_of_a_bucket(alice: User) -> None:
    RatePolicy.objects.create(rates="1000/day burst 4")
    spend(alice, 2)
    assert listed(ROLLING) == [(f"user:{alice.pk}", 2, 4)]


def test_the_fullest_come_first_and_pages_follow(alice: User) -> None:
    RatePolicy.objects.create(rates="10/month")
    users = [User.objects.create(username=f"user{number}") for number in range(5)]
    for number, user in enumerate(users):
        spend(user, 6 + number)
    rows = listed()
    assert [used for _subject, used, _limit in rows] == [10, 9, 8, 7, 6]
    assert [listed(most=2, start=start) for start in ("", "2", "4")] == [rows[:2], rows[2:4], rows[4:]]
    found = part(level=80, most=2)
    assert (found.following, found.counts) == ("2", {50: 5, 80: 3, 100: 1})
    assert part(level=80, start="2", most=2).following == ""


def test_a_reset_or_refunded_counter_is_listed_no_more(alice: User, redis_client: redis.Redis) -> None:
    RatePolicy.objects.create(rates="10/month")
    for user in (alice, User.objects.create(username="bob")):
        spend(user, 8)
    reset_caller(DescribedCaller(user_id=str(alice.pk), address=None), scope=None)
    [(bob, used, _limit)] = listed()
    assert (bob != f"user:{alice.pk}", used) == (True, 8)
    assert kept(redis_client) == 1, "the list of candidates is corrected by reading it"
    decision = check_caller(user=User.objects.get(username="bob"), scope=None)
    decision.settler.refund(tuple(s.bucket for s in decision.statuses), cost=6, charged=(0,))  # type: ignore[union-attr]
    assert listed() == []
    assert near_counts() == [(MONTH, {50: 0, 80: 0, 100: 0})]


def test_after_a_reset_the_subject_is_listed_again_at_the_same_share(alice: User) -> None:
    RatePolicy.objects.create(rates="10/month")
    spend(alice, 5)
    reset_caller(DescribedCaller(user_id=str(alice.pk), address=None), scope=None)
    assert listed() == []
    spend(alice, 6)
    assert listed() == [(f"user:{alice.pk}", 6, 10)]


def test_an_edited_limit_a_boost_and_another_plan_count_at_once(alice: User, free: Plan) -> None:
    policy = RatePolicy.objects.create(plan=free, rates="10/month")
    PlanAssignment.objects.create(user=alice, plan=free)
    subject = f"user:{alice.pk}"
    spend(alice, 8)
    policy.rates = "12/month"
    policy.save()
    assert listed() == [(subject, 8, 12)]
    boost = RatePolicy.objects.create(user=alice, rates="16/month", ends_at=timezone.now() + timedelta(hours=1))
    assert listed() == [(subject, 8, 16)]
    [row] = part().rows
    assert row.policy == boost
    assert listed() == [(subject, 8, 16)], "one counter is one row, under the policy that applies now"
    boost.delete()
    pro = Plan.objects.create(name="Pro", slug="pro")
    RatePolicy.objects.create(plan=pro, rates="10/s")
    PlanAssignment.objects.update(plan=pro)
    process.policies.expire()
    assert listed() == [], "the plan Pro has no limit a month"


def test_policies_that_no_longer_apply_are_listed_no_more(alice: User, search: Endpoint) -> None:
    deleted, off, shared = (
        RatePolicy.objects.create(endpoint=endpoint, counted_per=per, rates="10/month")
        for endpoint, per in ((None, "caller"), (search, "everyone"), (None, "ip"))
    )
    spend(alice, 8, scope="search")
    assert {subject for subject, *_ in listed()} == {f"user:{alice.pk}", "everyone", "ip:203.0.113.7"}
    deleted.delete()
    off.mode = "off"
    off.save()
    assert listed() == [("ip:203.0.113.7", 8, 10)]
    search.delete()
    shared.rates = "10/day"
    shared.save()
    assert listed() == []


def test_a_plan_and_an_identifier_are_listed_by_the_policy_that_applied(
    alice: User, free: Plan, settings: Any
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "tests.operations.test_near.acme"}}
    PlanAssignment.objects.create(user=alice, plan=free)
    RatePolicy.objects.create(plan=free, counted_per="plan", rates="10/month")
    per_tenant = RatePolicy.objects.create(plan=free, counted_per="tenant", rates="5/month")
    spend(alice, 5)
    assert set(listed()) == {(f"plan:{free.pk}", 5, 10), ("tenant:acme\n“é”", 5, 5)}
    per_tenant.ends_at = timezone.now() - timedelta(hours=1)
    per_tenant.save()
    assert listed() == [(f"plan:{free.pk}", 5, 10)]


def acme(_request: Any) -> str:
    """An identifier with characters that a list could stumble over."""
    return "acme\n“é”"


@pytest.fixture
def at(monkeypatch: Any) -> Callable[[float], None]:
    """Advances the time by which requests count and the list is read; it begins at 22:00 UTC, tomorrow.

    Not in the past, where the revision of the policies would be of the future.
    """
    clock = Clock((int(time.time() // 86_400 + 1) * 86_400 + 22 * 3600) * 10**6)
    limiter = Limiter(clock=clock)
    monkeypatch.setattr(process, "limiter", lambda: limiter)
    return clock.advance


def test_the_next_window_begins_with_an_empty_list(alice: User, at: Callable[[float], None]) -> None:
    RatePolicy.objects.create(rates="10/month")
    spend(alice, 8)
    assert listed() != []
    at(32 * 86_400)
    assert near_counts() == []
    assert listed() == []
    spend(alice, 5)
    assert listed() == [(f"user:{alice.pk}", 5, 10)]


def test_a_bucket_without_a_common_window_stays_listed_while_it_is_half_used(
    alice: User, at: Callable[[float], None]
) -> None:
    """Its subjects are kept by the day, counted from midnight UTC: a bucket that is full then refills afterwards."""
    RatePolicy.objects.create(rates="10/day")
    spend(alice, 10)
    at(3 * 3600)
    assert listed(ROLLING, 50) == [(f"user:{alice.pk}", 9, 10)]
    assert [window for window, _counts in near_counts()] == [ROLLING]
    at(86_400)
    assert near_counts() == []


def test_raised_limits_make_room_for_those_who_are_near(redis_client: redis.Redis, search: Endpoint) -> None:
    """The fullest candidates are all out of date: the page goes on to those who follow, and removes them."""
    reports = Endpoint.objects.create(name="reports")
    raised, other = (RatePolicy.objects.create(endpoint=one, rates="10/month") for one in (search, reports))
    for scope, subjects, times in (("search", 60, 9), ("reports", 6, 6)):
        for number in range(subjects):
            for _ in range(times):
                check_from(None, address=f"10.0.0.{number}", scope=scope)
    collector.flush()
    assert kept(redis_client) == 66
    RatePolicy.objects.filter(pk=raised.pk).update(rates="1000/month")
    found = part(most=5)
    assert [row.policy for row in found.rows] == [other] * 5
    assert (found.following, kept(redis_client)) == ("5", 6)


def test_a_flood_of_subjects_stays_bounded_and_leaves_room_for_others(redis_client: redis.Redis) -> None:
    """A hundred thousand addresses at 100 % of one policy: in the process, and in Redis."""
    noted, limiter = Noted(), default_limiter()
    noted.note(status_of("user:1", 5, policy_id=2), limiter.now_us)
    noted.send(limiter)
    for number in range(100_000):
        noted.note(status_of(f"ip:10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 10), limiter.now_us)
        if number % 20_000 == 19_999:
            assert len(noted._statuses) == near.MAX_NOTED
            noted.send(limiter)
    assert noted._statuses == {}
    assert kept(redis_client) == 5 * near.MAX_NOTED + 1 <= 3 * near.MAX_OF_POLICY + 1
    [key] = redis_client.scan_iter("rqtest:{statistics}:near:*month*[0-9]")
    assert redis_client.memory_usage(key, samples=0) < 15 * 2**20
    assert near.candidates(MONTH, 50, 50_000, 1)[0].policy_id == 2


def test_the_bounds_of_a_policy_and_of_a_window(redis_client: redis.Redis, monkeypatch: Any) -> None:
    monkeypatch.setattr(near, "MAX_KEPT", 9)
    monkeypatch.setattr(near, "MAX_OF_POLICY", 2)
    noted, limiter = Noted(), default_limiter()

    def send(used: int, policy_id: int = 1) -> list[str]:
        """Three more subjects of the policy that have used so much; returns the policy's subjects that are kept."""
        for number in range(3):
            noted.note(status_of(f"user:{used}{number}", used, policy_id=policy_id), limiter.now_us)
        noted.send(limiter)
        return [one.subject for one in near.candidates(MONTH, 50, 0, 100) if one.policy_id == policy_id]

    assert [len(send(used)) for used in (5, 6, 8, 9, 10)] == [2, 2, 4, 4, 6]
    assert len(send(10, policy_id=2)) == 3
    assert len(send(10, policy_id=3)) == 3
    assert [one.policy_id for one in near.candidates(MONTH, 50, 0, 100)].count(1) == 3, "the least full went"
    counts = redis_client.hgetall(next(redis_client.scan_iter("rqtest:{statistics}:near:*:policies")))
    assert counts == {b"1": b"3", b"2": b"3", b"3": b"3"}


def test_what_has_not_changed_is_sent_once_a_minute(monkeypatch: Any) -> None:
    sent: list[dict[bytes, int]] = []
    monkeypatch.setattr(near, "keep", lambda window, end, percents, limiter: sent.append(percents))
    noted, limiter, status = Noted(), default_limiter(), status_of("user:1", 5)
    minute = limiter.now_us // (60 * 10**6) * 60 * 10**6
    for at_us in (minute, minute + 1, minute + 60 * 10**6):
        noted.note(status, at_us)
        noted.send(limiter)
    assert [list(percents.values()) for percents in sent] == [[50], [50]]


def test_decisions_without_redis_and_built_in_limits_are_not_noted(alice: User) -> None:
    noted = Noted()
    noted.note(status_of("user:1", 9), 0)
    noted.note(replace(status_of("user:1", 9), bucket=Bucket("user:1", Rate.parse("10/month"))), 1)
    assert noted._statuses == {}


@pytest.mark.parametrize("changes", [{"REDIS_URL": "memory://"}, {"ENABLED": False}, {"STATISTICS_SECONDS": 0}])
def test_without_redis_or_statistics_nothing_is_kept(
    alice: User, settings: Any, changes: dict[str, Any], redis_client: redis.Redis
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, **changes}
    RatePolicy.objects.create(rates="1/month")
    check_from(alice)
    if "STATISTICS_SECONDS" in changes:
        collector.flush()
        assert near_counts() == []
    else:
        with pytest.raises(StoreError):
            near_counts()
    assert list(redis_client.scan_iter("rqtest:{statistics}:near*")) == []


def test_what_another_client_wrote_is_an_error_of_the_store(redis_client: redis.Redis) -> None:
    redis_client.zadd("rqtest:{statistics}:near", {"no window": 10**11})
    with pytest.raises(StoreError, match="another client"):
        near_counts()
    key = f"rqtest:{{statistics}}:near:{MONTH.name}:{near.window_end(MONTH, default_limiter())}"
    redis_client.zadd(key, {"[1,": 90})
    with pytest.raises(StoreError, match="another client"):
        listed()


def queries_of(listed: Callable[[], Any], spend: Callable[[User, int], None], users: int) -> int:
    """Return how many queries a list takes with this many more users, each by a policy of their own."""
    for number in range(users):
        user = User.objects.create(username=f"user{users}-{number}")
        RatePolicy.objects.create(user=user, rates="4/month")
        spend(user, 3)
    process.policies.expire()
    listed()
    process.policies._entries.clear()
    with CaptureQueriesContext(connection) as captured:
        assert len(listed()) >= users
    return len(captured)


def test_the_queries_do_not_grow_with_the_rows(alice: User) -> None:
    RatePolicy.objects.create(rates="10/month")
    assert queries_of(listed, spend, 2) == queries_of(listed, spend, 12)


def test_all_rows_are_read_in_batches(alice: User, monkeypatch: Any) -> None:
    monkeypatch.setattr("django_ratequota.operations.near._BATCH", 2)
    monkeypatch.setattr(near, "CHUNK", 2)
    RatePolicy.objects.create(rates="10/month")
    for number in range(5):
        spend(User.objects.create(username=f"user{number}"), 6)
    users = {f"user:{pk}" for pk in User.objects.exclude(pk=alice.pk).values_list("pk", flat=True)}
    batches = list(all_near(RedisList(MONTH), Chosen(level=50, subjects=frozenset(users))))
    assert [len(batch) for batch in batches] == [2, 2, 1]


def test_on_a_cluster_each_subject_is_peeked_where_it_lives(settings: Any) -> None:
    with Cluster() as cluster:
        settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": cluster.url, "CLUSTER": True}
        RatePolicy.objects.create(rates="10/month")
        users = [User.objects.create(username=f"user{number}") for number in range(6)]
        for user in users:
            spend(user, 7)
        assert {subject for subject, *_ in listed()} == {f"user:{user.pk}" for user in users}
        default_limiter().store.close()


def test_the_command_lists_them(alice: User, search: Endpoint, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "tests.operations.test_near.acme"}}
    assert run("near") == ""
    policy = RatePolicy.objects.create(endpoint=search, rates="10/month, 10/day")
    RatePolicy.objects.create(counted_per="tenant", rates="9/month")
    spend(alice, 8, scope="search")
    text = run("near")
    assert f" 80 %  8 of 10  user:{alice.pk}: 10/month at search (policy {policy.pk})" in text
    assert " 88 %  8 of 9  'tenant:acme\\n“é”': 9/month at all endpoints" in text
    found = [json.loads(line) for line in run("near", "--level", "50", "--format", "json").splitlines()]
    assert {row["subject"]: row["used"] for row in found} == {f"user:{alice.pk}": 8, "tenant:acme\n“é”": 8}
    assert len(run("near", "--window", ROLLING.name).splitlines()) == 1
    assert run("near", "--level", "100") == ""
    with pytest.raises(CommandError, match="there are: fixed_window:month, token_bucket:86400"):
        run("near", "--window", "month")


@pytest.fixture
def workers(tmp_path: Any) -> Iterator[tuple[Process, Process]]:
    """Two processes that record their decisions, with a database of their own."""
    environment = os.environ | {"RATEQUOTA_TEST_DATABASE": f"sqlite:///{tmp_path / 'workers.sqlite3'}"}
    pair = (Process(environment), Process(environment))
    try:
        pair[0].run(
            "from django.core.management import call_command; call_command('migrate', run_syncdb=True, verbosity=0)"
        )
        pair[0].run(
            "User.objects.create(username='alice'); RatePolicy.objects.create(rates='10/month', durable=False)"
        )
        for one in pair:
            one.run(RECORD)
        yield pair
    finally:
        for one in pair:
            one.close()


RECORD = """
from django.conf import settings
from django.test import override_settings
from django_ratequota.monitoring import collector
from django_ratequota.monitoring.sending import sending
override_settings(RATEQUOTA={**settings.RATEQUOTA, "STATISTICS_SECONDS": 1}).enable()
sending.keep = lambda: None
"""
READ = """
from django_ratequota.monitoring.near import Window
from django_ratequota.operations.ledger import Chosen
from django_ratequota.operations.near import RedisList, near_rows
collector.collector.flush()
rows = near_rows(RedisList(Window("fixed_window", "month")), Chosen(level=50), "", 50).rows
answer = [[row.status.used, row.percent] for row in rows]
"""


def test_processes_share_the_list(workers: tuple[Process, Process], redis_client: redis.Redis) -> None:
    first, second = workers
    for _ in range(3):
        first.check()
        second.check()
    assert second.run(READ) == [[6, 60]]
    assert first.run(READ) == [[6, 60]]
    for _ in range(2):
        first.check()
    assert second.run(READ) == [[8, 80]], "peeked, although the first process has not sent it"
    assert kept(redis_client) == 1
