"""The matrix page: its cells agree with the resolver, its links, and its permissions."""

from __future__ import annotations

import html
import re
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.utils import timezone

from django_ratequota.models import Endpoint, Plan, RatePolicy
from tests.support.operators import client_of, text_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

BASE = "/admin/django_ratequota"
MATRIX = f"{BASE}/plan/matrix/"
DAY = timedelta(days=1)


@pytest.fixture
def free() -> Plan:
    return Plan.objects.create(name="Free", slug="free", default_for="anonymous")


def cells(page: Any) -> dict[tuple[str, str], str]:
    """Return (endpoint, plan) -> the markup of the cell."""
    table = re.search(r'matrix-box".*?<table>(.*?)</table>', text_of(page), re.S)[1]  # type: ignore[index]
    head, *rows = re.findall(r"<tr>(.*?)</tr>", table, re.S)
    plans = [words(re.sub("<small>.*?</small>", "", cell)) for cell in re.findall(r"<th.*?>(.*?)</th>", head, re.S)]
    found = {}
    for row in rows:
        name = words(re.sub("<small>.*?</small>", "", re.search(r"<th.*?>(.*?)</th>", row, re.S)[1]))  # type: ignore[index]
        for plan, cell in zip(plans[1:], re.findall(r"<td>(.*?)</td>", row, re.S), strict=True):
            found[name, plan] = cell
    return found


def words(cell: str) -> str:
    """Return a cell's visible text."""
    cell = re.sub(r'<span class="ratequota-matrix-hidden">.*?</span>', "", cell)
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", cell)).split())


def links(cell: str) -> list[str]:
    return [html.unescape(link) for link in re.findall(r'href="(.*?)"', cell)]


def test_without_a_plan_nothing_is_counted_per_plan(operator: Client, free: Plan) -> None:
    """The column for everyone showed it in force, although such callers have no plan to count by."""
    RatePolicy.objects.create(counted_per="plan", rates="5/hour")
    found = cells(operator.get(MATRIX))
    assert "5/hour" in found["all endpoints", "Free"]
    assert "5/hour" not in found["all endpoints", "everyone"]


def test_charged_statuses_of_an_endpoint_are_shown(operator: Client, free: Plan, search: Endpoint) -> None:
    Endpoint.objects.create(name="login", charged_statuses="401, 5xx")
    rows = re.findall(r'<th scope="row">.*?</th>', text_of(operator.get(MATRIX)), re.S)
    assert [words(row) for row in rows] == ["all endpoints", "login only 401, 5xx charged", "search"]


def test_a_cell_shows_the_rates_in_force_and_links_to_their_policy(
    operator: Client, free: Plan, search: Endpoint
) -> None:
    pro = Plan.objects.create(name="Pro", slug="pro")
    own = RatePolicy.objects.create(plan=free, endpoint=search, rates="10/s, 1000/hour burst 50")
    everyone = RatePolicy.objects.create(endpoint=search, rates="5/s")
    per_ip = RatePolicy.objects.create(plan=free, counted_per="ip", rates="blocked")
    found = cells(operator.get(MATRIX))
    assert {place: words(cell) for place, cell in found.items()} == {
        ("all endpoints", "everyone"): "+",
        ("all endpoints", "Free"): "blocked per ip +",
        ("all endpoints", "Pro"): "+",
        ("search", "everyone"): "5/s",
        ("search", "Free"): "10/s, 1000/hour burst 50",
        ("search", "Pro"): "5/s",
    }
    inherited = re.search(r'<div class="ratequota-matrix-policy inherited">(.*?)</div>', found["search", "Pro"])
    assert inherited is not None, "a colour of its own"
    hidden = '<span class="ratequota-matrix-hidden">, Pro for search, inherited from everyone</span>'
    assert hidden in inherited[1], "and a name"
    assert "inherited" not in found["search", "Free"] + found["search", "everyone"]
    add = f"{BASE}/ratepolicy/add/?"
    assert {place: links(cell) for place, cell in found.items()} == {
        ("all endpoints", "everyone"): [f"{add}counted_per=caller"],
        ("all endpoints", "Free"): [
            f"{BASE}/ratepolicy/{per_ip.pk}/change/",
            f"{add}plan={free.pk}&counted_per=caller",
        ],
        ("all endpoints", "Pro"): [f"{add}plan={pro.pk}&counted_per=caller"],
        ("search", "everyone"): [f"{BASE}/ratepolicy/{everyone.pk}/change/"],
        ("search", "Free"): [f"{BASE}/ratepolicy/{own.pk}/change/"],
        ("search", "Pro"): [f"{add}plan={pro.pk}&endpoint={search.pk}&counted_per=caller"],
    }
    page = text_of(operator.get(MATRIX))
    assert "default for anonymous clients" in page
    assert re.search(r"(&rsaquo;|<li[^>]*>)\s*Matrix\s*<", page), "the end of the breadcrumbs"


def test_each_policy_of_a_cell_is_linked(operator: Client, free: Plan) -> None:
    per_caller = RatePolicy.objects.create(plan=free, rates="unlimited")
    per_ip = RatePolicy.objects.create(plan=free, rates="9/s", counted_per="ip", mode="log")
    cell = cells(operator.get(MATRIX))["all endpoints", "Free"]
    assert words(cell) == "unlimited per caller 9/s per ip log only"
    assert links(cell) == [f"{BASE}/ratepolicy/{policy.pk}/change/" for policy in (per_caller, per_ip)]


def test_policies_in_force_are_shown_with_their_dates(operator: Client, free: Plan, search: Endpoint) -> None:
    now = timezone.now()
    RatePolicy.objects.create(plan=free, endpoint=search, rates="1/s")
    RatePolicy.objects.create(plan=free, endpoint=search, rates="2/s", ends_at=now + DAY)
    RatePolicy.objects.create(plan=free, endpoint=search, rates="3/s", starts_at=now + DAY)
    RatePolicy.objects.create(plan=free, endpoint=search, rates="4/s", ends_at=now - DAY)
    RatePolicy.objects.create(plan=free, rates="5/s", mode="off")
    RatePolicy.objects.create(rates="6/s", starts_at=now - DAY)
    found = cells(operator.get(MATRIX))
    assert re.fullmatch(r"2/s until \d\d/\d\d/\d{4} \d\d:\d\d UTC", words(found["search", "Free"]))
    for plan in ("everyone", "Free"):
        assert re.fullmatch(r"6/s since \S+ \d\d:\d\d UTC", words(found["all endpoints", plan]))


def test_unreadable_rates_show_what_decides_instead(operator: Client, free: Plan) -> None:
    RatePolicy.objects.create(plan=free, rates="1/s")
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_ratequota_ratepolicy SET rates = 'garbage'")
    assert (
        words(cells(operator.get(MATRIX))["all endpoints", "Free"]) == "garbage cannot be read (“on error” applies)"
    )


def test_plans_and_endpoints_are_filtered_by_name_and_paged(operator: Client) -> None:
    Plan.objects.bulk_create([Plan(name=f"p{number:02}", slug=f"p{number:02}") for number in range(45)])
    Endpoint.objects.bulk_create([Endpoint(name=f"e{number:02}") for number in range(25)])
    RatePolicy.objects.create(plan=Plan.objects.get(name="p30"), rates="7/s")

    def axes(query: str) -> tuple[list[str], list[str]]:
        found = cells(operator.get(f"{MATRIX}?{query}"))
        return list(dict.fromkeys(plan for _, plan in found)), list(dict.fromkeys(endpoint for endpoint, _ in found))

    plans, endpoints = axes("")
    assert plans == ["everyone", *(f"p{number:02}" for number in range(20))]
    assert endpoints == ["all endpoints", *(f"e{number:02}" for number in range(21))], "450 cells in 21 columns"
    last = axes("pp=3&p=2")
    assert last == (
        ["everyone", *(f"p{number}" for number in range(40, 45))],
        ["all endpoints", *(f"e{number}" for number in range(21, 25))],
    ), "as many endpoints to a page although it has fewer plans"
    assert axes("pp=99&p=99") == last
    assert axes("pp=x&p=x") == (plans, endpoints)
    assert axes("plan=P1")[0] == ["everyone", *(f"p{number}" for number in range(10, 20))]
    assert len(axes("plan=p1")[1]) == 26, "fewer plans leave room for all endpoints"
    assert axes("q=E1")[1] == ["all endpoints", *(f"e{number}" for number in range(10, 20))]
    assert axes("plan=nothing%00&q=nothing%00") == (["everyone"], ["all endpoints"])
    assert "7/s" in words(cells(operator.get(f"{MATRIX}?pp=2"))["all endpoints", "p30"])
    page = text_of(operator.get(f"{MATRIX}?plan=p&pp=2&p=2"))
    assert 'name="plan" id="ratequota-matrix-plan" value="p"' in page
    assert "45 plans, 25 endpoints" in page
    links = [html.unescape(link) for link in re.findall(r'<a href="(\?[^"]*)">\d', page)]
    assert links == ["?plan=p&p=2", "?plan=p&pp=3&p=2", "?plan=p&pp=2"]
    assert page.count('aria-current="page">2<') == 2
    page = text_of(operator.get(f"{MATRIX}?plan=nothing&q=e%26"))
    assert 'value="e&amp;"' in page
    assert "No plan matches this search." in page
    assert "No endpoint matches this search." in page


EDITOR = ("view_ratepolicy", "add_ratepolicy", "change_ratepolicy", "view_plan", "view_endpoint")


@pytest.mark.parametrize(
    ("permissions", "changes", "adds"),
    [
        (EDITOR, True, True),
        (("view_ratepolicy",), False, False),
        (("change_ratepolicy",), True, False),
        (("view_ratepolicy", "grant_override"), False, False),
    ],
)
def test_links_depend_on_permissions(
    free: Plan, search: Endpoint, permissions: tuple[str, ...], changes: bool, adds: bool
) -> None:
    policy = RatePolicy.objects.create(plan=free, rates="71/s")
    content = text_of(client_of(*permissions).get(MATRIX)).rpartition('<div id="content-main"')[2]  # not the sidebar
    assert "71/s" in content
    assert (f"{BASE}/ratepolicy/{policy.pk}/change/" in content) is changes
    assert (f"{BASE}/ratepolicy/add/" in content) is adds
    assert (f"{BASE}/plan/{free.pk}/change/" in content) is ("view_plan" in permissions)
    assert (f"{BASE}/endpoint/{search.pk}/change/" in content) is ("view_endpoint" in permissions)
