"""The tightest limit of each of several callers, by real counters."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.utils import timezone

from django_ratequota import check_request
from django_ratequota.exceptions import StoreError
from django_ratequota.models import Endpoint, Plan, PlanAssignment, RatePolicy
from django_ratequota.operations import caller_limits as module
from django_ratequota.operations.caller_limits import tightest
from tests.project.views import request_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


def found(callers: list[str], scope: str | None = None, **of: Any) -> dict[str, tuple[str, int, int]]:
    """Return caller -> (title, used, limit)."""
    return {
        caller: (status.bucket.title, status.used, status.limit)
        for caller, status in tightest(callers, scope, **of).items()
    }


def test_each_caller_has_its_fullest_counter(search: Endpoint) -> None:
    alice, bob = (User.objects.create(username=name) for name in ("alice", "bob"))
    pro = Plan.objects.create(name="Pro", slug="pro")
    PlanAssignment.objects.create(user=alice, plan=pro, starts_at=timezone.now())
    RatePolicy.objects.create(rates="100/day, 10/month")
    RatePolicy.objects.create(plan=pro, rates="50/day")
    RatePolicy.objects.create(endpoint=search, rates="4/day")
    RatePolicy.objects.create(user=bob, endpoint=search, rates="3/day")
    for user in (alice, bob, None):
        check_request(request_from(user, address="203.0.113.7"), scope="search")
    callers = [f"user:{alice.pk}", f"user:{bob.pk}", "ip:203.0.113.7", "ip:203.0.113.8"]
    everywhere = found(callers)
    assert everywhere == {
        callers[0]: ("search/day", 1, 4),
        callers[1]: ("search/day", 1, 3),
        callers[2]: ("search/day", 1, 4),
        callers[3]: ("search/day", 0, 4),
    }
    assert found(callers, "search") == everywhere
    assert found(callers, "no-such-endpoint") == {
        callers[0]: ("all/day", 1, 50),
        callers[1]: ("all/month", 1, 10),
        callers[2]: ("all/month", 1, 10),
        callers[3]: ("all/month", 0, 10),
    }


def test_counters_shared_with_others_and_those_that_refuse_nothing_are_left_out(search: Endpoint) -> None:
    for rates, fields in {
        "10/day": {"counted_per": "everyone"},
        "11/day": {"counted_per": "ip"},
        "12/day": {"mode": "log"},
        "unlimited": {"endpoint": search},
    }.items():
        RatePolicy.objects.create(rates=rates, **fields)  # type: ignore[arg-type]
    user = User.objects.create(username="alice")
    # The address of a user is not known, that of an anonymous caller is.
    assert found([f"user:{user.pk}", "ip:203.0.113.7"]) == {"ip:203.0.113.7": ("all/day per ip", 0, 11)}


@pytest.mark.parametrize(
    "caller", ["", "unknown", "ip:unknown", "ip:nonsense", "tenant:", "user:x", "user:9" + "9" * 30]
)
def test_callers_that_are_nobody_in_particular(caller: str) -> None:
    RatePolicy.objects.create(rates="10/day", counted_per="ip")
    assert found([caller]) == {}


def test_of_many_callers_and_endpoints_limits_for_all_endpoints_are_compared(
    monkeypatch: Any, search: Endpoint
) -> None:
    RatePolicy.objects.create(rates="10/day")
    RatePolicy.objects.create(endpoint=search, rates="1/day, 1/month")
    callers = [f"ip:203.0.113.{last}" for last in range(4)]
    for most, one in ((4, ("search/day", 0, 1)), (3, ("all/day", 0, 10))):
        monkeypatch.setattr(module, "MAX_BUCKETS", most)
        assert found(callers) == dict.fromkeys(callers, one)


def test_where_nothing_is_enforced_there_is_none(settings: Any) -> None:
    RatePolicy.objects.create(rates="10/day")
    assert found(["ip:203.0.113.7"])
    plain = settings.RATEQUOTA
    settings.RATEQUOTA = {**plain, "ENABLED": False}
    assert found(["ip:203.0.113.7"]) == {}
    settings.RATEQUOTA = {**plain, "REDIS_URL": "redis://127.0.0.1:1/0"}
    with pytest.raises(StoreError):
        found(["ip:203.0.113.7"])


def test_where_only_a_request_tells_the_plan_the_limits_that_no_plan_changes_are_compared(
    settings: Any, search: Endpoint
) -> None:
    """Regression: in an installation with organisations on plans, no user had a tightest limit."""
    plain = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "tests.project.views.api_key"}}
    settings.RATEQUOTA = plain
    alice = User.objects.create(username="alice")
    pro = Plan.objects.create(name="Pro", slug="pro")
    PlanAssignment.objects.create(subject="tenant:acme", plan=pro, starts_at=timezone.now())
    RatePolicy.objects.create(rates="10/day")
    RatePolicy.objects.create(plan=pro, rates="3/day")
    RatePolicy.objects.create(endpoint=search, rates="50/day")
    name = f"user:{alice.pk}"
    assert found([name]) == {name: ("search/day", 0, 50)}
    settings.RATEQUOTA = {**plain, "PLAN_RESOLVER": "tests.project.views.request_from"}
    assert found([name]) == {name: ("search/day", 0, 50)}
    settings.RATEQUOTA = plain
    check_request(request_from(alice, headers={"X-Api-Key": "acme"}))
    RatePolicy.objects.create(user=alice, rates="4/day")
    assert found([name]) == {name: ("all/day", 1, 4)}


def test_nothing_is_consumed(redis_client: redis.Redis) -> None:
    RatePolicy.objects.create(rates="10/day")
    for _ in range(20):
        assert found(["ip:203.0.113.7"]) == {"ip:203.0.113.7": ("all/day", 0, 10)}
    assert not list(redis_client.scan_iter("rqtest:{ip:*"))
