"""Outages as several workers saw them, joined to what operators read."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from django_ratequota.models import Outage
from django_ratequota.operations.outages import outages

pytestmark = pytest.mark.django_db

NIGHT = datetime(2026, 11, 26, 2, 0, tzinfo=UTC)
Saw = Callable[..., None]


@pytest.fixture
def saw() -> Saw:
    def saw(worker: str, first: float, last: float, policies: dict[str, Any] | None = None, **fields: Any) -> None:
        """Minutes after two in the night."""
        began, ended = (NIGHT + timedelta(minutes=minutes) for minutes in (first, last))
        values: dict[str, Any] = {"reason": "timeout", "allow": 0, "deny": 0, "local": 0, **fields}
        Outage.objects.create(
            id=uuid4(), worker=worker, began_at=began, ended_at=ended, policies=policies or {}, **values
        )

    return saw


def test_overlapping_times_of_several_workers_are_one_outage(saw: Saw) -> None:
    saw("a:1", 10, 20, {"7": {"allow": 4}, "8": {"deny": 2}}, allow=4, deny=2)
    saw("b:2", 12, 14, {"7": {"allow": 1, "local": 3}}, allow=1, local=3, reason="connection")
    saw("b:2", 20.5, 21, {"7": {"allow": 1}}, allow=1)
    saw("c:3", 23, 24, {"9": {"allow": 1}}, allow=1)
    later, one = outages(NIGHT)
    assert (one.began_at, one.ended_at) == (NIGHT + timedelta(minutes=10), NIGHT + timedelta(minutes=21))
    assert (one.workers, one.reasons) == ({"a:1", "b:2"}, {"timeout", "connection"})
    assert one.requests == {"allow": 6, "deny": 2, "local": 3}
    assert one.policies == {7: {"allow": 6, "local": 3}, 8: {"deny": 2}}
    assert (later.workers, later.requests["allow"]) == ({"c:3"}, 1)


def test_outages_of_a_time_and_of_policies(saw: Saw) -> None:
    saw("a:1", 10, 20, {"7": {"allow": 4}}, allow=4)
    saw("a:1", 40, 50, {"8": {"allow": 4}}, allow=4)
    assert len(outages(NIGHT + timedelta(minutes=20))) == 2, "it was not over by then"
    assert [one.policies.keys() for one in outages(NIGHT + timedelta(minutes=21))] == [{8}]
    assert [one.policies.keys() for one in outages(NIGHT, {7, 9})] == [{7}]
    assert outages(NIGHT, set()) == []
