"""The message after an edit that is saved while Redis is down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections
from django.test import Client

from django_ratequota.models import Plan, RatePolicy
from tests.admin.test_admin import BASE, list_form, plan_form
from tests.admin.test_explain import DOWN

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

DOWN_MESSAGE = (
    "The change is saved, but Redis did not answer. Every worker applies it within 7 seconds (POLL_SECONDS)."
)

EDITS: dict[str, Callable[[RatePolicy], tuple[str, dict[str, Any]]]] = {
    "add": lambda policy: ("plan/add/", plan_form(Plan(name="Pro", slug="pro"), {"rates": "9/s"})),
    "edit in the list": lambda policy: ("ratepolicy/", list_form(policy, mode="log")),
    "page of our own": lambda policy: (
        f"plan/{policy.plan_id}/copy/",
        {"name": "Pro", "slug": "pro", "reason": "Ticket 4711"},
    ),
}


@pytest.fixture
def policy() -> RatePolicy:
    return RatePolicy.objects.create(plan=Plan.objects.create(name="Free", slug="free"), rates="1/s")


def messages_after(operator: Client, edit: tuple[str, dict[str, Any]]) -> list[str]:
    """Return the messages on the page after the edit."""
    path, form = edit
    response = operator.post(f"{BASE}/{path}", form, follow=True)
    assert len(response.redirect_chain) == 1, response.content
    return [str(message) for message in response.context["messages"]]


@pytest.mark.parametrize("atomic", [False, True], ids=["autocommit", "ATOMIC_REQUESTS"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_unpublished_edit_shows_when_it_will_apply(
    operator: Client, policy: RatePolicy, edit: Any, atomic: bool, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only message was "changed successfully", while workers used the old policy for up to POLL_SECONDS."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic)
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": DOWN, "POLL_SECONDS": 7}
    messages = messages_after(operator, edit(policy))
    assert len(messages) >= 2
    assert messages.count(DOWN_MESSAGE) == 1


def test_no_message_mentions_redis_while_it_works_or_nothing_changes(
    operator: Client, policy: RatePolicy, settings: Any
) -> None:
    added = messages_after(operator, EDITS["add"](policy))
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": DOWN}
    plan = Plan.objects.get(pk=policy.plan_id)
    unchanged = messages_after(operator, (f"plan/{plan.pk}/change/", plan_form(plan)))
    assert min(len(added), len(unchanged)) > 0
    assert "Redis" not in " ".join(added + unchanged)
