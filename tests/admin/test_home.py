"""The operators' home on the app's index: what each operator sees there, also while Redis is down."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
import time_machine
from django.contrib.auth.models import User
from django.test import Client, RequestFactory
from django.utils import timezone

from django_ratequota import check_request
from django_ratequota.engine.keys import statistics_key
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.monitoring import health
from django_ratequota.monitoring.collector import collector
from django_ratequota.runtime import default_limiter
from tests.admin.test_permissions import client_of
from tests.monitoring.support import record
from tests.support import operators
from tests.support.operators import text_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

HOME = "/admin/django_ratequota/"
PARTS = {"status", "refusals", "changes"}


def parts(client: Client, path: str = HOME) -> dict[str, str]:
    """Return the texts of the home's parts by name."""
    page = client.get(path)
    assert page.status_code == 200
    sections = re.findall(
        r'<section aria-labelledby="ratequota-home-(\w+)">(.*?)</section>', page.content.decode(), re.DOTALL
    )
    return {name: " ".join(unescape(re.sub(r"<[^>]*>", " ", text)).split()) for name, text in sections}


def ask(user: User | None, scope: str, times: int = 1) -> None:
    for _ in range(times):
        request = RequestFactory().get("/")
        if user is not None:
            request.user = user
        check_request(request, scope=scope)


@pytest.mark.usefixtures("recording")
def test_refusals_of_the_hour_lead_to_their_endpoints_and_callers() -> None:
    search, reports = Endpoint.objects.create(name="search"), Endpoint.objects.create(name="reports")
    alice, bob = User.objects.create(username="alice"), User.objects.create(username="bob")
    for endpoint in (search, reports):
        RatePolicy.objects.create(endpoint=endpoint, rates="1/hour")
    ask(alice, "search", 4)
    ask(bob, "reports", 2)
    ask(bob, "elsewhere", 4)
    collector.flush()
    health.report()
    client = client_of("superuser")
    found = parts(client)
    assert re.match(r"Refusals since .*\d\d:00 UTC Refused: 4 of 10 requests \(40\.0 %\) ", found["refusals"])
    assert "Endpoint Refused search 3 reports 1 Customer" in found["refusals"]
    assert found["refusals"].endswith("Customer Refused user alice 3 user bob 1")
    assert found["status"] == "Status All changes are live. Health"
    text = client.get(HOME).content.decode()
    assert "ratequota-good" in text
    links = re.findall(r'href="(/admin/django_ratequota/ratepolicy/(?:traffic|explain)/\?[^"]*)"', text)
    assert len(links) == 4
    assert {client.get(unescape(link)).status_code for link in links} == {200}
    assert f"traffic/?endpoint={search.pk}" in links[0]
    assert f"explain/?user={alice.pk}" in links[2]


def test_what_starts_and_ends_soon_is_listed_for_those_who_may_see_it(alice: User, free: Plan) -> None:
    now, search = timezone.now(), Endpoint.objects.create(name="search")
    make = RatePolicy.objects.create
    make(plan=free, rates="1/s", starts_at=now + timedelta(days=3), ends_at=now + timedelta(days=31))
    make(
        user=alice, endpoint=search, rates="2/s", starts_at=now - timedelta(days=1), ends_at=now + timedelta(hours=1)
    )
    make(plan=free, endpoint=search, rates="3/s", starts_at=now + timedelta(days=1), mode="off")
    PlanAssignment.objects.create(user=alice, plan=free, ends_at=now + timedelta(days=2))
    PlanAssignment.objects.create(subject="tenant:acme", plan=free, starts_at=now + timedelta(days=5))
    found = re.findall(r"UTC: (.*?(?:starts|ends))", parts(client_of("superuser"))["coming"])
    policies = ["user alice × search: 2/s ends", "plan Free × all endpoints: 1/s starts"]
    assert found == [policies[0], "alice: Free ends", policies[1], "tenant:acme: Free starts"]
    grants = re.findall(
        r"UTC: (.*?(?:starts|ends))", parts(operators.client_of("grant_override", name="granter"))["coming"]
    )
    assert grants == policies[:1]
    assert "coming" not in parts(operators.client_of("view_endpoint", name="viewer"))


@pytest.mark.usefixtures("recording")
def test_the_sum_of_refusals_is_that_of_its_tables() -> None:
    """Regression: the sum was of sixty minutes, and the callers were those of this clock hour and the last."""
    hour = int(time.time()) // 3600 * 3600
    caller = f"user:{User.objects.create(username='alice').pk}"
    with time_machine.travel(hour + 1800):
        for seconds in (-3500, 100):  # the first more than sixty minutes ago
            collector.pending.extend([record(hour + seconds, caller, allowed=False, against=(1,))] * 3)
        collector.flush()
        found = parts(client_of("superuser"))["refusals"]
    assert "Refused: 6 of 6 requests" in found
    assert "no endpoint 6" in found
    assert "user alice 6" in found


def test_changes_of_the_day_name_who_changed_what_and_why() -> None:
    client = client_of("superuser")
    pro = Plan.objects.create(name="Pro", slug="pro")
    policy = RatePolicy.objects.create(plan=pro, rates="10/min")
    PolicyChange.objects.update(at=timezone.now() - timedelta(days=1, minutes=1))
    assert parts(client)["changes"] == "Changes in the last 24 hours None."
    form = {
        "plan": pro.pk,
        "rates": "20/min",
        "counted_per": "caller",
        "algorithm": "token_bucket",
        "mode": "enforce",
    }
    page = f"{HOME}ratepolicy/{policy.pk}/change/"
    assert client.post(page, {**form, "change_reason": "Ticket 4711"}).status_code == 302
    found = parts(client)["changes"]
    assert found.startswith("Changes in the last 24 hours changed: plan Pro × all endpoints: 20/min")
    assert "10/min → 20/min" in found
    assert found.endswith("UTC · superuser · Ticket 4711 All changes in the last 24 hours")
    text = client.get(HOME).content.decode()
    one, every = (unescape(link) for link in re.findall(r'href="(/admin/django_ratequota/policychange/[^"]+)"', text))
    assert list(client.get(every).context["cl"].queryset) == [PolicyChange.objects.latest("pk")]
    assert client.get(one).status_code == 200


@pytest.mark.parametrize(
    ("permissions", "expected"),
    [
        (("view_ratepolicy",), {"status", "refusals"}),
        (("grant_override",), {"status", "refusals"}),
        (("reset_usage",), {"status", "refusals"}),
        (("view_policychange",), {"changes"}),
        (("view_ratepolicy", "view_policychange"), PARTS),
        (("view_plan",), set()),
    ],
)
def test_each_part_needs_the_permission_of_its_page(permissions: tuple[str, ...], expected: set[str]) -> None:
    client = operators.client_of(*permissions)
    assert set(parts(client)) == expected
    history = '<li><a href="/admin/django_ratequota/policychange/">History</a></li>'
    assert (history in client.get(HOME).content.decode()) is ("view_policychange" in permissions)


def test_other_pages_of_the_admin_stay_as_they_are() -> None:
    client = client_of("superuser")
    for path in ("/admin/", "/admin/auth/"):
        assert parts(client, path) == {}
        assert "django_ratequota/admin.css" not in client.get(path).content.decode()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ENABLED": False}, "Limits are not enforced, because RATEQUOTA['ENABLED'] is False."),
        ({"REDIS_URL": "memory://"}, "REDIS_URL is memory://, so each worker counts on its own."),
        ({"REDIS_URL": "redis://127.0.0.1:1/0"}, "Redis did not answer (connection)."),
    ],
)
def test_the_status_says_when_limits_are_not_enforced_in_redis(
    settings: Any, change: dict[str, Any], text: str
) -> None:
    client = client_of("superuser")
    settings.RATEQUOTA = {**settings.RATEQUOTA, **change}
    found = parts(client)
    assert found.keys() == {"status", "changes"}
    assert text in found["status"]
    assert "ratequota-good" not in client.get(HOME).content.decode()


def test_redis_that_is_down_is_asked_once(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of("superuser")
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0"}
    store, commands = default_limiter().store, []
    execute = type(store).execute
    monkeypatch.setattr(type(store), "execute", lambda self, c: (commands.append(c), execute(self, c))[1])
    parts(client)
    assert len(commands) == 1


def test_counts_that_another_client_wrote_leave_out_the_refusals_alone() -> None:
    limiter, hour = default_limiter(), int(timezone.now().timestamp() // 3600)
    limiter.store.execute(("SET", statistics_key(limiter.prefix, f"minutes:{hour}"), "what?"))
    found = parts(client_of("superuser"))
    assert found.keys() == PARTS
    assert "The counts cannot be shown." in found["refusals"]


# --- The tool bar, and which models the index lists. ---


HISTORY = f'href="{HOME}policychange/"'


def bar(client: Client, path: str) -> dict[str, str]:
    """Return the text of each link of the bar, and its ``aria-current``."""
    found = re.search(r'<nav class="ratequota-tools".*?</nav>', text_of(client.get(f"{HOME}{path}")), re.DOTALL)
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
    listed = re.findall(r'<tr class="[^"]*model-(\w+)', text_of(operator.get(HOME)))
    assert sorted(set(listed)) == ["endpoint", "plan", "ratepolicy", "subjectlist"]
    only = operators.client_of("view_policychange", name="auditor")
    assert HISTORY in text_of(only.get("/admin/")), "the way in"
    assert bar(only, "policychange/") == {"History": "page"}
