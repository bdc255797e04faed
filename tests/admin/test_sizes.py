"""Pages with many rows: each opens, can be saved, and links to the rows that it leaves out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import User
from django.db import connection
from django.db.models import QuerySet
from django.test import Client
from django.test.utils import CaptureQueriesContext

from benchmarks.scale import SMALL
from benchmarks.scale.measuring import MOST_BYTES, open_pages
from benchmarks.scale.pages import pages
from benchmarks.scale.seed import seed
from django_ratequota import warm
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from tests.admin.test_admin import BASE, TWIN
from tests.support.operators import client_of
from tests.support.pages import form_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

#: More than the columns of one SELECT: 2,000 on SQLite, 1,664 on PostgreSQL.
MANY = 2_001


def rows(objs: list[Any]) -> None:
    """Insert policies by raw SQL: recording them would take most of the time."""
    QuerySet(type(objs[0])).bulk_create(objs)


def endpoints(count: int, first: int = 0) -> list[Endpoint]:
    rows([Endpoint(name=f"e{number:05d}") for number in range(first, first + count)])
    return list(Endpoint.objects.order_by("name"))


def plans(count: int) -> list[Plan]:
    rows([Plan(name=f"p{number:05d}", slug=f"p{number:05d}") for number in range(count)])
    return list(Plan.objects.filter(name__startswith="p").order_by("name"))


def page_with_policies(kind: str, count: int) -> str:
    """Return the page of a plan or an endpoint with that many policies in its table."""
    if kind == "plan":
        plan = Plan.objects.create(name="Free", slug="free")
        rows([RatePolicy(plan=plan, endpoint=one, rates="10/min") for one in endpoints(count)])
        return f"{BASE}/plan/{plan.pk}/change/"
    search = Endpoint.objects.create(name="search")
    rows([RatePolicy(plan=one, endpoint=search, rates="10/min") for one in plans(count)])
    return f"{BASE}/endpoint/{search.pk}/change/"


@pytest.mark.parametrize("kind", ["plan", "endpoint"])
def test_a_table_of_many_policies_is_saved(operator: Client, kind: str) -> None:
    """Regression: from 141 policies on, saving was a 400: a row has seven fields, and Django accepts 1,000."""
    path = page_with_policies(kind, 75)
    page = operator.get(path)
    assert len(page.content) < 300_000
    sent = form_of(page)
    stored = int(sent["policies-INITIAL_FORMS"])
    assert stored == 75
    sent["policies-0-rates"] = "11/min"
    # As many new rows as the page allows; a stored row that is to be deleted adds one field more.
    most = int(sent["policies-MAX_NUM_FORMS"])
    new = range(stored, most)
    for number in new:
        row = {"plan": "", "endpoint": "", "counted_per": "ip", "rates": "5/s", "mode": "log"}
        sent |= {f"policies-{number}-{name}": value for name, value in {"id": "", **row}.items()}
    sent["policies-TOTAL_FORMS"] = str(most)
    limit = django_settings.DATA_UPLOAD_MAX_NUMBER_FIELDS
    assert limit is not None
    assert len(sent) + stored < limit
    refused = operator.post(path, sent)
    assert refused.status_code == 200, "no 400: the page reports that the new rows conflict"
    assert TWIN in refused.content.decode()
    for number in new:
        sent = {name: value for name, value in sent.items() if not name.startswith(f"policies-{number}-")}
    sent["policies-TOTAL_FORMS"] = str(stored)
    assert operator.post(path, sent).status_code == 302
    assert RatePolicy.objects.filter(rates="11/min").count() == 1
    assert RatePolicy.objects.count() == stored


@pytest.mark.parametrize("kind", ["plan", "endpoint"])
def test_a_link_to_the_list_takes_the_place_of_a_longer_table(operator: Client, kind: str) -> None:
    path = page_with_policies(kind, 76)
    page = operator.get(path)
    assert "policies-TOTAL_FORMS" not in page.content.decode()
    found = re.search(r'76 policies are not shown here. <a href="([^"]*)">Change them', page.content.decode())
    assert found is not None
    assert operator.get(found[1]).context["cl"].result_count == 76
    assert operator.post(path, form_of(page) | {"name": "renamed"}).status_code == 302
    assert RatePolicy.objects.filter(rates="10/min").count() == 76
    granter = client_of(f"change_{kind}", "grant_override", name="granter").get(path).content.decode()
    assert "not shown here" not in granter, "the table is left out because the operator may not see it"


def test_policies_for_all_endpoints_or_everyone_come_first(operator: Client, free: Plan) -> None:
    """PostgreSQL sorts NULLs last."""
    rows([RatePolicy(plan=free, endpoint=one, rates="10/min") for one in endpoints(3)])
    RatePolicy.objects.create(plan=free, rates="77/min")
    sent = form_of(operator.get(f"{BASE}/plan/{free.pk}/change/"))
    assert (sent["policies-0-endpoint"], sent["policies-0-rates"]) == ("", "77/min")


def test_a_table_that_was_sent_is_saved_though_it_has_grown_too_long_meanwhile(operator: Client, free: Plan) -> None:
    rows([RatePolicy(plan=free, endpoint=one, rates="10/min") for one in endpoints(75)])
    path = f"{BASE}/plan/{free.pk}/change/"
    sent = form_of(operator.get(path))
    RatePolicy.objects.create(plan=free, rates="77/min")  # before the others
    sent["policies-49-rates"] = "12/min"
    assert operator.post(path, sent).status_code == 302
    assert RatePolicy.objects.filter(rates="12/min").count() == 1


@pytest.mark.parametrize("pk", ["", "x", "-1", "٣", "9" * 30, "\x00"])
def test_a_submitted_row_that_does_not_exist_is_reported(operator: Client, free: Plan, pk: str) -> None:
    RatePolicy.objects.create(plan=free, rates="10/min")
    path = f"{BASE}/plan/{free.pk}/change/"
    sent = form_of(operator.get(path)) | {"policies-0-id": pk, "policies-0-rates": "1/s"}
    assert operator.post(path, sent).status_code == 200
    assert operator.post(path, sent | {"policies-INITIAL_FORMS": "9" * 9}).status_code in (200, 302)
    assert RatePolicy.objects.get(plan=free).rates == "10/min"


def test_operators_who_may_not_search_get_a_link_to_the_list(free: Plan) -> None:
    """Regression: each row had a select of all endpoints."""
    rows([RatePolicy(plan=free, endpoint=one, rates="10/min") for one in endpoints(3)])
    client = client_of("view_plan", "change_plan", "view_ratepolicy", "change_ratepolicy")
    page = client.get(f"{BASE}/plan/{free.pk}/change/").content.decode()
    assert "3 policies are not shown here." in page
    assert "policies-TOTAL_FORMS" not in page


def test_a_page_of_the_matrix_is_bounded(operator: Client) -> None:
    """Regression: 200 plans and 500 endpoints were a page of 10 MB."""
    columns, lines = plans(200), endpoints(500)
    rates = {"caller": "10/s, 1000/hour burst 50", "ip": "100/min"}
    cells = ((plan, one) for one in lines[:30] for plan in columns[:30])
    rows([RatePolicy(plan=p, endpoint=one, counted_per=per, rates=rates[per]) for p, one in cells for per in rates])
    page, _ = listed(operator, "plan/matrix/")
    assert page.content.decode().count("<td>") > 400
    assert len(page.content) < 300_000
    # The other form of a cell: inherited, with a link that adds.
    rows([RatePolicy(endpoint=one, counted_per=per, rates=rates[per]) for one in lines for per in rates])
    page, _ = listed(operator, "plan/matrix/?pp=10&p=24")
    assert page.content.decode().count("inherited from everyone</span>") == 2 * 20 * 17
    assert len(page.content) < 300_000


# --- Filters. ---


def listed(client: Client, path: str) -> tuple[Any, int]:
    """Return the page and the total length of its queries."""
    with CaptureQueriesContext(connection) as captured:
        page = client.get(f"{BASE}/{path}")
    assert page.status_code == 200, path
    return page, sum(len(query["sql"]) for query in captured)


def test_the_list_of_policies_opens_with_any_number_of_endpoints_and_plans(operator: Client) -> None:
    """Regression: a 500 with 1,700 endpoints, each a column of the query that counts for the filters."""
    RatePolicy.objects.create(plan=plans(1)[0], rates="1/s")
    RatePolicy.objects.create(endpoint=endpoints(1)[0], rates="1/s")
    listed(operator, "ratepolicy/")
    few = listed(operator, "ratepolicy/")[1]
    rows([Plan(name=f"q{number}", slug=f"q{number}") for number in range(MANY)])
    rows([RatePolicy(plan=plan, rates="1/s") for plan in Plan.objects.filter(name__startswith="q")])
    rows([RatePolicy(endpoint=one, rates="1/s") for one in endpoints(MANY, first=1)[1:]])
    page, length = listed(operator, "ratepolicy/")
    assert length < few + 2_000, "the first fifty rows are looked up, and nothing else grows"
    assert len(page.content) < 250_000
    for filters in ("plan__isnull=True", f"endpoint__id__exact={Endpoint.objects.get(name='e01999').pk}&mode=log"):
        listed(operator, f"ratepolicy/?{filters}")
    nobody = client_of("view_ratepolicy", name="viewer")
    page, _ = listed(nobody, "ratepolicy/")
    assert len(page.content) < 250_000


def test_assignments_and_history_open_with_any_number_of_plans_and_actors(operator: Client) -> None:
    alice = User.objects.create(username="alice")
    rows([PlanAssignment(user=alice, plan=plan) for plan in plans(MANY)])
    rows([User(username=f"u{number}", password="!") for number in range(MANY)])
    rows([PolicyChange(model="plan", action="update", actor=user) for user in User.objects.all()])
    for path in ("planassignment/", f"planassignment/?plan__id__exact={Plan.objects.first().pk}"):
        page, _ = listed(operator, path)
        assert len(page.content) < 250_000
    for path in ("", "?_facets=True", f"?_facets=True&actor__id__exact={alice.pk}"):
        page, _ = listed(operator, f"policychange/{path}")
        assert len(page.content) < 250_000
    assert page.context["cl"].result_count == 1


def chooser(page: Any, name: str) -> str:
    """Return the form of a filter."""
    forms = re.findall(r'<form method="get" class="ratequota-filter">.*?</form>', page.content.decode(), re.S)
    (found,) = (form for form in forms if f'<select name="{name}"' in form)
    return str(found)


def test_a_filter_is_chosen_by_autocomplete_and_keeps_the_others(operator: Client, free: Plan) -> None:
    search, other = endpoints(2)
    kept = RatePolicy.objects.create(plan=free, endpoint=search, rates="1/s", mode="log")
    RatePolicy.objects.create(plan=free, endpoint=search, rates="2/s", counted_per="ip")
    RatePolicy.objects.create(plan=free, endpoint=other, rates="3/s", mode="log")
    RatePolicy.objects.create(endpoint=search, rates="4/s", mode="log")
    query = f"q=Free&mode__exact=log&o=1&plan__id__exact={free.pk}&endpoint__id__exact={search.pk}"
    page = operator.get(f"{BASE}/ratepolicy/?{query}&p=1")
    assert list(page.context["cl"].queryset) == [kept]
    form = chooser(page, "endpoint__id__exact")
    assert re.search(r'<select name="endpoint__id__exact"[^>]* class="admin-autocomplete"', form)
    assert f'<option value="{search.pk}" selected>{search}</option>' in form
    hidden = dict(re.findall(r'<input type="hidden" name="(\w+)" value="(\w+)">', form))
    assert hidden == {"q": "Free", "mode__exact": "log", "o": "1", "plan__id__exact": str(free.pk)}
    assert "select2.full" in page.content.decode()


def test_a_filter_without_a_choice_filters_nothing(operator: Client, free: Plan) -> None:
    RatePolicy.objects.create(plan=free, rates="1/s")
    page = operator.get(f"{BASE}/ratepolicy/?endpoint__id__exact=&plan__id__exact=")
    assert page.status_code == 200
    assert page.context["cl"].result_count == 1


def test_a_filter_by_an_invalid_id_redirects(operator: Client, free: Plan) -> None:
    for value in ("x", "9" * 30, "-1", "\x00", "1,2"):
        assert operator.get(f"{BASE}/ratepolicy/", {"plan__id__exact": value}, follow=True).status_code == 200


def test_operators_who_may_not_search_get_no_filter_that_searches(free: Plan) -> None:
    RatePolicy.objects.create(plan=free, rates="1/s")
    page = client_of("view_ratepolicy").get(f"{BASE}/ratepolicy/").content.decode()
    assert 'name="plan__id__exact"' not in page


@pytest.mark.parametrize(
    "path",
    [f"ratepolicy/?{name}=" for name in ("mode__exact", "counted_per", "audience", "time", "subject")]
    + [f"policychange/?{name}=" for name in ("model", "action__exact", "touched_plan", "object_id")]
    + ["plan/?default_for__exact=", "endpoint/?policies=", "planassignment/?time="],
)
def test_a_nul_in_a_filter_is_refused(operator: Client, path: str) -> None:
    """Regression: a 500 on PostgreSQL, which accepts no NUL."""
    page = operator.get(f"{BASE}/{path}a%00b")
    assert page.status_code == 302
    assert page["Location"].endswith("/?e=1")
    assert operator.get(page["Location"]).status_code == 200
    posted = operator.post(f"{BASE}/{path}%00", {"action": "delete_selected", "_selected_action": "1"})
    assert posted.status_code in (302, 400)


# --- All pages, on the rows of make scale. ---

#: Pages whose size grows with plans or candidates.
_OTHERS = ("matrix", "explain", "traffic", "CSV")


@pytest.mark.thorough
def test_pages_stay_small_and_take_few_queries_on_a_larger_installation(db: None) -> None:
    if connection.vendor == "mysql":
        pytest.skip("make scale seeds SQLite and PostgreSQL")
    seed(replace(SMALL, plans=50, endpoints=60, policies=2_000))
    warm()  # else pages read the users' entries, part by part
    chosen = {name: page for name, page in pages().items() if not name.startswith(_OTHERS)}
    for name, opened in open_pages(chosen, times=1).items():
        assert opened.bytes <= MOST_BYTES, name
        # Quotas looks for rows in rounds, a bounded number of them, while those it finds are out of date. A save of a
        # table looks up the relations of each row, as Django's formsets do.
        most = 300 if ", save" in name else 45 if name.startswith("quotas") else 25
        assert opened.queries <= most, name
