"""Fixtures of the tests of policy files."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from django.contrib.auth.models import User

from django_ratequota.models import Endpoint, Plan, PlanAssignment, RatePolicy
from tests.policyfile.examples import JANUARY


@pytest.fixture
def sample(alice: User) -> None:
    pro = Plan.objects.create(name="Pro", slug="pro", description="Paying.\nPromptly.")
    free = Plan.objects.create(name="Free", slug="free", default_for="authenticated")
    search = Endpoint.objects.create(name="search", cost=2)
    reports = Endpoint.objects.create(name="reports", routes="reports:*\n/api/reports/*", methods="GET POST")
    RatePolicy.objects.create(plan=pro, endpoint=search, rates="50/min", algorithm="gcra", on_error="deny")
    RatePolicy.objects.create(plan=free, endpoint=search, rates="10/min")
    RatePolicy.objects.create(rates="5/s", counted_per="ip", mode="log")
    RatePolicy.objects.create(subject="ip:203.0.113.0/24", endpoint=reports, rates="blocked")
    RatePolicy.objects.create(
        user=alice,
        rates="1000/min",
        starts_at=JANUARY,
        ends_at=JANUARY + timedelta(days=31, microseconds=5),
        reason="OPS-7: #1",
    )
    PlanAssignment.objects.create(user=alice, plan=pro, starts_at=JANUARY, reason="contract")


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:

    def write(text: str) -> str:
        path = tmp_path / "limits.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write
