"""The operators' pages: what they show, what they refuse, and who is written down."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import connection
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_ratequota import check_request
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

HOSTILE = "<script>alert(1)</script>\u202e" + "x" * 40
BASE = "/admin/django_ratequota"
TWIN = "There is such a policy without dates already"


@pytest.fixture
def root() -> User:
    return User.objects.create_superuser("root", email="root@example.com", password="root")


@pytest.fixture
def operator(root: User) -> Client:
    client = Client()
    client.force_login(root)
    return client


def staff(*permissions: str) -> Client:
    user = User.objects.create(username="support", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def plan_form(plan: Plan, *rows: dict[str, Any], initial: int = 0) -> dict[str, Any]:
    """What a browser sends for a plan's page and its table of policies."""
    form = {"name": plan.name, "slug": plan.slug, "description": "", "default_for": plan.default_for}
    form |= {"policies-TOTAL_FORMS": str(len(rows)), "policies-INITIAL_FORMS": str(initial)}
    for number, row in enumerate(rows):
        defaults = {"endpoint": "", "counted_per": "caller", "algorithm": "token_bucket", "mode": "enforce"}
        form |= {f"policies-{number}-{name}": value for name, value in {**defaults, **row}.items()}
    return form


@pytest.fixture
def free() -> Plan:
    return Plan.objects.create(name="Free", slug="free", default_for="anonymous")


def test_the_pages_are_free_of_problems(root: User) -> None:
    call_command("check", fail_level="WARNING")


@pytest.mark.parametrize("model", ["plan", "planassignment", "endpoint", "ratepolicy", "policychange"])
def test_every_list_and_form_opens(operator: Client, root: User, free: Plan, model: str) -> None:
    search = Endpoint.objects.create(name="search")
    RatePolicy.objects.create(plan=free, endpoint=search, rates="5/min")
    RatePolicy.objects.create(user=root, rates="5/min", ends_at=timezone.now() + timedelta(days=1))
    PlanAssignment.objects.create(user=root, plan=free)
    listed = operator.get(f"{BASE}/{model}/")
    assert listed.status_code == 200
    link = re.search(rf'href="({BASE}/{model}/\d+/change/)', listed.content.decode())
    assert link is not None
    assert operator.get(link[1]).status_code == 200
    assert operator.get(f"{BASE}/{model}/?q=free").status_code == 200
    assert operator.get(f"{BASE}/{model}/add/").status_code == (403 if model == "policychange" else 200)


@pytest.mark.parametrize(
    "query",
    ["mode__exact=log", "audience=user", "audience=subject", "audience=plan", "audience=everyone", "counted_per=ip"]
    + [f"time={value}" for value in ("active", "future", "ended", "dated")],
)
def test_filters_tell_policies_apart(operator: Client, root: User, free: Plan, query: str) -> None:
    now = timezone.now()
    day = timedelta(days=1)
    kinds = {
        "mode__exact=log": RatePolicy.objects.create(rates="1/s", mode="log", counted_per="plan"),
        "audience=user": RatePolicy.objects.create(rates="2/s", user=root),
        "audience=subject": RatePolicy.objects.create(rates="3/s", subject="ip:::1"),
        "audience=plan": RatePolicy.objects.create(rates="4/s", plan=free),
        "audience=everyone": RatePolicy.objects.create(rates="5/s"),
        "counted_per=ip": RatePolicy.objects.create(rates="6/s", counted_per="ip"),
        "time=active": RatePolicy.objects.create(rates="7/s", starts_at=now - day, ends_at=now + day),
        "time=future": RatePolicy.objects.create(rates="8/s", starts_at=now + day),
        "time=ended": RatePolicy.objects.create(rates="9/s", ends_at=now - day),
        "time=dated": RatePolicy.objects.create(rates="10/s", ends_at=now + 2 * day),
    }
    page = operator.get(f"{BASE}/ratepolicy/?{query}")
    found = {policy.rates for policy in page.context["cl"].queryset}
    assert kinds[query].rates in found
    assert found != {policy.rates for policy in kinds.values()}


def test_a_plan_page_is_edited_as_a_table_and_binds_the_next_request(
    operator: Client, root: User, free: Plan
) -> None:
    policy = RatePolicy.objects.create(plan=free, rates="1/hour")

    def ask() -> bool:
        return check_request(RequestFactory().get("/")).allowed

    assert [ask(), ask()] == [True, False]
    row = {"id": str(policy.pk), "plan": str(free.pk), "rates": "2/60min"}
    page = operator.post(
        f"{BASE}/plan/{free.pk}/change/", plan_form(free, row, {"rates": "9/s", "counted_per": "ip"}, initial=1)
    )
    assert page.status_code == 302, page.content.decode()
    assert [ask(), ask()] == [True, False]
    assert sorted(RatePolicy.objects.values_list("rates", flat=True)) == ["2/hour", "9/s"]
    assert set(PolicyChange.objects.filter(actor=root).values_list("action", "model")) == {
        ("update", "ratepolicy"),
        ("create", "ratepolicy"),
    }
    history = operator.get(f"{BASE}/plan/{free.pk}/history/").content.decode()
    assert "Changed Rates" in history
    assert "root" in history


def test_bad_rates_in_the_table_keep_what_was_typed_and_say_what_to_write(operator: Client, free: Plan) -> None:
    page = operator.post(f"{BASE}/plan/{free.pk}/change/", plan_form(free, {"rates": "10/fortnight"}))
    text = page.content.decode()
    assert page.status_code == 200
    assert "expected a unit (s, min, hour, day, week or month) at character 4" in text
    assert 'value="10/fortnight"' in text
    assert not RatePolicy.objects.exists()


def test_mistakes_in_fields_the_table_leaves_out_are_shown_all_the_same(operator: Client, free: Plan) -> None:
    """The form once failed with 'has no field named': an unreadable subject of a row edited by raw SQL."""
    policy = RatePolicy.objects.create(plan=free, rates="1/hour")
    RatePolicy.objects.filter(pk=policy.pk).update(
        ends_at=timezone.now(), starts_at=timezone.now() + timedelta(days=1)
    )
    row = {"id": str(policy.pk), "plan": str(free.pk), "rates": "2/hour"}
    page = operator.post(f"{BASE}/plan/{free.pk}/change/", plan_form(free, row, initial=1))
    assert page.status_code == 200
    assert "The end must lie after the start" in page.content.decode()


@pytest.mark.parametrize("stored", [True, False], ids=["against a stored row", "two new rows"])
@pytest.mark.parametrize("new_plan", [True, False], ids=["new plan", "plan"])
def test_twins_in_the_table_are_refused_in_words(operator: Client, free: Plan, stored: bool, new_plan: bool) -> None:
    rows = [{"rates": "5/min"}, {"rates": "6/min"}]
    if new_plan:
        RatePolicy.objects.create(rates="1/s")  # everyone's: no twin of a plan's, though the plan has no id yet
        plan = Plan(name="Pro", slug="pro")
        page = operator.post(f"{BASE}/plan/add/", plan_form(plan, *(rows[:1] if stored else rows)))
        if stored:
            assert page.status_code == 302, "one policy of a new plan has no twin"
            return
    else:
        if stored:
            RatePolicy.objects.create(plan=free, rates="1/s")
            rows = rows[:1]
        page = operator.post(f"{BASE}/plan/{free.pk}/change/", plan_form(free, *rows))
    assert page.status_code == 200
    assert TWIN in page.content.decode()


def test_a_row_may_take_the_place_of_one_deleted_with_it(operator: Client, free: Plan) -> None:
    policy = RatePolicy.objects.create(plan=free, rates="1/s")
    old = {"id": str(policy.pk), "plan": str(free.pk), "rates": "1/s", "DELETE": "on"}
    page = operator.post(f"{BASE}/plan/{free.pk}/change/", plan_form(free, old, {"rates": "2/s"}, initial=1))
    assert page.status_code == 302, page.content.decode()
    assert RatePolicy.objects.get().rates == "2/s"


def test_twins_in_the_policy_form_are_refused_once(operator: Client, free: Plan) -> None:
    RatePolicy.objects.create(plan=free, rates="1/s")
    form = {"plan": str(free.pk), "rates": "2/s", "counted_per": "caller", "algorithm": "gcra", "mode": "enforce"}
    page = operator.post(f"{BASE}/ratepolicy/add/", form)
    assert page.status_code == 200
    assert page.content.decode().count(TWIN) == 1


def test_mode_is_edited_in_the_list_and_recorded(operator: Client, root: User) -> None:
    policy = RatePolicy.objects.create(rates="blocked")
    assert not check_request(RequestFactory().get("/")).allowed
    form = {
        "form-TOTAL_FORMS": "1",
        "form-INITIAL_FORMS": "1",
        "form-0-id": str(policy.pk),
        "form-0-mode": "log",
        "_save": "1",
    }
    assert operator.post(f"{BASE}/ratepolicy/", form).status_code == 302
    assert check_request(RequestFactory().get("/")).allowed
    change = PolicyChange.objects.first()
    assert (change.actor, change.before["mode"], change.after["mode"]) == (root, "enforce", "log")
    assert "Mode" in LogEntry.objects.latest("pk").get_change_message()


def test_a_row_with_unreadable_rates_can_still_be_switched_off(operator: Client) -> None:
    policy = RatePolicy.objects.create(rates="1/s")
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_ratequota_ratepolicy SET rates = 'garbage'")
    form = {
        "form-TOTAL_FORMS": "1",
        "form-INITIAL_FORMS": "1",
        "form-0-id": str(policy.pk),
        "form-0-mode": "off",
        "_save": "1",
    }
    page = operator.post(f"{BASE}/ratepolicy/", form)
    assert page.status_code == 200
    assert "expected a limit (a number) at character 1" in page.content.decode()


def test_deleting_is_recorded_as_the_operators(operator: Client, root: User, free: Plan) -> None:
    RatePolicy.objects.create(plan=free, rates="1/s")
    assert operator.post(f"{BASE}/plan/{free.pk}/delete/", {"post": "yes"}).status_code == 302
    assert set(PolicyChange.objects.filter(actor=root).values_list("action", "model")) == {
        ("delete", "plan"),
        ("delete", "ratepolicy"),
    }
    policy = RatePolicy.objects.create(rates="1/s")
    form = {"action": "delete_selected", "_selected_action": [policy.pk], "post": "yes"}
    assert operator.post(f"{BASE}/ratepolicy/", form).status_code == 302
    assert PolicyChange.objects.first().actor == root


def test_an_assignment_notes_who_made_it(operator: Client, root: User, free: Plan) -> None:
    alice = User.objects.create(username="alice")
    form = {"user": alice.pk, "plan": free.pk, "starts_at_0": "2026-01-01", "starts_at_1": "00:00"}
    page = operator.post(f"{BASE}/planassignment/add/", form)
    assert page.status_code == 302, page.content.decode()
    assert PlanAssignment.objects.get().created_by == root


def test_users_are_looked_up_by_autocomplete(operator: Client, root: User) -> None:
    page = operator.get(f"{BASE}/ratepolicy/add/").content.decode()
    assert re.search(r'<select name="user"[^>]*admin-autocomplete', page)
    query = {"app_label": "django_ratequota", "model_name": "ratepolicy", "field_name": "user", "term": "roo"}
    assert [row["text"] for row in operator.get("/admin/autocomplete/", query).json()["results"]] == ["root"]


def test_without_a_user_admin_a_user_is_given_by_id(operator: Client, free: Plan) -> None:
    """A select of all users would not do, and autocomplete needs the user model's own admin."""
    user_admin = admin.site._registry.pop(User)
    try:
        page = operator.get(f"{BASE}/planassignment/add/").content.decode()
        assert re.search(r'<input type="text" name="user"', page)
        call_command("check", fail_level="WARNING")
    finally:
        admin.site._registry[User] = user_admin


def test_what_an_identifier_counts_can_be_chosen(operator: Client, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "builtins.repr"}}
    assert '<option value="tenant">tenant</option>' in operator.get(f"{BASE}/ratepolicy/add/").content.decode()


def test_scopes_of_the_code_without_an_endpoint_are_listed_and_created(operator: Client) -> None:
    page = operator.get(f"{BASE}/endpoint/").content.decode()
    assert f'<a href="{BASE}/endpoint/add/?name=search">create search</a>' in page
    form = operator.get(f"{BASE}/endpoint/add/?name=search").content.decode()
    assert re.search(r'<input type="text" name="name" value="search"[^>]* list="id_name_scopes"', form)
    assert '<option value="search"></option>' in form
    assert 'data-pattern="/admin/' not in form, "the admin's own routes are no API"


def test_routes_of_the_project_are_offered(operator: Client) -> None:
    form = operator.get(f"{BASE}/endpoint/add/").content.decode()
    assert 'data-pattern="/search/"' in form
    assert 'data-pattern="search"' in form


def test_overrides_do_not_crowd_the_endpoint_page(operator: Client, root: User, free: Plan) -> None:
    search = Endpoint.objects.create(name="search")
    RatePolicy.objects.create(endpoint=search, user=root, rates="71/s")
    RatePolicy.objects.create(endpoint=search, plan=free, rates="72/s")
    page = operator.get(f"{BASE}/endpoint/{search.pk}/change/").content.decode()
    assert 'value="72/s"' in page
    assert 'value="71/s"' not in page


@pytest.mark.parametrize(
    ("codenames", "sees", "adds", "changes"),
    [((), 403, 403, 403), (("view_endpoint",), 200, 403, 403), (("view_endpoint", "change_endpoint"), 200, 403, 302)],
)
def test_staff_see_and_do_what_they_may(codenames: tuple[str, ...], sees: int, adds: int, changes: int) -> None:
    client = staff(*codenames)
    endpoint = Endpoint.objects.create(name="exports")
    page = client.get(f"{BASE}/endpoint/")
    assert page.status_code == sees
    assert "?name=search" not in page.content.decode(), "a link to a page that would refuse"
    assert client.get(f"{BASE}/endpoint/add/").status_code == adds
    form = {"name": "exports", "description": "", "routes": "", "methods": "", "cost": "3"}
    assert client.post(f"{BASE}/endpoint/{endpoint.pk}/change/", form).status_code == changes
    assert Endpoint.objects.get().cost == (3 if changes == 302 else 1)


def test_history_is_read_and_never_written(operator: Client, free: Plan) -> None:
    free.name = "Basic"
    free.save()
    change = PolicyChange.objects.first()
    page = operator.get(f"{BASE}/policychange/{change.pk}/change/").content.decode()
    assert "<tr><th>name</th><td>Free</td><td>Basic</td></tr>" in page
    assert operator.post(f"{BASE}/policychange/{change.pk}/delete/", {"post": "yes"}).status_code == 403
    assert operator.post(f"{BASE}/policychange/{change.pk}/change/", {"reason": "x"}).status_code == 403


def test_hostile_text_is_shown_harmlessly(operator: Client, root: User) -> None:
    plan = Plan.objects.create(name=HOSTILE, slug="evil", description=HOSTILE)
    RatePolicy.objects.create(plan=plan, rates="1/s", reason=HOSTILE)
    RatePolicy.objects.create(subject=f"ip:{HOSTILE}", rates="1/s")
    PlanAssignment.objects.create(user=root, plan=plan, reason=HOSTILE)
    change = PolicyChange.objects.first()
    for path in ("plan/", f"plan/{plan.pk}/change/", "ratepolicy/", "planassignment/", "policychange/"):
        assert "<script>alert" not in operator.get(f"{BASE}/{path}").content.decode()
    assert "<script>alert" not in operator.get(f"{BASE}/policychange/{change.pk}/change/").content.decode()


@pytest.mark.parametrize(
    "path", ["plan/", "endpoint/", "ratepolicy/", "planassignment/", "policychange/", "plan/{}/change/"]
)
def test_query_counts_do_not_grow_with_the_rows(operator: Client, root: User, free: Plan, path: str) -> None:
    def fill(first: int, last: int) -> None:
        for number in range(first, last):
            user = User.objects.create(username=f"u{number}")
            plan = Plan.objects.create(name=f"p{number}", slug=f"p{number}")
            endpoint = Endpoint.objects.create(name=f"e{number}")
            PlanAssignment.objects.create(user=user, plan=plan, created_by=root)
            RatePolicy.objects.create(plan=free, endpoint=endpoint, rates="1/s")
            RatePolicy.objects.create(user=user, endpoint=endpoint, rates="1/s")
        PolicyChange.objects.update(actor=root)

    def count() -> int:
        with CaptureQueriesContext(connection) as captured:
            assert operator.get(f"{BASE}/{path.format(free.pk)}").status_code == 200
        return len(captured)

    fill(0, 3)
    count()  # content types are looked up once a process
    few = count()
    fill(3, 20)
    assert count() == few


def test_the_pages_have_nothing_inline(operator: Client, free: Plan) -> None:
    RatePolicy.objects.create(plan=free, rates="1/s")
    for path in ("endpoint/", "endpoint/add/", f"plan/{free.pk}/change/", "ratepolicy/add/"):
        page = operator.get(f"{BASE}/{path}").content.decode()
        ours = re.findall(r"<[^>]*ratequota[^>]*>|<details.*?</details>|<datalist.*?</datalist>", page, re.DOTALL)
        assert not [tag for tag in ours if re.search(r"\s(style|on\w+)=", tag)]
        assert not re.findall(r"<script(?![^>]*\bsrc=)(?![^>]*application/json)[^>]*>", page)
