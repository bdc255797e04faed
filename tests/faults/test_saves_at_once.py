"""Saves at the very same moment, each in a connection of its own: none fails, none is lost. Needs a real server."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import pytest
from django.db import connections
from django.test import Client

from django_ratequota.models import Endpoint, Plan, PolicyChange, RatePolicy
from django_ratequota.policyfile import apply_file
from tests.support.operators import client_of, words_of
from tests.support.pages import form_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

BASE = "/admin/django_ratequota"
FILE = """
version: 1
plans:
- {slug: free, name: Free}
- {slug: pro, name: Pro}
endpoints:
- {name: search}
policies:
- {plan: free, endpoint: search, rates: RATES}
- {plan: free, rates: 100/min}
- {plan: pro, endpoint: search, rates: 20/min}
"""
WITHOUT = FILE.split("- {slug: pro")[0] + "endpoints: []\npolicies:\n- {plan: free, rates: 100/min}\n"


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """Run the works on threads that begin together, and return what they return; raises their exceptions."""
    start = Barrier(len(works))

    def run(work: Callable[[], Any]) -> Any:
        start.wait(timeout=60)
        try:
            return work()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(works)) as threads:
        return list(threads.map(run, works))


def edit(client: Client, url: str, **edits: str) -> None:
    """Open the page and save it with these edits; it may be gone, or have been changed meanwhile."""
    page = client.get(url)
    if page.status_code == 200:
        form = form_of(page)
        known = {name: value for name, value in edits.items() if name in form}
        assert client.post(url, {**form, **known, "_save": "1"}).status_code in {200, 302}


def test_an_import_that_prunes_beside_edits() -> None:
    anna, ben = (client_of(superuser=True, name=name) for name in ("anna", "ben"))

    def import_files() -> None:
        for number in range(20):
            apply_file(FILE.replace("RATES", f"{number + 1}/min"), prune=True)
            apply_file(WITHOUT, prune=True)

    def edit_plans() -> None:
        for number in range(40):
            edit(
                anna,
                f"{BASE}/plan/{Plan.objects.get(slug='free').pk}/change/",
                **{
                    "description": str(number),
                    "policies-0-rates": f"{number + 1}/s",
                    "policies-1-mode": "log",
                },
            )

    def edit_policies() -> None:
        for number in range(40):
            edit(ben, f"{BASE}/ratepolicy/", **{f"form-{row}-mode": ("log", "off")[number % 2] for row in range(3)})
            for endpoint in Endpoint.objects.all():
                edit(ben, f"{BASE}/endpoint/{endpoint.pk}/change/", cost=str(number % 5 + 1))

    apply_file(FILE.replace("RATES", "9/min"), prune=True)
    at_once(import_files, edit_plans, edit_policies)
    assert PolicyChange.objects.filter(actor__username="anna").exists()
    assert PolicyChange.objects.filter(actor__username="ben").exists()


def test_two_saves_of_one_policy() -> None:
    anna, ben = (client_of(superuser=True, name=name) for name in ("anna", "ben"))
    policy = RatePolicy.objects.create(rates="30/min")
    url = f"{BASE}/ratepolicy/{policy.pk}/change/"

    def posts(mine: dict[str, str], other: dict[str, str]) -> list[Any]:
        forms = [(client, {**form_of(client.get(url)), "_save": "1"}) for client in (anna, ben)]
        edits = zip(forms, (mine, other), strict=True)
        return at_once(*(partial(client.post, url, {**form, **own}) for (client, form), own in edits))

    for number in range(10):
        posts({"rates": f"{number + 1}/s"}, {"reason": f"OPS-{number}"})
        policy.refresh_from_db()
        assert (policy.rates, policy.reason) == (f"{number + 1}/s", f"OPS-{number}")
        pages = posts({"rates": "1/hour"}, {"rates": "2/hour"})
        assert sorted(page.status_code for page in pages) == [200, 302]
        (refused,) = (page for page in pages if page.status_code == 200)
        assert "Save again to overwrite that." in words_of(refused)
