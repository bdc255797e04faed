"""The Quotas page and its CSV: what they list, for whom, and what they say without Redis."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.monitoring.collector import collector
from tests.support.operators import text_of
from tests.support.requests import check_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "recording")]

PAGE = "/admin/django_ratequota/ratepolicy/quotas/"
CSV = f"{PAGE}csv/"


def spend(user: Any, times: int, **more: Any) -> None:
    for _ in range(times):
        check_from(user, **more)
    collector.flush()


def test_the_page_lists_who_is_near(operator: Client, alice: User, search: Endpoint) -> None:
    policy = RatePolicy.objects.create(endpoint=search, rates="10/month")
    assert "Nobody has used half of a limit." in text_of(operator.get(PAGE))
    spend(alice, 8, scope="search")
    text = text_of(operator.get(PAGE))
    assert "user alice" in text
    assert "8 of 10" in text
    assert f"boost/?user={alice.pk}&amp;endpoint=search&amp;policy={policy.pk}" in text
