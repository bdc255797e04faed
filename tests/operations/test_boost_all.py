"""Boosting all that refused a caller: one page, one reason, one transaction."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import DatabaseError
from django.test import Client
from django.utils import timezone

from django_ratequota.models import Endpoint, Plan, RatePolicy
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.refusals import caller_refusals
from django_ratequota.operations.explain import ExplainQuery
from django_ratequota.operations.overrides import boostable
from tests.admin.test_explain import LIST, PAGE
from tests.support.operators import a_customer, client_of, words_of
from tests.support.requests import check_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "recording")]


@pytest.fixture
def alice() -> User:
    alice = a_customer()
    free = Plan.objects.get()
    reports = Endpoint.objects.create(name="reports")
    RatePolicy.objects.create(plan=free, endpoint=reports, rates="1/hour")
    RatePolicy.objects.filter(plan=free, endpoint__name="search").update(rates="2/hour")
    for scope in ("search", "reports"):
        refuse(alice, scope, 3)
    return alice


def refuse(user: User, scope: str, times: int, **kwargs: Any) -> None:
    decisions = [check_from(user, scope=scope, **kwargs) for _ in range(times)]
    assert not decisions[-1].allowed
    collector.flush()


def fields(text: str) -> dict[str, str]:
    found = re.findall(r'<input type="text" name="(\w+-rates)" value="(.*?)"', text)
    return dict(found)


def boost_all(operator: Client, **query: Any) -> str:
    """Return the link in Explain; "" where there is none."""
    text = operator.get(PAGE, query).content.decode()
    return unescape("".join(re.findall(rf'href="({LIST}boost/[^"]*)">Boost all that refused…', text)))


def test_all_that_refused_is_boosted_at_once(operator: Client, alice: User) -> None:
    url = boost_all(operator, user=alice.pk)
    rows = fields(words_of(operator.get(url)))
    assert sorted(rows.values()) == ["2/hour", "4/hour"]
    before = RatePolicy.objects.count()
    done = operator.post(url, {**rows, "until": "hours", "reason": "Ticket 4711"})
    assert (done.status_code, done["Location"]) == (302, f"{PAGE}?user={alice.pk}")
    boosted = RatePolicy.objects.filter(user=alice, reason="Ticket 4711")
    assert {(one.endpoint and one.endpoint.name, one.rates) for one in boosted} == {
        ("search", "4/hour"),
        ("reports", "2/hour"),
    }
    assert RatePolicy.objects.count() == before + 2
    assert {round((one.ends_at - timezone.now()).total_seconds() / 3600) for one in boosted if one.ends_at} == {2}
    assert [check_from(alice, scope=scope).allowed for scope in ("search", "reports")] == [True, True]
    assert LogEntry.objects.filter(object_id__in=[str(one.pk) for one in boosted]).count() == 2
    said = words_of(operator.get(PAGE, {"user": alice.pk}))
    assert sorted(re.findall(r"Boost granted for (\w+): ([24]/hour) until", said)) == [
        ("reports", "2/hour"),
        ("search", "4/hour"),
    ]
    assert not boost_all(operator, user=alice.pk), "the policies that refused are not in force now"


def test_only_who_may_grant_overrides_is_offered_boosts(alice: User) -> None:
    for permission, offered in (("view_ratepolicy", False), ("grant_override", True)):
        assert bool(boost_all(client_of(permission, name=permission), user=alice.pk)) is offered


def test_boosts_are_granted_together_or_not_at_all(
    operator: Client, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = boost_all(operator, user=alice.pk)
    rows = fields(words_of(operator.get(url)))
    save, saved = RatePolicy.save, []

    def fail_second(self: RatePolicy, *args: Any, **kwargs: Any) -> None:
        saved.append(self)
        if len(saved) == 2:
            raise DatabaseError
        save(self, *args, **kwargs)

    monkeypatch.setattr(RatePolicy, "save", fail_second)
    before = RatePolicy.objects.count()
    with pytest.raises(DatabaseError):
        operator.post(url, {**rows, "until": "hour", "reason": "R"})
    assert (len(saved), RatePolicy.objects.count()) == (2, before)


def test_a_limit_that_is_shared_is_not_among_them(operator: Client, alice: User) -> None:
    RatePolicy.objects.filter(counted_per="everyone").update(rates="6/month")
    RatePolicy.objects.filter(plan__isnull=False, endpoint__name="search").update(rates="100/hour")
    refuse(alice, "search", 6)
    # A policy that does not refuse any more is among them: it refused in the last day.
    assert sorted(fields(words_of(operator.get(boost_all(operator, user=alice.pk)))).values()) == [
        "2/hour",
        "200/hour",
    ]
    assert len(fields(words_of(operator.get(boost_all(operator, user=alice.pk, endpoint="reports"))))) == 1


def test_a_limit_that_redis_did_not_decide_is_not_among_them(alice: User) -> None:
    """“On error” decided, and higher rates change nothing."""
    explanation = ExplainQuery(user_id=str(alice.pk)).explain()
    found = caller_refusals(f"user:{alice.pk}").refusals
    assert len(boostable(explanation, found)) == 2
    assert boostable(explanation, [replace(refusal, error="connection") for refusal in found]) == []
