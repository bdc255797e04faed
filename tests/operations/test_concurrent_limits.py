"""Rates such as ``2 concurrent`` where people see them: headers, the usage API, the admin, commands, files."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.test import Client

from django_ratequota import Rate, check_caller, check_request
from django_ratequota.engine.keys import statistics_key
from django_ratequota.engine.slots import Lease, unreleased
from django_ratequota.headers import decision_headers
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.monitoring.alerts import crossings
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.health import process_name
from django_ratequota.monitoring.refusals import refusals
from django_ratequota.operations.impact import NotEstimable, estimate
from django_ratequota.operations.overrides import doubled
from django_ratequota.operations.replay import replay
from django_ratequota.operations.what_to_tell import policies_of, what_to_tell
from django_ratequota.runtime import default_limiter
from tests.management.test_command import report_as
from tests.project.views import request_from
from tests.support.commands import run
from tests.support.operators import words_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "recording")]

APP = "/admin/django_ratequota"


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    yield
    unreleased.clear()


@pytest.fixture
def alice(search: Endpoint, free: Plan) -> User:
    """A user on Free, which has two concurrent requests for search."""
    user = User.objects.create(username="alice")
    PlanAssignment.objects.create(user=user, plan=free)
    RatePolicy.objects.create(plan=free, endpoint=search, rates="2 concurrent, 100/hour")
    return user


def hold(user: User) -> Any:
    return check_caller(user=user, scope="search")


# --- Clients. ---


def test_headers_name_what_is_counted(alice: User) -> None:
    with hold(alice) as decision:
        headers = decision_headers(decision)
        assert headers["RateLimit-Policy"].startswith(
            '"search/concurrent";q=2;qu="concurrent-requests", "search/hour"'
        )
        assert headers["RateLimit"].startswith('"search/concurrent";r=1, "search/hour";r=99;t=')
        # Fewer of it are left, but it says nothing about the next minute.
        assert (headers["X-RateLimit-Limit"], headers["X-RateLimit-Remaining"]) == ("100", "99")
        with hold(alice), hold(alice) as refused:
            headers = decision_headers(refused)
            assert (headers["Retry-After"], headers["X-RateLimit-Limit"]) == ("1", "2")


def test_the_usage_api_tells_how_many_run(alice: User) -> None:
    client = Client()
    client.force_login(alice)
    with hold(alice):
        (found, _hourly) = client.get("/quota/usage/", {"scope": "search"}).json()["limits"]
    assert {name: found[name] for name in ("name", "rate", "unit", "limit", "used", "remaining", "window")} == {
        "name": "search/concurrent",
        "rate": "2 concurrent",
        "unit": "concurrent requests",
        "limit": 2,
        "used": 1,
        "remaining": 1,
        "window": 0,
    }


def test_a_refused_customer_is_told_that_waiting_helps(alice: User) -> None:
    with hold(alice), hold(alice):
        assert not check_request(request_from(alice), "search").allowed
    collector.flush()
    (refusal,) = refusals(1)
    assert what_to_tell(refusal, policies_of(refusal), str) == (
        "Your plan Free allows 2 requests at the same time for search. 2 were running. "
        "The next request is possible as soon as one of these has ended."
    )


def test_no_signal_says_that_it_is_nearly_used_up(alice: User, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "NOTIFY_LIMITS": "all"}
    with hold(alice), hold(alice) as decision:
        assert decision.statuses[0].remaining == 0
        assert list(crossings(decision, 1)) == []


# --- Operators. ---


def test_explain_shows_and_frees_the_slots(alice: User, operator: Client) -> None:
    page = f"{APP}/ratepolicy/explain/?user={alice.pk}&endpoint=search"
    with hold(alice):
        text = words_of(operator.get(page))
        assert "1 of 2 requests running, 1 more may start." in text
        assert "1 of 2 slots free" in run("explain", "--user", "alice", "--endpoint", "search")
        counters = f"{APP}/ratepolicy/counters/?user={alice.pk}&endpoint=search&bucket=search/concurrent"
        assert "frees its slots" in words_of(operator.get(counters))
        assert "Leave the number empty" in words_of(operator.post(counters, {"units": "1"}))
        assert operator.post(counters, {"units": ""}).status_code == 302
        assert "0 of 2 requests running, 2 more may start." in words_of(operator.get(page))
    change = PolicyChange.objects.order_by("pk").last()
    assert change is not None
    assert (change.before["search/concurrent"]["used"], change.after["search/concurrent"]["used"]) == (1, 0)
    assert "0 of 2 requests running" in words_of(operator.get(page)), "the release of a freed slot changes nothing"


def hold_as(worker: int, user: User, times: int = 1) -> None:
    """Take slots as a worker with this number."""
    with hold(user) as decision:
        bucket = decision.statuses[0].bucket
    for number in range(times):
        lease = Lease(bucket, worker * 2**32 + number + 1, 60 * 10**6)
        assert default_limiter().renew_slots([lease]) == 1


def explained(user: User, operator: Client) -> str:
    page = operator.get(f"{APP}/ratepolicy/explain/?user={user.pk}&endpoint=search")
    return re.sub("<[^>]+>", "", words_of(page))


def test_explain_tells_which_workers_hold_the_slots(alice: User, operator: Client) -> None:
    RatePolicy.objects.update(rates="30 concurrent")
    report_as("web-2:7", number=7)
    report_as("web-3:8", number=8, at=time.time() - 50)
    report_as("older-version:9", number=0)
    with hold(alice):
        hold_as(7, alice, 2)
        hold_as(8, alice)
        hold_as(10, alice)  # a worker that is gone
        hold_as(0, alice)  # as ids of an older version may be
        text = explained(alice, operator)
    assert f"{process_name()}: 1 running, the oldest since " in text
    assert "web-2:7: 2 running, the oldest since " in text
    assert "web-3:8 (not reporting): 1 running, " in text
    assert "Workers that do not report: 2 running, " in text
    assert "older-version" not in text


def test_explain_lists_the_workers_with_the_oldest_slots(alice: User, operator: Client) -> None:
    RatePolicy.objects.update(rates="30 concurrent")
    for worker in range(1, 14):
        report_as(f"web-{worker}:1", number=worker)
        hold_as(worker, alice)
    text = explained(alice, operator)
    assert re.findall(r"web-(\d+):1: 1 running", text) == [str(worker) for worker in range(1, 11)]
    assert "and 3 more" in text


def test_explain_tells_how_many_run_in_this_process_alone(settings: Any, alice: User, operator: Client) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "memory://"}
    with hold(alice):
        assert f"{process_name()}: 1 running, the oldest since " in explained(alice, operator)


def test_explain_names_no_time_at_which_a_slot_is_free(alice: User, operator: Client) -> None:
    """It said "would be refused until 12:00:01" and "Available again at 12:00:01" while requests ran for minutes."""
    with hold(alice), hold(alice):
        refused = check_request(request_from(alice), "search")
        collector.flush()
        text = words_of(operator.get(f"{APP}/ratepolicy/explain/?id={refused.refusal_id}"))
    assert "(1 unit) would be refused by search: 2 concurrent.</p>" in text
    assert "2 of 2 used, 0 left. <b>Refused.</b> </p>" in text


def test_explain_stays_up_where_another_client_wrote_a_rate(
    alice: User, operator: Client, redis_client: redis.Redis
) -> None:
    with hold(alice), hold(alice):
        refused = check_request(request_from(alice), "search")
    collector.flush()
    key = statistics_key(default_limiter().prefix, "refusals")
    written: Any = redis_client.hget(key, refused.refusal_id)
    redis_client.hset(key, refused.refusal_id, written.replace(b"2 concurrent", b"some words"))
    page = operator.get(f"{APP}/ratepolicy/explain/?id={refused.refusal_id}")
    assert page.status_code == 200
    assert "The refusal cannot be looked up." in words_of(page)


def test_explain_counts_more_requests_than_a_lowered_limit(alice: User, operator: Client) -> None:
    with hold(alice), hold(alice):
        RatePolicy.objects.update(rates="1 concurrent, 100/hour")
        text = words_of(operator.get(f"{APP}/ratepolicy/explain/?user={alice.pk}&endpoint=search"))
    assert "2 of 1 requests running, 0 more may start." in text


def test_slots_can_be_selected_where_only_they_are_limited(alice: User, operator: Client) -> None:
    """Without another counter of the customer there was no checkbox."""
    RatePolicy.objects.update(counted_per="everyone", rates="2 concurrent")
    page = words_of(operator.get(f"{APP}/ratepolicy/explain/?user={alice.pk}&endpoint=search"))
    assert 'name="bucket" value="search/concurrent per everyone"' in page
    assert "Refund or reset…" in page


def test_explain_frees_shared_slots_too(alice: User, operator: Client) -> None:
    RatePolicy.objects.update(counted_per="everyone")
    with hold(alice):
        counters = f"{APP}/ratepolicy/counters/?user={alice.pk}&endpoint=search&bucket=search/"
        assert operator.get(f"{counters}hour per everyone").status_code == 302
        assert operator.post(f"{counters}concurrent per everyone", {"units": ""}).status_code == 302
        assert [status.remaining for status in hold(alice).statuses] == [1, 98]


def test_pages_show_the_rate(alice: User, operator: Client) -> None:
    with hold(alice), hold(alice):
        refused = check_request(request_from(alice), "search")
    collector.flush()
    policy = RatePolicy.objects.get()
    for page in (
        "plan/matrix/",
        f"plan/{policy.plan_id}/change/",
        "ratepolicy/traffic/",
        f"ratepolicy/explain/?id={refused.refusal_id}",
        f"ratepolicy/boost/?user={alice.pk}&endpoint=search&policy={policy.pk}",
    ):
        assert "2 concurrent" in words_of(operator.get(f"{APP}/{page}")), page


def test_log_only_refuses_nobody_and_tells_what_it_would_have(alice: User) -> None:
    RatePolicy.objects.update(mode="log")
    with hold(alice), hold(alice):
        with hold(alice) as third:
            assert third.allowed
            assert [status.allowed for status in third.statuses] == [False, True]
        # What would have been refused has no slot to release.
        assert hold(alice).statuses[0].remaining == 0


def test_it_is_not_estimated_nor_replayed(alice: User) -> None:
    with pytest.raises(ValueError, match="'2 concurrent' cannot be replayed"):
        replay([Rate.parse("2 concurrent")], [(1, 1)])
    hold(alice)
    collector.flush()
    policy = RatePolicy.objects.get()
    assert estimate(policy).refused_requests == 0
    policy.rates = "2 concurrent"
    with pytest.raises(NotEstimable, match="how long requests run is not recorded"):
        estimate(policy)


def test_units_are_given_back_to_the_other_limits(alice: User) -> None:
    with hold(alice):
        run("give-back", "--user", "alice", "--endpoint", "search", "--units", "1")
        assert [status.remaining for status in hold(alice).statuses] == [0, 99]


def test_a_boost_doubles_it_within_the_bound() -> None:
    assert doubled((Rate.parse("600 concurrent"), Rate.parse("5/s")), "token_bucket") == "1000 concurrent, 10/s"
