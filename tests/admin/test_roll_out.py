"""The page that rolls a log-only policy out."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from django_ratequota.models import Plan, PolicyChange, RatePolicy
from tests.admin.test_history import url
from tests.admin.test_revert import confirm, revert_url
from tests.support.operators import client_of, text_of, words_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

BASE = "/admin/django_ratequota/ratepolicy"


@pytest.fixture
def pair(free: Plan) -> tuple[RatePolicy, RatePolicy]:
    """A plan's enforced policy, and the log-only one of its place."""
    usual = RatePolicy.objects.create(plan=free, rates="30/min")
    return usual, RatePolicy.objects.create(plan=free, rates="10/min", mode="log")


def page_of(policy: RatePolicy) -> str:
    return f"{BASE}/{policy.pk}/roll-out/"


def state() -> list[Any]:
    return sorted(RatePolicy.objects.values_list("pk", "rates", "mode"))


def test_a_roll_out_is_shown_then_done_and_undone(operator: Client, pair: tuple[RatePolicy, RatePolicy]) -> None:
    usual, trial = pair
    before = state()
    assert page_of(trial) in text_of(operator.get(f"{BASE}/{trial.pk}/change/"))
    assert page_of(usual) not in text_of(operator.get(f"{BASE}/{usual.pk}/change/"))
    page = words_of(operator.get(page_of(trial)))
    assert "This policy will be enforced: <bdi>plan Free × all endpoints: 10/min</bdi>" in page
    assert "which will be deleted: <bdi>plan Free × all endpoints: 30/min</bdi>" in page
    done = confirm(operator, page_of(trial), change_reason="OPS-1")
    assert done.headers["Location"] == f"{BASE}/{trial.pk}/change/"
    assert "Rolled out: the policy is enforced now." in text_of(operator.get(done.headers["Location"]))
    assert state() == [(trial.pk, "10/min", "enforce")]
    assert sorted(LogEntry.objects.values_list("object_id", "action_flag")) == [
        (str(usual.pk), 3),
        (str(trial.pk), 2),
    ]
    change = PolicyChange.objects.latest("pk")
    assert PolicyChange.objects.filter(change_id=change.change_id, reason="OPS-1").count() == 2
    assert "30/min" in words_of(operator.get(url(change)))
    confirm(operator, revert_url("save", change))
    assert state() == before


@pytest.mark.parametrize("meanwhile", ["rival", "trial", "rolled out"])
def test_what_another_operator_changed_meanwhile_is_shown_first(
    operator: Client, pair: tuple[RatePolicy, RatePolicy], meanwhile: str
) -> None:
    usual, trial = pair
    seen = re.search(r'name="seen" value="(\w+)"', text_of(operator.get(page_of(trial))))[1]  # type: ignore[index]
    if meanwhile == "rolled out":
        confirm(client_of(superuser=True, name="ben"), page_of(trial))
    else:
        RatePolicy.objects.filter(pk=(usual if meanwhile == "rival" else trial).pk).update(rates="20/min")
    page = operator.post(page_of(trial), {"seen": seen})
    if meanwhile == "rolled out":
        assert "The policy is not log only." in text_of(operator.get(page.headers["Location"]))
        return
    assert "An object was changed in the meantime. Compare again." in words_of(page)
    assert "20/min</bdi>" in words_of(page)
    assert [mode for _pk, _rates, mode in state()] == ["enforce", "log"]


@pytest.mark.parametrize(
    ("permissions", "override", "allowed"),
    [
        ("change_ratepolicy delete_ratepolicy", False, True),
        ("change_ratepolicy", False, False),
        ("view_ratepolicy delete_ratepolicy", False, False),
        ("grant_override", False, False),
        ("grant_override", True, True),
        ("change_ratepolicy delete_ratepolicy", True, False),
    ],
)
def test_it_needs_the_permissions_of_both_edits(permissions: str, override: bool, allowed: bool) -> None:
    audience = {"subject": "ip:203.0.113.7"} if override else {}
    RatePolicy.objects.create(rates="30/min", **audience)
    trial = RatePolicy.objects.create(rates="10/min", mode="log", **audience)
    client = client_of(*permissions.split())
    page = client.get(page_of(trial))
    unseen = permissions == "grant_override" and not override
    assert page.status_code == (200 if allowed else 404 if unseen else 403)
    assert client.post(page_of(trial), {"seen": "x"}).status_code == page.status_code
    form = client.get(f"{BASE}/{trial.pk}/change/")
    assert (page_of(trial) in form.content.decode()) is allowed
    RatePolicy.objects.exclude(pk=trial.pk).delete()
    alone = client.get(page_of(trial)).status_code == 200
    assert alone is (allowed or permissions == "change_ratepolicy")
    if alone:
        assert confirm(client, page_of(trial)).status_code == 302
        assert state() == [(trial.pk, "10/min", "enforce")]


def test_a_wide_network_needs_the_permission_to_change_policies() -> None:
    trial = RatePolicy.objects.create(rates="10/min", mode="log", subject="ip:203.0.0.0/8")
    assert client_of("grant_override").get(page_of(trial)).status_code == 403
