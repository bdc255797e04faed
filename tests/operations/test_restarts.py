"""Which counts start again when an edit of a plan assignment moves the day on which months begin."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User

from django_ratequota import Limiter
from django_ratequota.models import Plan, PlanAssignment
from django_ratequota.operations.restarts import restarts
from django_ratequota.runtime import process
from tests.support.windows import counted

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("fresh_policies", "tenants")]

#: Today is 21 November.
_FIRST, _15TH, _END = (datetime(2025, *day, tzinfo=UTC) for day in ((11, 1), (11, 15), (12, 15)))
_TODAY, _LAST = "2025-11-21", _END - timedelta(minutes=1)
_AT_ONCE = [(554, _TODAY)]


@pytest.fixture
def acme(free: Plan, limiter: Limiter, monkeypatch: pytest.MonkeyPatch) -> PlanAssignment:
    """The assignment of a customer whose month began on the 15th, and is over half."""
    monkeypatch.setattr(process, "limiter", lambda: limiter)
    counted(subject="tenant:acme", starts_at=_15TH, ends_at=_END, used=554, limit=1000)
    counted(subject="tenant:other", starts_at=_15TH, ends_at=_END, used=7, limit=1000)
    return PlanAssignment.objects.create(subject="tenant:acme", plan=free, anchor=15, starts_at=_FIRST)


def found(edited: PlanAssignment, **how: bool) -> list[tuple[int, str]]:
    return [(one.window.used, str(one.on)) for one in restarts(edited, **how)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"reason": "Contract 7"}, []),
        ({"anchor": 1}, _AT_ONCE),
        ({"anchor": None}, _AT_ONCE),
        ({"subject": "tenant:globex"}, _AT_ONCE),
        ({"starts_at": _END}, _AT_ONCE),
        ({"starts_at": _LAST, "anchor": 15}, _AT_ONCE),
        ({"ends_at": _15TH}, []),
        ({"ends_at": _LAST}, []),
    ],
)
def test_a_changed_assignment(acme: PlanAssignment, changes: dict[str, Any], expected: list[Any]) -> None:
    for name, value in changes.items():
        setattr(acme, name, value)
    assert found(acme) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"ends_at": _END}, []),
        ({"ends_at": _END, "anchor": 1}, _AT_ONCE),
        ({"starts_at": _LAST, "anchor": 1}, [(554, "2025-12-14")]),
        ({"starts_at": _END, "anchor": 1}, []),
        ({"anchor": 1, "ends_at": _15TH}, []),
    ],
)
def test_a_new_assignment(acme: PlanAssignment, fields: dict[str, Any], expected: list[Any]) -> None:
    new: dict[str, Any] = {
        "subject": acme.subject,
        "plan": acme.plan,
        "starts_at": _FIRST + timedelta(days=1),
        **fields,
    }
    assert found(PlanAssignment(**new)) == expected


def test_a_deleted_assignment(acme: PlanAssignment, settings: Any) -> None:
    assert found(acme, deleted=True) == _AT_ONCE
    settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": "builtins.repr"}
    assert found(acme, deleted=True) == []


def test_a_users_month_that_began_on_the_day_of_the_organisation(acme: PlanAssignment, alice: User) -> None:
    new = PlanAssignment(user=alice, plan=acme.plan, starts_at=_FIRST)
    counted(subject=f"user:{alice.pk}", starts_at=_15TH, ends_at=_END, used=554, limit=1000)
    assert found(new) == _AT_ONCE
    new.anchor = 15
    assert found(new) == []
