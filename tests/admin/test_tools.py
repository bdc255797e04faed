"""The tool bar, and which models the index lists beside it."""

from __future__ import annotations

import re

import pytest
from django.test import Client

from django_ratequota.models import Plan, RatePolicy
from tests.support.operators import client_of, text_of

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("fresh_policies")]

APP = "/admin/django_ratequota/"
HISTORY = f'href="{APP}policychange/"'


def bar(client: Client, path: str) -> dict[str, str]:
    """Return the text of each link of the bar, and its ``aria-current``."""
    found = re.search(r'<nav class="ratequota-tools".*?</nav>', text_of(client.get(f"{APP}{path}")), re.DOTALL)
    links = re.findall(r'<a href="[^"]*"(?: aria-current="(\w+)")?>(.*?)</a>', found[0] if found else "")
    return {text: current for current, text in links}


def test_the_bar_is_on_every_page_and_marks_this_one(operator: Client) -> None:
    plan = Plan.objects.create(name="Free", slug="free")
    policy = RatePolicy.objects.create(plan=plan, rates="5/min")
    none = dict.fromkeys(("Explain", "Traffic", "Health", "Quotas", "Invoices", "Matrix", "History"), "")
    for path in (
        *("", "plan/", "ratepolicy/", "endpoint/", "subjectlist/", "listmember/", "planassignment/"),
        *(f"plan/{plan.pk}/change/", f"ratepolicy/{policy.pk}/change/"),
    ):
        assert bar(operator, path) == none, path
    for path, text, current in (
        ("ratepolicy/traffic/?span=day", "Traffic", "page"),
        ("ratepolicy/health/", "Health", "page"),
        ("ratepolicy/quotas/history/", "Quotas", "true"),
        ("plan/matrix/", "Matrix", "page"),
        ("policychange/", "History", "page"),
    ):
        assert bar(operator, path) == {**none, text: current}, path
    assert bar(operator, "plan/add/?_popup=1") == {}


def test_the_index_lists_what_links_do_not_lead_to(operator: Client) -> None:
    listed = re.findall(r'<tr class="[^"]*model-(\w+)', text_of(operator.get(APP)))
    assert sorted(set(listed)) == ["endpoint", "plan", "ratepolicy", "subjectlist"]
    only = client_of("view_policychange", name="auditor")
    assert HISTORY in text_of(only.get("/admin/")), "the way in"
    assert bar(only, "policychange/") == {"History": "page"}
