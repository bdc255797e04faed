"""Who is near a limit: what is kept, in which window, and how the list follows resets, edits and boosts."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from django.contrib.auth.models import User

from django_ratequota.models import RatePolicy
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.near import Window
from django_ratequota.operations.near import near_counts, near_rows
from tests.support.requests import check_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "recording")]

MONTH = Window("fixed_window", "month")


def spend(user: Any, times: int, **more: Any) -> None:
    for _ in range(times):
        check_from(user, **more)
    collector.flush()


def listed(window: Window = MONTH, level: int = 50, start: int = 0, most: int = 50) -> list[tuple[str, int, int]]:
    """(subject, used, limit) of each row."""
    found = near_rows(window, level, lambda candidate: True, start, most)
    return [(row.status.bucket.subject, row.status.used, row.status.limit) for row in found.rows]


def test_a_subject_is_listed_from_half_of_its_limit_on(alice: User, redis_client: redis.Redis) -> None:
    RatePolicy.objects.create(rates="10/month")
    spend(alice, 4)
    assert near_counts() == []
    spend(alice, 1)
    assert near_counts() == [(MONTH, {50: 1, 80: 0, 100: 0})]
    assert listed() == [(f"user:{alice.pk}", 5, 10)]
    spend(alice, 3)
    assert listed(level=80) == [(f"user:{alice.pk}", 8, 10)]
    assert near_counts() == [(MONTH, {50: 1, 80: 1, 100: 0})]
