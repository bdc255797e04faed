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

from django_ratequota.models import Plan, PlanAssignment, RatePolicy
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
    window("user:1", 10, 170)
    window("user:2", 10, 30)
    for day in (1, 2, 31):
        window("user:2", 10, day, day=day, period="day")
    window("user:2", 11, 9)
    with time_machine.travel(datetime(2026, 11, 1, tzinfo=UTC)):
        assert run("usage").splitlines() == [
            "user:1  policy 7 (deleted)  all endpoints  100/month: 170 of 100, 70 over",
            "user:2  policy 7 (deleted)  all endpoints  100/day fixed_window: 34, 100 each day",
            "user:2  policy 7 (deleted)  all endpoints  100/month: 30 of 100",
        ]
        [line] = run("usage", "--month", "2026-11").splitlines()
        assert line.endswith("100/month: 9 of 100, so far: until 2026-12-01")
        assert run("usage", "--month", "2026-10", "--subject", "user:1", "--format", "csv").splitlines() == [
            '"name","subject","plan","reason","endpoint","counted_per","unit","rate","limit","used","over","mode",'
            '"begins","ends","first_day","last_day","complete","changed_at","policy"',
            '"","user:1","policy 7 (deleted)","","","","units","100/month","100","170","70","","2026-10-01",'
            '"2026-10-31","","","True","2026-10-01 00:00:00+00:00","7"',
        ]
        [found] = objects("2026-09")
    expected = {"subject": "user:1", "endpoint": None, "used": 5, "begins": "2026-09-01", "complete": True}
    assert found == {**found, **expected}


def test_usage_has_a_line_for_each_month_that_a_new_first_day_made() -> None:
    """Added up they were 130 of 50, an overage that nobody had."""
    window("tenant:acme", 10, 120)
    window("tenant:acme", 10, 10, day=20, limit=50, policy_id=8)
    shown = [(row["rate"], row["used"], row["limit"], row["over"], row["policy"]) for row in objects("2026-10")]
    assert shown == [("100/month", 120, 100, 20, 7), ("50/month", 10, 50, 0, 8)]


def test_a_trial_has_the_reason_of_its_assignment(free: Plan) -> None:
    policy = RatePolicy.objects.create(plan=free, rates="100/month")
    window("tenant:acme", 10, 12, policy_id=policy.pk)
    starts_at, ends_at = (datetime(2026, 10, day, tzinfo=UTC) for day in (3, 9))
    PlanAssignment.objects.create(
        subject="tenant:acme", plan=free, starts_at=starts_at, ends_at=ends_at, reason="Trial"
    )
    [line] = run("usage", "--month", "2026-10").splitlines()
    assert line.startswith("tenant:acme  Free (Trial)  all endpoints  100/month: 12 of 100")


def test_a_subject_forges_no_line_of_usage_and_no_formula() -> None:
    subject = "tenant:x\n=cmd|'/C calc'!A0;=1,100/month,1,9,100"
    window(subject, 10, 5)
    assert len(run("usage", "--month", "2026-10").splitlines()) == 1
    text = run("usage", "--month", "2026-10", "--format", "csv")
    [row] = csv.DictReader(io.StringIO(text))
    assert row["subject"] == subject.replace("=", "'=").replace("\n", "\\n")
    assert [line["subject"] for line in objects("2026-10")] == [subject]


def test_a_month_of_another_form_is_refused() -> None:
    for month in ("October", "9999-12"):
        with pytest.raises(CommandError, match=f"Enter the month as in 2026-10, not '{month}'"):
            run("usage", "--month", month)


def test_nothing_found_is_said_and_a_typo_is_an_error(capsys: pytest.CaptureFixture[str], settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "tests.project.views.tenant"}}
    window("tenant:acme", 10, 5)
    named = ("usage", "--month", "2026-11", "--format", "csv")
    assert len(run(*named).splitlines()) == len(run(*named, "--subject", "tenant:acme").splitlines()) == 1
    said = "No usage in 2026-11"
    assert capsys.readouterr().err.splitlines() == [said, f"{said} by tenant:acme"]
    with pytest.raises(CommandError, match=r"^No usage of 'tenant:acmee' is recorded$"):
        run(*named, "--subject", "tenant:acmee")
