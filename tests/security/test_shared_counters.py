"""Information that a shared limit reveals to each of its callers, and how to hide it."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client
from django.urls import path

from django_ratequota.api import UsageView
from django_ratequota.models import Endpoint, RatePolicy
from tests.project import views
from tests.support.snippets import ROOT, snippet

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


def own_usage() -> Any:
    page: dict[str, Any] = {}
    exec(snippet(ROOT / "docs" / "api.md", "usage.py"), page)
    return page["OwnUsageView"].as_view()


urlpatterns = [
    path("decorated/", views.decorated),
    path("usage/", UsageView.as_view()),
    path("own-usage/", own_usage()),
]


@pytest.fixture(autouse=True)
def shared(settings: Any) -> None:
    settings.ROOT_URLCONF = __name__
    search = Endpoint.objects.create(name="search")
    RatePolicy.objects.create(endpoint=search, rates="10/3650day", counted_per="everyone")
    RatePolicy.objects.create(endpoint=search, rates="8/3650day")


def get(url: str, address: str = "203.0.113.1") -> Any:
    return Client(REMOTE_ADDR=address).get(url)


def remaining(url: str) -> list[tuple[str, int | None, int | None]]:
    return [(one["counted_per"], one["remaining"], one["used"]) for one in get(url).json()["limits"]]


def test_remaining_units_include_the_usage_of_others() -> None:
    """As in docs/security.md."""
    for used in range(1, 4):
        get("/decorated/", f"203.0.113.{10 + used}")
        assert ("everyone", 10 - used) in [one[:2] for one in remaining("/usage/")]
    assert ";r=6" in get("/decorated/").headers["RateLimit"]


def test_what_others_use_of_a_shared_limit(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "HEADERS": []}
    get("/decorated/")
    (own,) = [one for one in remaining("/own-usage/") if one[0] == "ip"]
    assert own[1] == 7
    assert ("everyone", None, None) in remaining("/own-usage/")
    assert ("everyone", 9) in [one[:2] for one in remaining("/usage/")], "HEADERS has no part in it"
