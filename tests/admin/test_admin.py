"""The model admins: lists, forms and tables, the errors they show, and what is recorded."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.db.models.signals import pre_save
from django.test import Client, RequestFactory
from django.utils import timezone

from django_ratequota import check_request
from django_ratequota.admin import base
from django_ratequota.models import Endpoint, Plan, PolicyChange, RatePolicy, SubjectList
from tests.project import views
from tests.support.operators import client_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

BASE = "/admin/django_ratequota"
TWIN = "A policy without dates already has the same audience"


@pytest.fixture
def root(operator: Client) -> User:
    return User.objects.get(username="operator")


def plan_form(plan: Plan, *rows: dict[str, Any], initial: int = 0) -> dict[str, Any]:
    """Return the form data of a plan's page with its table of policies."""
    form = {"name": plan.name, "slug": plan.slug, "description": "", "default_for": plan.default_for, "position": "0"}
    form |= {"policies-TOTAL_FORMS": str(len(rows)), "policies-INITIAL_FORMS": str(initial)}
    for number, row in enumerate(rows):
        defaults = {"endpoint": "", "counted_per": "caller", "algorithm": "token_bucket", "mode": "enforce"}
        form |= {f"policies-{number}-{name}": value for name, value in {**defaults, **row}.items()}
    return form


def row_of(policy: RatePolicy, **edits: str) -> dict[str, str]:
    """Return the form data of a stored policy in a plan's table."""
    row = {"id": str(policy.pk), "plan": str(policy.plan_id), "endpoint": str(policy.endpoint_id or "")}
    return {**row, "rates": policy.rates, "counted_per": policy.counted_per, **edits}


def list_form(*policies: RatePolicy, mode: str) -> dict[str, Any]:
    """Return the form data of the list of policies."""
    form = {"form-TOTAL_FORMS": str(len(policies)), "form-INITIAL_FORMS": str(len(policies)), "_save": "1"}
    for number, policy in enumerate(policies):
        form |= {f"form-{number}-id": str(policy.pk), f"form-{number}-mode": mode}
    return form


@pytest.fixture
def free() -> Plan:
    return Plan.objects.create(name="Free", slug="free", default_for="anonymous")


def test_filters_select_policies(operator: Client, root: User, free: Plan) -> None:
    now = timezone.now()
    day = timedelta(days=1)
    kinds: dict[str, dict[str, Any]] = {
        "mode__exact=log": {"mode": "log", "counted_per": "plan"},
        "audience=user": {"user": root},
        "audience=subject": {"subject": "ip:::1"},
        "audience=plan": {"plan": free},
        "audience=list": {"subject_list": SubjectList.objects.create(name="Bots")},
        "audience=everyone": {},
        "counted_per=ip": {"counted_per": "ip"},
        "time=active": {"starts_at": now - day, "ends_at": now + day},
        "time=future": {"starts_at": now + day},
        "time=ended": {"ends_at": now - day},
        "time=dated": {"ends_at": now + 2 * day},
    }
    policies = {query: RatePolicy.objects.create(rates="1/s", **fields) for query, fields in kinds.items()}
    active = policies.keys() - {"time=future", "time=ended"}
    expected = {
        "audience=everyone": policies.keys() - {f"audience={kind}" for kind in ("user", "subject", "plan", "list")},
        "time=active": active,
        "time=dated": {"time=active", "time=ended", "time=dated"},
    }
    for query in policies:
        listed = operator.get(f"{BASE}/ratepolicy/?{query}").context["cl"]
        found = {name for name, policy in policies.items() if policy in listed.queryset}
        assert found == expected.get(query, {query}), query
    assert {name for name, policy in policies.items() if listed.model_admin.active(policy)} == active


def test_edits_in_a_plans_table_apply_to_the_next_request(operator: Client, root: User, free: Plan) -> None:
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
    history = operator.get(f"{BASE}/plan/{free.pk}/history/", follow=True).content.decode()
    assert "rate policy changed" in history
    assert "and 1 more" in history
    assert "operator" in history


def test_a_dated_row_may_be_beside_the_one_without_dates(operator: Client, free: Plan) -> None:
    usual = RatePolicy.objects.create(plan=free, rates="1/s")
    dated = RatePolicy.objects.create(plan=free, rates="5/s", ends_at=timezone.now() + timedelta(days=1))
    form = plan_form(free, row_of(usual), row_of(dated, rates="6/s"), initial=2)
    assert operator.post(f"{BASE}/plan/{free.pk}/change/", form).status_code == 302
    assert sorted(RatePolicy.objects.values_list("rates", flat=True)) == ["1/s", "6/s"]


def test_unreadable_rates_in_the_table_are_kept_and_explained(operator: Client, free: Plan) -> None:
    page = operator.post(f"{BASE}/plan/{free.pk}/change/", plan_form(free, {"rates": "10/fortnight"}))
    text = page.content.decode()
    assert page.status_code == 200
    assert text.count("expected a unit (s, min, hour, day, week or month) at character 4") == 1
    assert 'value="10/fortnight"' in text
    assert not RatePolicy.objects.exists()


def test_errors_of_fields_outside_the_table_are_shown(operator: Client, free: Plan) -> None:
    """Regression: 'has no field named' for an unreadable subject of a row that raw SQL had edited."""
    policy = RatePolicy.objects.create(plan=free, rates="1/hour")
    RatePolicy.objects.filter(pk=policy.pk).update(
        ends_at=timezone.now(), starts_at=timezone.now() + timedelta(days=1)
    )
    row = {"id": str(policy.pk), "plan": str(free.pk), "rates": "2/hour"}
    page = operator.post(f"{BASE}/plan/{free.pk}/change/", plan_form(free, row, initial=1))
    assert page.status_code == 200
    assert "The end must be after the start" in page.content.decode()


def test_a_second_policy_without_dates_in_the_table_is_refused_in_words(operator: Client, free: Plan) -> None:
    rows = [{"rates": "5/min"}, {"rates": "6/min"}]

    def sent(path: str, plan: Plan, *rows: dict[str, str]) -> bool:
        page = operator.post(f"{BASE}/plan/{path}/", plan_form(plan, *rows))
        assert (page.status_code == 302) is (TWIN not in page.content.decode())
        return page.status_code == 302

    RatePolicy.objects.create(rates="1/s")  # no conflict, though the new plan has no id yet
    pro = Plan(name="Pro", slug="pro")
    assert not sent("add", pro, *rows)
    assert sent("add", pro, *rows[:1])
    assert not sent(f"{free.pk}/change", free, *rows)
    RatePolicy.objects.create(plan=free, rates="1/s")
    assert not sent(f"{free.pk}/change", free, *rows[:1])
    logged = {"rates": "6/min", "mode": "log"}
    assert not sent(f"{free.pk}/change", free, logged, logged)
    assert sent(f"{free.pk}/change", free, logged)
    assert not sent(f"{free.pk}/change", free, logged)


def test_a_log_only_policy_may_be_added_next_to_the_enforced_one(operator: Client, free: Plan) -> None:
    RatePolicy.objects.create(plan=free, rates="30/min")
    form = {"plan": str(free.pk), "rates": "10/min", "mode": "log", "counted_per": "caller"}
    form |= {"algorithm": "token_bucket"}
    assert TWIN in operator.post(f"{BASE}/ratepolicy/add/", {**form, "mode": "off"}).content.decode()
    assert operator.post(f"{BASE}/ratepolicy/add/", form).status_code == 302
    assert TWIN in operator.post(f"{BASE}/ratepolicy/add/", form).content.decode()


def test_a_mode_that_another_policy_of_the_place_has_is_refused_in_the_list(operator: Client, free: Plan) -> None:
    """The database refused it, and the page told of somebody else's change."""
    usual = RatePolicy.objects.create(plan=free, rates="30/min")
    RatePolicy.objects.create(plan=free, rates="10/min", mode="log")
    page = operator.post(f"{BASE}/ratepolicy/", list_form(usual, mode="log"))
    assert page.content.decode().count(TWIN) == 1
    assert operator.post(f"{BASE}/ratepolicy/", list_form(usual, mode="off")).status_code == 302
    assert sorted(RatePolicy.objects.values_list("mode", flat=True)) == ["log", "off"]


def test_a_deleted_row_does_not_conflict_though_another_row_is_invalid(operator: Client, free: Plan) -> None:
    policy = RatePolicy.objects.create(plan=free, rates="1/s")
    rows = [row_of(policy, DELETE="on"), {"rates": "2/s"}, {"rates": "2/fortnight", "counted_per": "ip"}]
    page = operator.post(f"{BASE}/plan/{free.pk}/change/", plan_form(free, *rows, initial=1))
    assert "fortnight" in page.content.decode()
    assert TWIN not in page.content.decode()


@pytest.mark.parametrize("other", [{"counted_per": "caller"}, {"DELETE": "on"}], ids=["trade places", "goes later"])
def test_rows_that_conflict_while_being_saved_are_refused_in_words(
    operator: Client, free: Plan, other: dict[str, str]
) -> None:
    """Regression: an IntegrityError, because the first row is saved while the second is still as it was."""
    first = RatePolicy.objects.create(plan=free, rates="1/s")
    second = RatePolicy.objects.create(plan=free, rates="2/s", counted_per="ip")
    form = plan_form(free, row_of(first, counted_per="ip"), row_of(second, **other), initial=2)
    page = operator.post(f"{BASE}/plan/{free.pk}/change/", form)
    assert page.status_code == 200
    assert page.content.decode().count(TWIN) == 1
    assert set(RatePolicy.objects.values_list("rates", "counted_per")) == {("1/s", "caller"), ("2/s", "ip")}


def test_a_conflicting_policy_saved_meanwhile_is_reported(operator: Client, free: Plan) -> None:
    def rival(**_: Any) -> None:
        RatePolicy.objects.bulk_create([RatePolicy(plan=free, rates="7/s")])

    pre_save.connect(rival, sender=RatePolicy)
    try:
        page = operator.post(f"{BASE}/plan/{free.pk}/change/", plan_form(free, {"rates": "1/s"}), follow=True)
    finally:
        pre_save.disconnect(rival, sender=RatePolicy)
    assert page.redirect_chain == [(f"{BASE}/plan/{free.pk}/change/", 302)]
    assert "Your change was not saved, because somebody else saved a conflicting change" in page.content.decode()
    assert not RatePolicy.objects.filter(rates="1/s").exists()


def test_a_policy_deleted_while_the_page_was_open_is_reported(operator: Client, free: Plan) -> None:
    """Regression: "Please correct the error below", and no error below, because its field is hidden."""
    kept = RatePolicy.objects.create(plan=free, rates="1/s")
    gone = RatePolicy.objects.create(plan=free, rates="2/s", counted_per="ip")
    table = plan_form(free, row_of(gone), row_of(kept, rates="3/s"), initial=2)
    edited = list_form(gone, kept, mode="off")
    gone.delete()
    for path, form in ((f"plan/{free.pk}/change/", table), ("ratepolicy/", edited)):
        page = operator.post(f"{BASE}/{path}", form)
        assert page.status_code == 200
        assert "A row that you changed was deleted in the meantime" in page.content.decode()
    kept.refresh_from_db()
    assert (kept.rates, kept.mode) == ("1/s", "enforce")


def test_a_policy_s_form_keeps_yes_no_and_neither(operator: Client) -> None:
    policy = RatePolicy.objects.create(rates="2/s")
    page = f"{BASE}/ratepolicy/{policy.pk}/change/"
    form = {"rates": "2/s", "counted_per": "caller", "algorithm": "gcra", "mode": "enforce"}
    for written, durable in (("True", True), ("False", False), ("", None)):
        assert operator.post(page, {**form, "durable": written}).status_code == 302
        policy.refresh_from_db()
        assert policy.durable is durable
        durable_field = operator.get(page).content.decode().partition('name="durable"')[2]
        assert f'<option value="{written}" selected>' in durable_field.partition("</select>")[0]


@pytest.mark.parametrize(
    ("fields", "query", "folded"),
    [({}, "", True), ({"mode": "log"}, "?plan=1", True), ({"algorithm": "gcra"}, "?counted_per=ip", False)],
)
def test_rare_fields_are_folded_unless_one_is_set(
    operator: Client, fields: dict[str, Any], query: str, folded: bool
) -> None:
    policy = RatePolicy.objects.create(rates="2/s", **fields)
    for path in (f"{policy.pk}/change/", f"add/{query}"):
        page = operator.get(f"{BASE}/ratepolicy/{path}").content.decode()
        assert ("<summary>" in page) is folded
        assert 'name="algorithm"' in page
    form = {"rates": "2/s", "counted_per": "caller", "algorithm": "gcra", "mode": "enforce", "on_error": "never"}
    assert "<summary>" not in operator.post(f"{BASE}/ratepolicy/add/", form).content.decode(), "an error is in sight"


def test_groups_are_offered_no_permission_for_what_nobody_can_edit() -> None:
    known = Permission.objects.filter(content_type__app_label="django_ratequota")
    edited = ("ratepolicy", "plan", "planassignment", "endpoint", "subjectlist", "listmember")
    own = {"reset_usage", "grant_override", "block_callers", "view_policychange"}
    assert set(known.values_list("codename", flat=True)) == own | {
        f"{verb}_{model}" for verb in ("view", "add", "change", "delete") for model in edited
    }


def test_unreadable_rates_are_reported_when_the_list_is_edited(operator: Client) -> None:
    """Regression: a server error, because the list has no field for the error of the rates."""
    policy = RatePolicy.objects.create(rates="1/s")
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_ratequota_ratepolicy SET rates = 'garbage'")
    page = operator.post(f"{BASE}/ratepolicy/", list_form(policy, mode="off"))
    assert page.status_code == 200
    assert "expected a limit (a number) at character 1" in page.content.decode()


def test_deletions_are_recorded_with_the_operator(operator: Client, root: User, free: Plan) -> None:
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


def test_users_are_looked_up_by_autocomplete(operator: Client, root: User) -> None:
    page = operator.get(f"{BASE}/ratepolicy/add/").content.decode()
    assert re.search(r'<select name="user"[^>]*admin-autocomplete', page)
    query = {"app_label": "django_ratequota", "model_name": "ratepolicy", "field_name": "user", "term": "opera"}
    assert [row["text"] for row in operator.get("/admin/autocomplete/", query).json()["results"]] == ["operator"]


def test_operators_who_may_not_search_users_enter_an_id(free: Plan, root: User) -> None:
    """Autocomplete needs the permission to view users, and would load nothing without it."""
    client = client_of("add_ratepolicy", "view_ratepolicy", "grant_override", name="asker")
    page = client.get(f"{BASE}/ratepolicy/add/").content.decode()
    assert re.search(r'<input type="text" name="user"', page)
    assert f'<option value="{free.pk}">Free</option>' in page
    assert "admin-autocomplete" not in page
    form = {"rates": "2/s", "counted_per": "caller", "algorithm": "gcra", "mode": "enforce"}
    refused = client.post(f"{BASE}/ratepolicy/add/", {**form, "user": "4711"})
    assert "There is no user with the id 4711. Enter the id of an existing user." in refused.content.decode()
    assert client.post(f"{BASE}/ratepolicy/add/", {**form, "user": str(root.pk)}).status_code == 302
    assert RatePolicy.objects.get().user == root


def test_users_are_searched_by_the_fields_of_the_user_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert base.user_search_fields() == ["user__username", "user__email"]
    custom = SimpleNamespace(USERNAME_FIELD="last_name", EMAIL_FIELD="", _meta=User._meta)
    monkeypatch.setattr(base, "get_user_model", lambda: custom)
    assert base.user_search_fields("actor") == ["actor__last_name"]


def test_pages_open_without_time_zones(operator: Client, free: Plan, settings: Any) -> None:
    settings.USE_TZ = False
    RatePolicy.objects.create(plan=free, rates="1/s", ends_at=datetime(2031, 5, 6))
    for path in ("ratepolicy/", f"plan/{free.pk}/change/"):
        assert "until 05/06/2031" in operator.get(f"{BASE}/{path}").content.decode()


def test_identifiers_are_choices_of_counted_per(operator: Client, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "builtins.repr"}}
    assert '<option value="tenant">tenant</option>' in operator.get(f"{BASE}/ratepolicy/add/").content.decode()


def test_scopes_of_the_code_without_an_endpoint_are_listed_and_created(operator: Client) -> None:
    page = operator.get(f"{BASE}/endpoint/").content.decode()
    assert f'<a href="{BASE}/endpoint/add/?name=search">Create the endpoint search</a>' in page
    form = operator.get(f"{BASE}/endpoint/add/?name=search").content.decode()
    assert re.search(r'<input type="text" name="name" value="search"', form)
    assert 'data-pattern="/search/"' in form
    assert 'data-pattern="search"' in form
    assert 'data-pattern="/admin/' not in form, "the admin's own routes are no API"


def test_scopes_are_escaped(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views.Search, "throttle_scope", "full <b>text</b>")
    assert "<b>text" not in operator.get(f"{BASE}/endpoint/").content.decode()


def test_an_endpoints_page_lists_the_routes_it_matches(operator: Client) -> None:
    endpoint = Endpoint.objects.create(name="search", routes="/api/reports/*\nv1:*")
    text = operator.get(f"{BASE}/endpoint/{endpoint.pk}/change/").content.decode()
    found = re.search(r'<ul class="ratequota-matches">(.*?)</ul>', text)
    assert found is not None
    lines = re.findall("<li>(.*?)</li>", found[1])
    assert lines[:2] == ["Views use it as their scope.", "/api/reports/ (report-list)"]
    assert lines[-1] == "/v1/items/&lt;int:pk&gt;/ (v1:item)"
    Endpoint.objects.update(name="exports", routes="reprots:*")
    assert (
        "No view in the URLconf has this scope"
        in operator.get(f"{BASE}/endpoint/{endpoint.pk}/change/").content.decode()
    )
    Endpoint.objects.update(routes="/*")
    assert re.search(r"and \d+ more routes", operator.get(f"{BASE}/endpoint/{endpoint.pk}/change/").content.decode())


def test_overrides_are_left_out_of_an_endpoints_table(operator: Client, root: User, free: Plan) -> None:
    search = Endpoint.objects.create(name="search")
    RatePolicy.objects.create(endpoint=search, user=root, rates="71/s")
    RatePolicy.objects.create(endpoint=search, plan=free, rates="72/s")
    page = operator.get(f"{BASE}/endpoint/{search.pk}/change/").content.decode()
    assert 'value="72/s"' in page
    assert 'value="71/s"' not in page
    link = f'<a href="{BASE}/ratepolicy/?endpoint__id__exact={search.pk}">2 policies</a>'
    assert link in page
    assert "71/s" in operator.get(f"{BASE}/ratepolicy/?endpoint__id__exact={search.pk}").content.decode()
    viewer = client_of("view_endpoint", name="viewer")
    assert "2 policies" not in viewer.get(f"{BASE}/endpoint/{search.pk}/change/").content.decode()


def difference(client: Client, change: PolicyChange) -> list[tuple[str, str, str]]:
    page = client.get(f"{BASE}/policychange/{change.pk}/change/", follow=True).content.decode()
    return re.findall(r'<tr><th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td></tr>', page, re.DOTALL)


def test_history_outlives_earlier_fields_and_kinds(operator: Client) -> None:
    """Recorded changes of models and fields that no longer exist still open."""
    old = PolicyChange.objects.create(model="tier", action="update", before={"quota": 1}, after={"quota": 2})
    assert difference(operator, old) == [("quota", "1", "2")]
    assert "tier" in operator.get(f"{BASE}/policychange/").content.decode()
    assert difference(operator, PolicyChange.objects.create(model="*", action="publish")) == []


def test_history_is_read_only(operator: Client, root: User, free: Plan) -> None:
    change = PolicyChange.objects.first()
    assert operator.post(f"{BASE}/policychange/{change.pk}/delete/", {"post": "yes"}).status_code == 403
    operator.post(f"{BASE}/policychange/{change.pk}/change/", {"reason": "x"})
    assert not PolicyChange.objects.filter(reason="x").exists()
    form = {"action": "delete_selected", "_selected_action": [change.pk], "post": "yes"}
    operator.post(f"{BASE}/policychange/", form)
    assert "delete_selected" not in operator.get(f"{BASE}/policychange/").content.decode()
    assert operator.post(f"{BASE}/plan/{free.pk}/delete/", {"post": "yes"}).status_code == 302
    root.delete()
    assert set(PolicyChange.objects.values_list("action", "actor")) == {("create", None), ("delete", None)}
