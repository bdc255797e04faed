"""``on_error = local``: while Redis is down, each process holds callers to its share, a quarter, of their limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_ratequota import check_request
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.operations.explain import explain_caller
from django_ratequota.policies.requests.caller import DescribedCaller
from django_ratequota.responses import status_code
from tests.conftest import Check, Settle
from tests.enforcement.test_check import CLOSED, left
from tests.project.views import request_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


@pytest.fixture
def down(settings: Any) -> None:
    settings.RATEQUOTA = CLOSED


def policy(rates: str, on_error: str = "local", **values: Any) -> RatePolicy:
    return RatePolicy.objects.create(rates=rates, on_error=on_error, **values)


# --- The share. ---


@pytest.mark.parametrize("when", ["from the first request on", "later"])
@pytest.mark.parametrize(
    ("setting", "on_error"), [("allow", "local"), ("deny", "local"), ("local", "local"), ("local", "")]
)
def test_each_process_admits_its_share_and_refuses_the_rest(
    check: Check, settings: Any, when: str, setting: str, on_error: str
) -> None:
    policy("8/hour", on_error)
    if when == "later":
        assert check(request_from()).statuses[0].remaining == 7
    settings.RATEQUOTA = {**CLOSED, "ON_ERROR": setting}
    decisions = [check(request_from()) for _ in range(4)]
    assert [decision.allowed for decision in decisions] == [True, True, False, False]
    assert [left(decision) for decision in decisions] == [[1], [0], [0], [0]]
    for decision in decisions:
        assert (decision.error, decision.degraded, decision.denied_by) == ("connection", True, ())
    assert decisions[2].violated == ("all/hour",)
    assert decisions[2].retry_after == pytest.approx(1800, abs=60)
    assert status_code(decisions[2]) == 429
    # Another caller has a share of its own.
    assert check(request_from(address="203.0.113.8")).allowed


# --- Together with other policies. ---


@pytest.mark.usefixtures("down")
def test_one_that_denies_closes_the_door_and_nothing_is_counted(check: Check, search: Endpoint) -> None:
    policy("8/hour")
    policy("8/hour", "deny", endpoint=search)
    for _ in range(5):
        decision = check(request_from(), "search")
        assert (decision.allowed, decision.denied_by, status_code(decision)) == (False, ("search/hour",), 503)
        assert decision.retry_after == 1
    assert [check(request_from()).allowed for _ in range(3)] == [True, True, False]
    # Without room there as well, it still is the store's failure.
    decision = check(request_from(), "search")
    assert (decision.violated, status_code(decision)) == (("search/hour", "all/hour"), 503)


@pytest.mark.usefixtures("down")
def test_buckets_with_allow_are_not_counted_and_local_ones_decide(check: Check, search: Endpoint) -> None:
    policy("4/hour", "allow")
    policy("12/hour", endpoint=search)
    decisions = [check(request_from(), "search") for _ in range(4)]
    assert [decision.allowed for decision in decisions] == [True, True, True, False]
    assert [status.bucket.title for status in decisions[0].statuses] == ["search/hour"]
    assert all(check(request_from()).allowed for _ in range(9))


@pytest.mark.usefixtures("down")
def test_who_is_blocked_stays_blocked_and_is_counted_nowhere(check: Check, search: Endpoint) -> None:
    policy("8/hour")
    policy("blocked", endpoint=search)
    for _ in range(5):
        decision = check(request_from(), "search")
        assert (decision.allowed, decision.blocked_by) == (False, ("search/blocked",))
        assert (decision.retry_after, status_code(decision)) == (None, 429)
    assert [check(request_from()).allowed for _ in range(3)] == [True, True, False]


@pytest.mark.usefixtures("down")
def test_explaining_counts_nothing() -> None:
    policy("8/hour")
    for _ in range(5):
        decision = explain_caller(DescribedCaller(user_id=None, address="203.0.113.7"), scope=None).decision
        assert (decision.allowed, left(decision)) == (True, [2])
    assert [check_request(request_from()).allowed for _ in range(3)] == [True, True, False]
    assert not explain_caller(DescribedCaller(user_id=None, address="203.0.113.7"), scope=None).decision.allowed


# --- Settling. ---


@pytest.mark.usefixtures("down")
def test_what_is_settled_counts_here_too(settle: Settle, search: Endpoint) -> None:
    policy("40/hour")
    policy("80/hour", endpoint=search)
    decision = check_request(request_from(), "search")
    assert left(decision) == [9, 19]
    assert left(settle(decision, "charge", 4)) == [5, 15]
    assert left(settle(decision, "refund", 2)) == [7, 17]
    assert left(settle(settle(decision, "charge", 1), "refund", 1)) == [7, 17]
    assert left(check_request(request_from(), "search")) == [6, 16]
    settle(decision, "charge", 100)
    decision = check_request(request_from(), "search")
    assert (decision.allowed, left(decision)) == (False, [0, 0])


@pytest.mark.usefixtures("down")
def test_what_was_admitted_uncounted_settles_nothing(settle: Settle) -> None:
    policy("4/hour", "allow")
    decision = check_request(request_from())
    assert settle(decision, "charge", 1) is decision
    assert settle(decision, "refund", 1) is decision
    assert settle(decision, "settle", 349).degraded


# --- Responses. ---


def rate_headers(response: Any) -> list[str]:
    return [name for name in response.headers if "ratelimit" in name.lower()]


@pytest.mark.usefixtures("down")
@pytest.mark.parametrize("path", ["/bare/", "/class/", "/aclass/", "/search/"])
def test_a_refusal_has_a_retry_after_and_no_numbers(get: Callable[..., Any], path: str) -> None:
    policy("8/hour")
    responses = [get(path) for _ in range(3)]
    assert [response.status_code for response in responses] == [200, 200, 429]
    assert [rate_headers(response) for response in responses] == [[], [], []]
    assert ["Retry-After" in response.headers for response in responses] == [False, False, True]
    assert 1740 <= int(responses[2].headers["Retry-After"]) <= 1800
