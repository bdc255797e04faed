"""What an operator's pages take in a project with 3,000 views: the URLconf is read once, not by each page."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType, ModuleType
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import Client
from django.urls import path, reverse

import django_ratequota
from django_ratequota.models import Endpoint, RatePolicy
from tests.project import urls
from tests.support.pages import form_of

PACKAGE = django_ratequota.__path__[0]
EXPLAIN = "/admin/django_ratequota/ratepolicy/explain/"


@pytest.fixture
def many_views(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    many = ModuleType("many")
    made: list[Any] = [
        path(f"api/v{n}/<int:pk>/", lambda request, pk: HttpResponse(), name=f"v{n}") for n in range(3000)
    ]
    many.urlpatterns = [*urls.urlpatterns, *made]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "many", many)
    settings.ROOT_URLCONF = "many"


def calls_of(function: Callable[[], object]) -> int:
    """Return the calls of functions of the package."""
    count = 0

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        code = frame.f_code
        count += event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.django_db(transaction=True)
def test_pages_do_not_read_the_urlconf_again(many_views: None, fresh_policies: None, admin_client: Client) -> None:
    """A save took 3,800 calls and Explain 7,000, most of them to read 3,000 views."""
    endpoint = Endpoint.objects.create(name="search", routes="/api/v7/*")
    policy = RatePolicy.objects.create(endpoint=endpoint, rates="10/min")
    alice = User.objects.create(username="alice")
    change = reverse("admin:django_ratequota_ratepolicy_change", args=[policy.pk])
    rates = iter(range(20, 30))

    def save() -> None:
        filled = {**form_of(admin_client.get(change)), "rates": f"{next(rates)}/min"}
        saves = partial(admin_client.post, change, filled)
        found.setdefault("save", []).append(calls_of(lambda: answers.append(saves().status_code)))

    def explain() -> None:
        asks = partial(
            admin_client.get, "/admin/django_ratequota/ratepolicy/explain/", {"user": alice.pk, "endpoint": "search"}
        )
        found.setdefault("explain", []).append(calls_of(lambda: answers.append(asks().status_code)))

    answers: list[int] = []
    found: dict[str, list[int]] = {}
    for _ in range(2):  # the first one reads it
        save()
        explain()
    assert answers == [302, 200] * 2
    bounds = {"save": 500, "explain": 700}
    assert {page: calls for page, calls in found.items() if calls[-1] > bounds[page]} == {}
