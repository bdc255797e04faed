"""Two checks of a request under different limits of one counter, as the user became known between them."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User

from django_ratequota import check_request
from django_ratequota.engine.decision import Decision
from django_ratequota.engine.rates import ALGORITHMS
from django_ratequota.models import Endpoint, Plan, RatePolicy
from django_ratequota.runtime import default_limiter
from tests.conftest import Check
from tests.enforcement.test_check import CLOSED, left, monitored, room
from tests.project.views import request_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


@pytest.fixture
def plan() -> Plan:
    return Plan.objects.create(name="x", slug="x", default_for="authenticated")


def twice(check: Check, user: User, *, cost: int = 1, later: int = 1) -> Decision:
    """Return the decision of the second check, by when the user is known."""
    request = request_from()
    assert check(request, None, cost).allowed
    request.user = user
    return check(request, None, later)


def per_ip(rates: str, **fields: Any) -> RatePolicy:
    return RatePolicy.objects.create(counted_per="ip", rates=rates, **fields)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("mode", ["enforce", "log"])
def test_the_limit_of_the_user_is_enforced(check: Check, alice: User, plan: Plan, algorithm: str, mode: str) -> None:
    """The units of the first check were taken for paid, whatever it was that they were checked under."""
    per_ip("100/1000day", algorithm=algorithm, mode=mode)
    own = per_ip("2/1000day", algorithm=algorithm, plan=plan)
    found = [twice(check, alice) for _ in range(4)]
    assert [(one.allowed, *room(one)) for one in found] == [
        (True, "1/2"),
        (True, "0/2"),
        (False, "0/2"),
        (False, "0/2"),
    ]
    assert {status.bucket.policy_id for one in found for status in one.statuses} == {own.pk}
    assert found[2].retry_after
    assert room(check_request(request_from(), cost=0)) == ["98/100"], "refused requests are charged nowhere"


def test_a_user_s_own_limit_is_enforced(check: Check, alice: User) -> None:
    per_ip("100/hour")
    per_ip("2/hour", user=alice)
    assert [twice(check, alice).allowed for _ in range(4)] == [True, True, False, False]


def test_a_calendar_window(check: Check, alice: User, plan: Plan) -> None:
    per_ip("100/month")
    per_ip("2/month", plan=plan)
    assert [twice(check, alice).allowed for _ in range(4)] == [True, True, False, False]


def test_a_limit_with_more_room_charges_nothing_more(check: Check, alice: User, plan: Plan) -> None:
    per_ip("3/hour")
    per_ip("50/hour", plan=plan)
    assert [room(twice(check, alice)) for _ in range(3)] == [["49/50"], ["48/50"], ["47/50"]]


@pytest.mark.parametrize(("later", "found"), [(5, ["45/50"]), (3, ["47/50"]), (1, ["47/50"]), (51, ["50/50"])])
def test_a_later_cost_is_charged_for_what_exceeds_the_paid_one(
    check: Check, alice: User, plan: Plan, later: int, found: list[str]
) -> None:
    per_ip("30/hour")
    per_ip("50/hour", plan=plan)
    decision = twice(check, alice, cost=3, later=later)
    assert decision.allowed == (later <= 50)
    assert decision.statuses[0].retry_after_us == (0 if decision.allowed else None)
    assert room(check_request(request_from(alice), cost=0)) == found


def test_the_decision_settles_all_units_of_the_request(check: Check, alice: User, plan: Plan) -> None:
    per_ip("30/hour")
    per_ip("50/hour", plan=plan)
    twice(check, alice).settle(5)
    assert room(check_request(request_from(alice), cost=0)) == ["45/50"]


def test_a_refusal_elsewhere_refunds_the_first_check(check: Check, alice: User, plan: Plan) -> None:
    per_ip("100/hour")
    per_ip("50/hour", plan=plan)
    RatePolicy.objects.create(rates="1/hour", counted_per="everyone", plan=plan)
    assert [twice(check, alice).allowed for _ in range(3)] == [True, False, False]
    assert left(check_request(request_from(), cost=0)) == [99]


def test_a_log_only_limit_without_room_does_not_stop_the_enforced_one_counting(
    check: Check, alice: User, plan: Plan
) -> None:
    """It applies beside the plan's limit, and instead of it as long as the user is not known."""
    per_ip("50/hour", plan=plan)
    per_ip("3/hour", subject="203.0.113.0/24", mode="log")
    for _ in range(5):
        assert twice(check, alice).allowed
    assert room(check_request(request_from(alice), cost=0)) == ["45/50", "0/3"]


def test_a_third_check_knows_the_second(check: Check, alice: User, plan: Plan) -> None:
    per_ip("100/hour")
    per_ip("5/hour", plan=plan)
    request = request_from()
    check(request)
    request.user = alice
    check(request)
    with monitored() as commands:
        assert check(request).allowed
    assert commands == []
    assert room(request.ratequota) == ["4/5"]


def test_while_redis_is_down(settings: Any, check: Check, alice: User, plan: Plan) -> None:
    per_ip("100/hour", on_error="local")
    per_ip("2/hour", on_error="local", plan=plan)
    settings.RATEQUOTA = {**CLOSED, "LOCAL_SHARE": 1}
    assert [twice(check, alice).allowed for _ in range(4)] == [True, True, False, False]


def test_in_this_process_alone(settings: Any, alice: User, plan: Plan) -> None:
    per_ip("100/hour")
    per_ip("2/hour", plan=plan)
    settings.RATEQUOTA = {"REDIS_URL": "memory://", "PREFIX": "rqtwice"}
    assert [twice(check_request, alice).allowed for _ in range(4)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("strangers", "allowed"), [("3 concurrent", [True, True, False]), ("2 concurrent", [True, True])]
)
def test_concurrent_requests(check: Check, alice: User, plan: Plan, strangers: str, allowed: list[bool]) -> None:
    """The slot that the first check took under a limit of its own was taken for one of the user's limit."""
    search = Endpoint.objects.create(name="search")
    RatePolicy.objects.create(endpoint=search, counted_per="ip", rates=strangers)
    RatePolicy.objects.create(endpoint=search, counted_per="ip", rates="2 concurrent", plan=plan)
    requests, found = [request_from() for _ in allowed], []
    for request in requests:
        assert check(request, "search").allowed
        request.user = alice
        found.append(check(request, "search"))
    assert [one.allowed for one in found] == allowed
    bucket = found[0].statuses[0].bucket
    assert len(default_limiter().slots(bucket)) == 2
    for request in requests:
        request.close()
    assert default_limiter().slots(bucket) == []
