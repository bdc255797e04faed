"""What operators read after an edit that is saved while Redis is away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connections
from django.test import Client

from django_ratequota.models import Plan, RatePolicy
from tests.admin.test_admin import BASE, list_form, plan_form
from tests.admin.test_explain import DOWN

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

AWAY = "The change is saved, but Redis did not answer. Every worker applies it within 7 seconds (POLL_SECONDS)."

EDITS: dict[str, Callable[[RatePolicy], tuple[str, dict[str, Any]]]] = {
    "add": lambda policy: ("plan/add/", plan_form(Plan(name="Pro", slug="pro"), {"rates": "9/s"})),
    "edit in the list": lambda policy: ("ratepolicy/", list_form(policy, mode="log")),
    "delete": lambda policy: (f"ratepolicy/{policy.pk}/delete/", {"post": "yes"}),
    "delete of several": lambda policy: (
        "ratepolicy/",
        {"action": "delete_selected", "_selected_action": [policy.pk], "post": "yes"},
    ),
    "copy of a plan": lambda policy: (
        f"plan/{policy.plan_id}/copy/",
        {"name": "Pro", "slug": "pro", "reason": "Ticket 4711"},
    ),
}


@pytest.fixture
def operator() -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("root", email="root@example.com", password="root"))
    return client


@pytest.fixture
def policy() -> RatePolicy:
    return RatePolicy.objects.create(plan=Plan.objects.create(name="Free", slug="free"), rates="1/s")


def read(operator: Client, edit: tuple[str, dict[str, Any]]) -> list[str]:
    """Every message on the page that follows the edit."""
    path, form = edit
    response = operator.post(f"{BASE}/{path}", form, follow=True)
    assert len(response.redirect_chain) == 1, response.content
    return [str(message) for message in response.context["messages"]]


@pytest.mark.parametrize("atomic", [False, True], ids=["autocommit", "ATOMIC_REQUESTS"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_that_could_not_be_published_says_when_it_binds(
    operator: Client, policy: RatePolicy, edit: Any, atomic: bool, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "changed successfully" alone, and workers went on by the old policy for up to POLL_SECONDS."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic)
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": DOWN, "POLL_SECONDS": 7}
    told = read(operator, edit(policy))
    assert len(told) >= 2
    assert told.count(AWAY) == 1


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_nothing_is_said_of_redis_while_it_is_there(operator: Client, policy: RatePolicy, edit: Any) -> None:
    told = read(operator, edit(policy))
    assert told != []
    assert "Redis" not in " ".join(told)


def test_a_save_that_changes_nothing_has_nothing_to_publish(
    operator: Client, policy: RatePolicy, settings: Any
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": DOWN}
    plan = Plan.objects.get()
    told = read(operator, (f"plan/{plan.pk}/change/", plan_form(plan)))
    assert told != []
    assert "Redis" not in " ".join(told)
