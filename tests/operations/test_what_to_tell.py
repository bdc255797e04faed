"""What to tell the customer of a refusal, by real decisions, as they are recorded."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from django_ratequota import check_request
from django_ratequota.models import Endpoint, Plan, PlanAssignment, RatePolicy
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.refusals import refusals
from django_ratequota.operations.what_to_tell import policies_of, what_to_tell
from tests.project.views import request_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "recording")]


@pytest.fixture
def alice(api_keys: None) -> User:
    """A user on Free, at the endpoint exports."""
    user = User.objects.create(username="alice")
    PlanAssignment.objects.create(user=user, plan=Plan.objects.create(name="Free", slug="free"))
    Endpoint.objects.create(name="exports")
    return user


def told(user: User | None, cost: int = 1) -> str:
    """Refuse the caller, and return the sentences about it, with the time of the next request as minutes from now."""
    for _ in range(10):
        request = request_from(user, address="203.0.113.7", headers={"X-Api-Key": "acme"})
        if not check_request(request, scope="exports", cost=cost).allowed:
            break
    collector.flush()
    [refusal] = refusals(1)

    def clock(at: float) -> str:
        return f"+{(at - refusal.at.timestamp()) / 60:.0f}"

    return what_to_tell(refusal, policies_of(refusal), clock)


@pytest.mark.parametrize(
    ("fields", "cost", "sentences"),
    [
        (
            {"plan": True, "endpoint": True, "rates": "3/hour fixed_window"},
            1,
            "Your plan Free allows 3 requests per hour for exports. You had used 3.",
        ),
        (
            {"user": True, "endpoint": True, "rates": "1/15min gcra"},
            1,
            "You are allowed 1 request per 15 minutes for exports. You had used 1. The next request is possible at",
        ),
        (
            {"subject": "tenant:acme", "counted_per": "tenant", "rates": "2/hour sliding_window_log"},
            1,
            "acme is allowed 2 requests per hour. You had used 2. The next request is possible at +60.",
        ),
        (
            {"counted_per": "ip", "rates": "2/hour sliding_window_log"},
            1,
            "Your address 203.0.113.7 is allowed 2 requests per hour. You had used 2.",
        ),
        (
            {"rates": "2/hour burst 4 gcra", "endpoint": True},
            1,
            "Everyone is allowed 2 requests per hour for exports, up to 4 at once. You had used 4.",
        ),
        (
            {"counted_per": "everyone", "rates": "2/month"},
            1,
            "All customers together are allowed 2 requests per month. 2 were used. The next",
        ),
        (
            {"plan": True, "counted_per": "plan", "rates": "2/week"},
            1,
            "All customers on the plan Free together are allowed 2 requests per week. 2 were used. The next",
        ),
        (
            {"plan": True, "rates": "10/day sliding_window_log"},
            4,
            "Your plan Free allows 10 units per day. You had used 8. This request needed 4. The next request is",
        ),
        (
            {"plan": True, "rates": "2 requests/day sliding_window_log"},
            4,
            "Your plan Free allows 2 requests per day. You had used 2. The next request is possible at +1440.",
        ),
        (
            {"plan": True, "rates": "3/min"},
            4,
            "You had used 0. This request needed 4. Waiting does not help, because one request needs more than",
        ),
        ({"plan": True, "endpoint": True, "rates": "blocked"}, 1, "Your plan Free does not include exports."),
        ({"user": True, "rates": "blocked"}, 1, "Your access is blocked."),
        ({"subject": "tenant:acme", "rates": "blocked", "endpoint": True}, 1, "Your access to exports is blocked."),
    ],
    ids=str,
)
def test_the_customer_is_told_what_is_allowed_what_was_used_and_when_to_try_again(
    alice: User, fields: dict[str, Any], cost: int, sentences: str
) -> None:
    objects = {"plan": Plan.objects.get(), "user": alice, "endpoint": Endpoint.objects.get()}
    RatePolicy.objects.create(**{name: objects[name] if value is True else value for name, value in fields.items()})
    assert sentences in told(alice, cost)


def test_of_several_limits_the_one_with_the_longest_wait_is_told(alice: User) -> None:
    RatePolicy.objects.create(rates="1/min sliding_window_log, 1/day sliding_window_log")
    assert (
        told(alice) == "Everyone is allowed 1 request per day. You had used 1. The next request is possible at +1440."
    )


def test_a_block_is_told_with_its_end(alice: User) -> None:
    now = timezone.now()
    RatePolicy.objects.create(user=alice, rates="blocked", ends_at=now + timedelta(hours=2))
    assert told(alice) == "Your access is blocked until +120."
    RatePolicy.objects.update(ends_at=now)
    [refusal] = refusals(1)
    assert what_to_tell(refusal, policies_of(refusal), lambda at: "12:00") == "Your access was blocked until 12:00."


def test_the_rest_is_told_of_a_policy_that_was_deleted_meanwhile(alice: User) -> None:
    RatePolicy.objects.create(plan=Plan.objects.get(), rates="1/day sliding_window_log")
    assert told(alice).startswith("Your plan Free allows")
    RatePolicy.objects.all().delete()
    [refusal] = refusals(1)
    when = what_to_tell(refusal, policies_of(refusal), lambda at: str(datetime.fromtimestamp(at, refusal.at.tzinfo)))
    assert when.startswith("You are allowed 1 request per day. You had used 1. The next request is possible at 2")


def test_while_redis_was_away_no_numbers_are_told(alice: User) -> None:
    RatePolicy.objects.create(rates="1/day")
    told(alice)
    [refusal] = refusals(1)
    text = what_to_tell(replace(refusal, error="timeout"), {}, str)
    assert text == "The limits could not be checked at that time, so the request was refused. Please try again."
