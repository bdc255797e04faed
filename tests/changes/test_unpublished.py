"""The message after an edit that is saved while Redis is down."""

from __future__ import annotations

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


@pytest.fixture
def policy() -> RatePolicy:
    return RatePolicy.objects.create(plan=Plan.objects.create(name="Free", slug="free"), rates="1/s")


def messages_after(operator: Client, path: str, form: dict[str, Any]) -> list[str]:
    response = operator.post(f"{BASE}/{path}", form, follow=True)
    assert len(response.redirect_chain) == 1, response.content
    return [str(message) for message in response.context["messages"]]


@pytest.mark.parametrize("atomic", [False, True], ids=["autocommit", "ATOMIC_REQUESTS"])
def test_an_unpublished_edit_shows_when_it_will_apply(
    operator: Client, policy: RatePolicy, atomic: bool, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only message was "changed successfully", while workers used the old policy for up to POLL_SECONDS."""
    plan = Plan.objects.get(pk=policy.plan_id)
    added = messages_after(operator, "plan/add/", plan_form(Plan(name="Pro", slug="pro"), {"rates": "9/s"}))
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic)
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": DOWN, "POLL_SECONDS": 7}
    unchanged = messages_after(operator, f"plan/{plan.pk}/change/", plan_form(plan))
    assert "Redis" not in " ".join(added + unchanged)
    copy = {"name": "Max", "slug": "max", "factor": "1", "reason": "Ticket 4711"}
    for path, form in (("ratepolicy/", list_form(policy, mode="log")), (f"plan/{plan.pk}/copy/", copy)):
        found = messages_after(operator, path, form)
        assert (len(found) >= 2, found.count(DOWN_MESSAGE)) == (True, 1), path
