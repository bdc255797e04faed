"""Boosting all that refused a caller: one page, one reason, one transaction."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import DatabaseError
from django.test import Client
from django.utils import timezone

from django_ratequota.models import Endpoint, Plan, RatePolicy
from django_ratequota.monitoring.collector import collector
from tests.admin.test_explain import DOWN, LIST, PAGE
from tests.support.operators import a_customer, words_of
from tests.support.requests import check_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "recording")]

URL = f"{LIST}boost/"


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


def test_all_that_refused_is_boosted_at_once(operator: Client, alice: User) -> None:
    url = f"{URL}?user={alice.pk}"
    page = words_of(operator.get(url))
    rows = fields(page)
    assert sorted(rows.values()) == ["2/hour", "4/hour"]
    before = RatePolicy.objects.count()
    done = operator.post(url, {**rows, "until": "hours", "reason": "Ticket 4711", "post": "yes"})
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
    assert len(re.findall(r"Boost granted: [24]/hour until [^<]*, instead of [12]/hour", said)) == 2


def test_an_empty_row_is_left_out(operator: Client, alice: User) -> None:
    url = f"{URL}?user={alice.pk}"
    rows = fields(words_of(operator.get(url)))
    kept = {name: "7/hour" if rates == "4/hour" else "" for name, rates in rows.items()}
    assert operator.post(url, {**kept, "until": "day", "reason": "R", "post": "yes"}).status_code == 302
    [boost] = RatePolicy.objects.filter(user=alice, ends_at__isnull=False)
    assert (boost.rates, boost.endpoint and boost.endpoint.name) == ("7/hour", "search")


def test_nothing_is_granted_if_a_policy_is_not_in_force_any_more(operator: Client, alice: User) -> None:
    url = f"{URL}?user={alice.pk}"
    rows = {**fields(words_of(operator.get(url))), "gone-rates": "9/hour"}
    before = RatePolicy.objects.count()
    page = words_of(operator.post(url, {**rows, "until": "hour", "reason": "R", "post": "yes"}))
    assert "Another policy applies by now." in page
    assert "Nothing was saved." in page
    assert RatePolicy.objects.count() == before


def test_boosts_are_granted_together_or_not_at_all(
    operator: Client, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{URL}?user={alice.pk}"
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
        operator.post(url, {**rows, "until": "hour", "reason": "R", "post": "yes"})
    assert (len(saved), RatePolicy.objects.count()) == (2, before)


def test_what_cannot_be_boosted_is_listed_with_the_reason(operator: Client, alice: User) -> None:
    shared = RatePolicy.objects.get(counted_per="everyone")
    RatePolicy.objects.filter(pk=shared.pk).update(rates="6/month")
    RatePolicy.objects.filter(plan__isnull=False, endpoint__name="search").update(rates="100/hour")
    refuse(alice, "search", 6)
    page = words_of(operator.get(f"{URL}?user={alice.pk}"))
    assert "<b>search: 6/month for everyone together</b>: Everyone is counted together here." in page
    # A row whose policy does not refuse any more is offered all the same: it refused in the last day.
    assert sorted(fields(page).values()) == ["2/hour", "200/hour"]


def test_a_blocked_caller_is_told_why_nothing_can_be_boosted(operator: Client) -> None:
    alice = a_customer()
    RatePolicy.objects.filter(user=alice).update(rates="blocked")
    refuse(alice, "search", 1)
    page = operator.get(f"{URL}?user={alice.pk}", follow=True)
    text = words_of(page)
    assert "in the last day can be boosted. all endpoints: blocked – The caller is blocked here" in text


def test_redis_down_is_reported(operator: Client, alice: User, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": DOWN}
    text = words_of(operator.get(f"{URL}?user={alice.pk}", follow=True))
    assert "Redis did not answer (connection). What refused this caller cannot be looked up." in text
