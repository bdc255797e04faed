"""``manage.py ratequota usage``: what callers have used of their quotas in a month."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import time_machine
from django.core.management import CommandError

from tests.support.commands import run
from tests.support.windows import counted

pytestmark = pytest.mark.django_db


def window(subject: str, month: int, used: int, *, day: int = 1, period: str = "month", **fields: Any) -> None:
    starts_at = datetime(2026, month, day, tzinfo=UTC)
    ends_at = starts_at + timedelta(days=1 if period == "day" else 30)
    named = {"subject": subject, "period": period, "limit": 100, "policy_id": 7, **fields}
    counted(starts_at=starts_at, ends_at=ends_at, used=used, **named)


def objects(month: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run("usage", "--month", month, "--format", "json").splitlines()]


def test_usage_of_a_month_is_the_sum_of_its_windows() -> None:
    window("user:1", 9, 5)
    window("user:1", 10, 70)
    window("user:2", 10, 30)
    for day in (1, 2, 31):
        window("user:2", 10, day, day=day, period="day")
    window("user:2", 11, 9)
    with time_machine.travel(datetime(2026, 11, 1, tzinfo=UTC)):
        assert run("usage").splitlines() == [
            "user:1  all endpoints  100/month: 70 of 100",
            "user:2  all endpoints  100/day fixed_window: 34 of 100 in 3 windows",
            "user:2  all endpoints  100/month: 30 of 100",
        ]
        [line] = run("usage", "--month", "2026-11").splitlines()
        assert line == "user:2  all endpoints  100/month: 9 of 100, so far: until 2026-12-01"
    assert run("usage", "--month", "2026-10", "--subject", "user:1", "--format", "csv").splitlines() == [
        "subject,endpoint,rate,windows,used,limit,begins,ends,policy",
        "user:1,,100/month,1,70,100,2026-10-01,2026-10-31,7",
    ]
    used = {"subject": "user:1", "endpoint": None, "rate": "100/month", "windows": 1, "used": 5, "limit": 100}
    assert objects("2026-09") == [{**used, "begins": "2026-09-01", "ends": "2026-10-01", "policy": 7}]


def test_usage_has_a_line_for_each_month_that_a_new_first_day_made() -> None:
    """Added up they were 130 of 50, an overage that nobody had."""
    window("tenant:acme", 10, 120)
    window("tenant:acme", 10, 10, day=20, limit=50, policy_id=8)
    shown = [(row["rate"], row["windows"], row["used"], row["limit"], row["policy"]) for row in objects("2026-10")]
    assert shown == [("100/month", 1, 120, 100, 7), ("50/month", 1, 10, 50, 8)]


def test_a_subject_forges_no_line_of_usage() -> None:
    subject = "tenant:x\ntenant:acme,,100/month,1,9,100"
    window(subject, 10, 5)
    assert len(run("usage", "--month", "2026-10").splitlines()) == 1
    text = run("usage", "--month", "2026-10", "--format", "csv")
    assert [row["subject"] for row in csv.DictReader(io.StringIO(text))] == [subject]


def test_a_month_of_another_form_is_refused() -> None:
    for month in ("October", "9999-12"):
        with pytest.raises(CommandError, match=f"Write the month as in 2026-10, not '{month}'"):
            run("usage", "--month", month)
