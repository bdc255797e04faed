"""Every page of the admin: hostile names stay text, nothing is inline, and more rows take no more queries."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from django_ratequota.ledger import book
from django_ratequota.models import (
    Endpoint,
    ListMember,
    Plan,
    PlanAssignment,
    PolicyChange,
    QuotaWindow,
    RatePolicy,
    SubjectList,
)
from django_ratequota.monitoring import health
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.refusals import refusals
from tests.support.operators import client_of
from tests.support.requests import check_from

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies", "recording", "checkpointing", "api_keys"),
]

APP = "/admin/django_ratequota"
POLICIES = f"{APP}/ratepolicy"
HOSTILE = "<script>alert(1)</script>\u202e" + "x" * 60
#: Operators whose pages have other links, tables without fields, and no autocomplete.
VIEWER = tuple(
    f"view_{name}"
    for name in ("ratepolicy", "plan", "endpoint", "planassignment", "policychange", "subjectlist", "listmember")
)


def fill(first: int, last: int) -> None:
    """Make rows of each kind, all with hostile texts, and requests that are counted and refused."""
    root = User.objects.get(username="operator")
    free, _ = Plan.objects.get_or_create(slug="free", defaults={"name": "Free"})
    search, _ = Endpoint.objects.get_or_create(name="search")
    bots, _ = SubjectList.objects.get_or_create(name="Bots")
    for number in range(first, last):
        name = f"{number}{HOSTILE}"
        user = User.objects.create(username=name)
        plan = Plan.objects.create(name=name, slug=f"p{number}", description=HOSTILE)
        endpoint = Endpoint.objects.create(name=f"e{number}", description=HOSTILE)
        SubjectList.objects.create(name=name, description=HOSTILE)
        ListMember.objects.create(subject_list=bots, user=user, reason=HOSTILE)
        PlanAssignment.objects.create(user=user, plan=plan, reason=HOSTILE, created_by=root)
        PlanAssignment.objects.create(subject=f"tenant:{name}", plan=free)
        RatePolicy.objects.create(plan=free, endpoint=endpoint, rates="5/s")
        RatePolicy.objects.create(plan=plan, endpoint=search, rates="5/s", reason=HOSTILE)
        RatePolicy.objects.create(user=user, endpoint=endpoint, rates="1/month", reason=HOSTILE)
        RatePolicy.objects.create(subject=f"tenant:{name}", endpoint=search, rates="6/s", mode="log")
        for _ in range(2):
            check_from(user, scope=endpoint.name)
    PolicyChange.objects.update(actor=root, reason=HOSTILE)
    collector.flush()
    book.flush()
    health.report()


def addresses() -> Iterator[str]:
    """Yield the address of every page, about the rows of number 1 where it is about any."""
    for model in ("plan", "endpoint", "ratepolicy", "planassignment", "policychange", "subjectlist", "listmember"):
        yield f"{APP}/{model}/"
        yield f"{APP}/{model}/?q=alert"
    yield f"{APP}/"
    user = User.objects.get(username__startswith="1<")
    free, search = Plan.objects.get(slug="free"), Endpoint.objects.get(name="search")
    override = RatePolicy.objects.get(user=user)
    own = RatePolicy.objects.get(plan__slug="p1")
    change = PolicyChange.objects.filter(model="ratepolicy", object_id=str(own.pk))[0]
    bots = SubjectList.objects.get(name="Bots")
    rows = (free, Plan.objects.get(slug="p1"), search, override.endpoint, own, override, change, bots)
    for row in (*rows, ListMember.objects.get(user=user), PlanAssignment.objects.get(user=user)):
        assert row is not None
        yield f"{APP}/{row._meta.model_name}/{row.pk}/change/"
        yield f"{APP}/{row._meta.model_name}/{row.pk}/history/"
    yield from (
        f"{APP}/plan/matrix/",
        f"{APP}/plan/{free.pk}/copy/",
        f"{APP}/plan/{free.pk}/assign/",
        f"{APP}/policychange/save/{change.change_id}/",
    )
    yield f"{APP}/policychange/{change.pk}/revert/save/"
    yield from (f"{APP}/subjectlist/{bots.pk}/{verb}-members/" for verb in ("add", "remove"))
    yield from (f"{POLICIES}/{page}" for page in ("traffic/", f"traffic/?endpoint={search.pk}", "health/"))
    yield f"{POLICIES}/traffic/?policy={override.pk}"
    caller = f"user={user.pk}&endpoint=e1"
    yield from (
        f"{POLICIES}/explain/?{query}" for query in ("", caller, f"user={user.pk}", f"id={refusals(1)[0].id}")
    )
    yield f"{POLICIES}/explain/?{quote(HOSTILE)}={quote(HOSTILE)}&ip={quote(HOSTILE)}&path={quote(HOSTILE)}"
    yield f"{POLICIES}/explain/?identifier_tenant={quote(HOSTILE)}"
    yield from (f"{POLICIES}/boost/?{caller}&policy={override.pk}", f"{POLICIES}/boost/?user={user.pk}")
    yield f"{POLICIES}/block/?caller=tenant:{quote(HOSTILE)}"
    trial = RatePolicy.objects.filter(mode="log")[0]
    yield f"{POLICIES}/{trial.pk}/roll-out/"
    yield f"{POLICIES}/quotas/?level=0"
    window = QuotaWindow.objects.get(subject=f"user:{user.pk}")
    yield from (f"{POLICIES}/quotas/history/?subject={window.subject}&period={one}" for one in ("", window.first_day))
    yield f"{POLICIES}/quotas/history/{window.pk}/refund/"
    yield f"{POLICIES}/invoices/?month={datetime.now(UTC):%Y-%m}&subject={quote(HOSTILE[:20])}"
    yield f"{POLICIES}/invoices/?month={datetime.now(UTC):%Y-%m}"


@pytest.mark.parametrize("permissions", [None, VIEWER], ids=["superuser", "viewer"])
def test_hostile_names_stay_text_and_nothing_is_inline(permissions: tuple[str, ...] | None) -> None:
    client = client_of(*permissions or (), superuser=permissions is None)
    fill(0, 3)
    opened = 0
    for address in addresses():
        page = client.get(address, follow=True)
        assert page.status_code in ((200,) if permissions is None else (200, 403)), address
        text = page.content.decode()
        assert "<script>alert" not in text, address
        # Inputs, scripts' data and links keep what was written; what is shown is disarmed.
        shown = re.sub(
            r'<(?:input|option|textarea)[^>]*>[^<]*|<script.*?</script>|="[^"]*"', "", text, flags=re.DOTALL
        )
        # Read-only texts of a form are Django's own, and escaped.
        assert permissions is not None or "\u202e" not in shown, address
        own = re.findall(r"<[^>]*ratequota[^>]*>|<details.*?</details>|<datalist.*?</datalist>", text, re.DOTALL)
        assert not [tag for tag in own if re.search(r"\s(style|on\w+)=", tag)], address
        assert not re.findall(r"<script(?![^>]*\bsrc=)(?![^>]*application/json)[^>]*>", text), address
        opened += page.status_code == 200
    assert opened > 35


@pytest.mark.parametrize("permissions", [None, VIEWER, ("grant_override",)], ids=["superuser", "viewer", "granter"])
def test_queries_do_not_grow_with_the_rows(permissions: tuple[str, ...] | None) -> None:
    client = client_of(*permissions or (), superuser=permissions is None)

    def counts() -> dict[str, int]:
        found = {}
        for address in addresses():
            client.get(address)  # after edits, a page reloads the policies
            with CaptureQueriesContext(connection) as captured:
                client.get(address)
            found[address] = len(captured)
        return found

    def grown() -> dict[str, int]:
        before = counts()
        fill(4, 10)
        after = counts()
        return {
            one: more - less for (one, less), more in zip(before.items(), after.values(), strict=True) if more > less
        }

    fill(0, 4)
    assert grown() == {}


#: What opens each page: permissions, any of which is enough, or several that are needed together.
OVERRIDES = {"grant_override", "reset_usage", "block_callers"}
POLICY = {"view_ratepolicy", "change_ratepolicy"}
MEMBERS = {f"{verb}_listmember" for verb in ("view", "add", "change", "delete")}
OPENS: dict[str, set[Any]] = {
    "ratepolicy/": POLICY | OVERRIDES,
    "ratepolicy/add/": {"add_ratepolicy", "grant_override"},
    "ratepolicy/{policy}/change/": POLICY,
    "ratepolicy/{override}/change/": POLICY | OVERRIDES,
    "ratepolicy/{override}/delete/": {"grant_override"},
    "ratepolicy/{policy}/delete/": {("view_ratepolicy", "delete_ratepolicy")},
    "ratepolicy/counters/?user={user}&endpoint=e1&bucket=e1/month": {"reset_usage"},
    "ratepolicy/quotas/history/{window}/refund/": {"reset_usage"},
    "ratepolicy/explain/": POLICY | OVERRIDES,
    "ratepolicy/traffic/": POLICY | OVERRIDES,
    "ratepolicy/health/": POLICY | OVERRIDES,
    "ratepolicy/quotas/": POLICY | OVERRIDES,
    "ratepolicy/quotas/?csv=1": POLICY | OVERRIDES,
    "ratepolicy/quotas/history/": POLICY | OVERRIDES,
    "ratepolicy/invoices/": POLICY | OVERRIDES,
    "ratepolicy/invoices/?csv=1": POLICY | OVERRIDES,
    "ratepolicy/impact/": POLICY | OVERRIDES | {"add_ratepolicy"},
    "ratepolicy/boost/?user={user}&endpoint=e1&policy={override}": {"grant_override"},
    "ratepolicy/boost/?user={user}&policy={override}": {"grant_override"},
    "ratepolicy/block/?caller=ip:203.0.113.7": {"block_callers"},
    "ratepolicy/subjects/": POLICY | OVERRIDES | MEMBERS | {"view_planassignment", "change_planassignment"},
    "plan/": {"view_plan", "change_plan"},
    "plan/matrix/": POLICY,
    "plan/{plan}/copy/": {("add_plan", "view_plan", "add_ratepolicy")},
    "plan/{plan}/assign/": {("view_plan", "add_planassignment")},
    "plan/{empty}/copy/": {("add_plan", "view_plan")},
    "endpoint/": {"view_endpoint", "change_endpoint"},
    "endpoint/add/": {"add_endpoint"},
    "planassignment/": {"view_planassignment", "change_planassignment"},
    "planassignment/add/": {"add_planassignment"},
    "subjectlist/{bots}/change/": {"view_subjectlist", "change_subjectlist"} | MEMBERS,
    "subjectlist/{bots}/add-members/": {"add_listmember"},
    "subjectlist/{bots}/remove-members/": {"delete_listmember"},
    "policychange/": {"view_policychange"},
    "policychange/save/{save}/": {"view_policychange"},
    "policychange/{change}/revert/save/": {"view_policychange"},
}


def test_each_page_opens_only_with_its_permissions() -> None:
    """Every permission alone, and those that are needed together; without any, no page; nobody without a login."""
    client_of(superuser=True)
    fill(0, 2)
    change = PolicyChange.objects.filter(model="ratepolicy", action="create", object_text__startswith="plan Free")[0]
    keys: dict[str, Any] = {
        "policy": RatePolicy.objects.get(plan__slug="p1").pk,
        "override": RatePolicy.objects.get(user__username__startswith="1<").pk,
        "user": User.objects.get(username__startswith="1<").pk,
        "plan": Plan.objects.get(slug="free").pk,
        "empty": Plan.objects.create(name="Empty", slug="empty").pk,
        "bots": SubjectList.objects.get(name="Bots").pk,
        "window": QuotaWindow.objects.filter(subject__startswith="user:")[0].pk,
        "save": change.change_id,
        "change": change.pk,
    }
    known = Permission.objects.filter(content_type__app_label="django_ratequota").values_list("codename", flat=True)
    together = {one for needed in OPENS.values() for one in needed if isinstance(one, tuple)}
    tables: dict[str, set[Any]] = {page: set() for page in OPENS}
    for number, codenames in enumerate([(), *((one,) for one in known), *together]):
        client = client_of(*codenames, name=f"o{number}")
        for page, opened in tables.items():
            status = client.get(f"{APP}/{page.format(**keys)}").status_code
            assert status in (200, 302, 403, 404), (page, codenames)
            if status == 200:
                opened.add(codenames[0] if len(codenames) == 1 else codenames)
    for page, needed in OPENS.items():
        assert Client().get(f"{APP}/{page.format(**keys)}")["Location"].startswith("/admin/login/?next="), page
        found = {one for one in tables[page] if not isinstance(one, tuple) or one in needed}
        assert found == needed, page


def test_every_page_of_an_object_needs_a_permission_and_the_object() -> None:
    Plan.objects.create(name="Free", slug="free")
    change = PolicyChange.objects.latest("pk")
    root, staff = client_of(superuser=True), client_of(name="support")
    for model in (Plan, RatePolicy, SubjectList, PolicyChange):
        for page in admin.site._registry[model].own_pages:
            address = f"{APP}/{model._meta.model_name}/{page.path}"
            address = address.replace("<uuid:change_id>", str(change.change_id)).replace("<str:version>", "after")
            missing = address.replace("<path:object_id>", "4711").replace("<str:window>", "4711")
            assert staff.get(missing).status_code == 403, address
            assert (root.get(missing).status_code == 404) is (missing != address), address
