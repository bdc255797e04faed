"""docs/howto/organisations.md: an organisation's month from its purchase to its invoice."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.test import Client

from django_ratequota import Decision, Limiter
from django_ratequota.headers import decision_headers
from django_ratequota.monitoring import ledger
from django_ratequota.operations.invoices import invoice_lines
from django_ratequota.runtime import OncePerSettings, process
from tests.conftest import Clock
from tests.package.test_docs import DOCS, Page
from tests.support.operators import text_of
from tests.support.requests import check_from

pytestmark = pytest.mark.django_db(transaction=True)

_DAY = 86_400 * 10**6


@pytest.fixture(autouse=True)
def _on_20_october(fresh_policies: None, checkpointing: None, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count on a clock that each decision advances, and write each checkpoint at once."""
    clock.now_us = round(datetime(2025, 10, 20, 12, tzinfo=UTC).timestamp()) * 10**6

    def tick() -> int:
        clock.advance(us=1)
        return clock.now_us

    monkeypatch.setattr(process, "limiter", OncePerSettings(lambda: Limiter(clock=tick)))
    monkeypatch.setattr(ledger.background, "keep", ledger.flush)


@pytest.fixture(autouse=True)
def _page(_on_20_october: None, settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("alice", "bob", "carol"):
        User.objects.create_user(name)
    Page(DOCS / "howto" / "organisations.md", settings, monkeypatch, tmp_path).run()


def ask(name: str) -> Decision:
    return check_from(User.objects.get(username=name))


def invoiced(month: str) -> list[tuple[str, int]]:
    return [(line.subject, line.used) for line in invoice_lines(month) if line.subject.startswith("tenant:")]


def month_ends(decision: Decision) -> datetime:
    [status] = [one for one in decision.statuses if one.bucket.rate.calendar]
    return datetime.fromtimestamp((decision.at_us + status.reset_after_us) / 10**6, UTC)


def test_resets_name_the_customer_s_day() -> None:
    decision = ask("alice")
    assert month_ends(decision) == datetime(2025, 11, 15, tzinfo=UTC)
    headers = decision_headers(decision)
    assert f'"all/month per tenant";q=1000000;w={31 * 86_400}' in headers["RateLimit-Policy"]
    assert f'"all/month per tenant";r=999997;t={25 * 86_400 + 43_200}' in headers["RateLimit"]
    assert month_ends(ask("carol")) == datetime(2025, 11, 1, tzinfo=UTC), "no assignment says another day"


def test_the_invoice_is_exact_though_redis_is_lost(clock: Clock, redis_client: redis.Redis) -> None:
    for name in ("alice", "bob", "alice"):
        ask(name)
    redis_client.flushall()
    clock.now_us += 14 * _DAY  # 3 November
    ask("bob")
    clock.now_us += 20 * _DAY  # 23 November
    ask("alice")
    assert (invoiced("2025-10"), invoiced("2025-11")) == ([("tenant:acme", 6)], [("tenant:acme", 1)])


def test_operators_see_the_organisation_s_quota(operator: Client) -> None:
    page = "/admin/django_ratequota/ratepolicy/"
    listed = text_of(operator.get(f"{page}quotas/", {"level": 0}))
    assert "Acme GmbH" in listed
    assert "11/15/2025 00:00:00 UTC" in listed
    explained = text_of(operator.get(f"{page}explain/", {"identifier_tenant": "acme"}))
    assert "assigned to tenant:acme" in explained
    assert "11/15/2025 00:00:00 UTC" in explained
