"""Restoring versions: which fields are restored, what is refused and why, what is recorded, and permissions."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import time_machine
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_ratequota.changes.writer import field_values, write_publication
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.operations.restore import plan_restoration, problems, restore, versions
from tests.support.operators import client_of, text_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

BASE = "/admin/django_ratequota"
HISTORY = f"{BASE}/policychange"
DAY = timedelta(days=1)


@pytest.fixture(autouse=True)
def whole_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round ``now`` to at least 1 ms: the history stores milliseconds, and drops the fraction only where it is 0."""
    now = timezone.now

    def rounded() -> datetime:
        moment = now()
        return moment.replace(microsecond=max(1, moment.microsecond // 1000) * 1000)

    monkeypatch.setattr(timezone, "now", rounded)


@pytest.fixture
def free() -> Plan:
    return Plan.objects.create(name="Free", slug="free", description="For all", default_for="anonymous")


def last(action: str | None = None, **fields: Any) -> PolicyChange:
    """Return the newest change with this action and these fields."""
    found = PolicyChange.objects.filter(**fields, **({"action": action} if action else {})).first()
    assert found is not None
    return found


def url(change: PolicyChange, version: str) -> str:
    return f"{HISTORY}/{change.pk}/restore/{version}/"


def confirm(client: Client, change: PolicyChange, version: str, **fields: str) -> Any:
    """GET the page, and send its form."""
    page = text_of(client.get(url(change, version)))
    seen = re.search(r'name="seen" value="(\w+)"', page)
    assert seen is not None, page
    return client.post(url(change, version), {"seen": seen[1], **fields})


def difference(page: Any) -> list[list[str]]:
    found = re.search(r'ratequota-difference">.*?<tbody>(.*?)</tbody>', text_of(page), re.S)
    assert found is not None
    rows = re.findall(r"<tr>(.*?)</tr>", found[1], re.S)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in rows]


# --- Restored fields. ---


def edited_everything(free: Plan) -> list[tuple[Any, dict[str, Any]]]:
    """Return an object of each model with every field set, and an edit of each field."""
    alice, bob = (User.objects.create(username=name) for name in ("alice", "bob"))
    pro = Plan.objects.create(name="Pro", slug="pro")
    search, exports = (Endpoint.objects.create(name=name) for name in ("search", "exports"))
    reports = Endpoint.objects.create(
        name="reports",
        description="Reports",
        routes="reports:*\n/api/*",
        methods="GET POST",
        cost=7,
        charged_statuses="4xx",
        exempt=True,
    )
    now = timezone.now()
    assignment = PlanAssignment.objects.create(
        user=alice, plan=pro, starts_at=now - DAY, ends_at=now + DAY, reason="Trial", created_by=bob
    )
    policy = RatePolicy.objects.create(
        plan=pro,
        endpoint=search,
        counted_per="ip",
        rates="10/s, 1000/hour burst 50",
        algorithm="gcra",
        mode="log",
        on_error="deny",
        starts_at=now - DAY,
        ends_at=now + DAY,
        reason="A trial",
    )
    return [
        (free, {"name": "F", "slug": "f", "description": "", "default_for": "", "position": 7}),
        (
            assignment,
            {"user": None, "subject": "tenant:acme", "plan": free, "starts_at": now, "ends_at": None, "anchor": 31}
            | {"reason": "", "created_by": None},
        ),
        (
            reports,
            {
                "name": "r",
                "description": "",
                "routes": "",
                "methods": "",
                "cost": 1,
                "charged_statuses": "",
                "exempt": False,
            },
        ),
        (
            policy,
            {"plan": None, "user": alice, "endpoint": exports, "counted_per": "caller", "rates": "1/s"}
            | {"algorithm": "token_bucket", "mode": "off", "on_error": "", "starts_at": None, "ends_at": None}
            | {"reason": "x", "durable": False},
        ),
    ]


@pytest.mark.usefixtures("tenants")
@pytest.mark.parametrize("position", range(4), ids=["plan", "assignment", "endpoint", "policy"])
@pytest.mark.parametrize("deleted", [False, True], ids=["edited", "deleted"])
def test_every_field_is_restored_under_the_old_primary_key(
    operator: Client, free: Plan, published: list[Any], position: int, deleted: bool
) -> None:
    row, edits = edited_everything(free)[position]
    model = type(row)
    row = model.objects.get(pk=row.pk)
    before = model.objects.filter(pk=row.pk).values().get()
    for name, value in edits.items():
        setattr(row, name, value)
    row.save()
    after = model.objects.filter(pk=row.pk).values().get()
    assert {name for name in before if before[name] == after[name]} <= {
        "id",
        "created_at",
        "subject",
        "subject_list_id",
    }
    change = last("update")
    if deleted:
        model.objects.filter(pk=row.pk).delete()
    published.clear()
    done = confirm(operator, change, "before", reason="Ticket 4711")
    assert done.status_code == 302
    assert done.headers["Location"] == f"{BASE}/{model._meta.model_name}/{row.pk}/change/"
    found = model.objects.filter(pk=row.pk).values().get()
    # The history stores the creation time of an assignment in milliseconds.
    assert {name: value for name, value in found.items() if name != "created_at"} == {
        name: value for name, value in before.items() if name != "created_at"
    }
    assert field_values(model.objects.get(pk=row.pk)) == change.before
    assert len(published) == 1
    restored = last()
    assert (restored.pk, restored.actor.username, restored.reason) == (
        change.pk + 1 + deleted,
        "operator",
        "Ticket 4711",
    )
    assert restored.action == ("create" if deleted else "update")
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.is_addition()) == (str(row.pk), deleted)
    assert entry.get_change_message().startswith("restored version before ")
    # Then restore the version after the change.
    assert confirm(operator, change, "after").status_code == 302
    assert model.objects.filter(pk=row.pk).values().get() | {"created_at": 0} == after | {"created_at": 0}
    assert last().reason.startswith("restored version of ")


def test_unchanged_fields_are_not_written(operator: Client, free: Plan) -> None:
    """Restoring another field does not cut off microseconds, which the history does not store."""
    start = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    policy = RatePolicy.objects.create(plan=free, rates="1/s", starts_at=start)
    RatePolicy.objects.filter(pk=policy.pk).update(rates="2/s")
    assert confirm(operator, last(), "before").status_code == 302
    policy.refresh_from_db()
    assert (policy.rates, policy.starts_at) == ("1/s", start)


def test_later_edits_are_shown_before_they_are_overwritten(operator: Client, free: Plan) -> None:
    search = Endpoint.objects.create(name="search")
    policy = RatePolicy.objects.create(plan=free, rates="1/s", reason="first")
    change = last()
    RatePolicy.objects.filter(pk=policy.pk).update(rates="2/s", mode="log")
    RatePolicy.objects.filter(pk=policy.pk).update(endpoint=search, plan=None)
    rows = difference(operator.get(url(change, "after")))
    assert rows == [
        ["endpoint", f"search (id {search.pk})", "-"],
        ["plan", "-", f"Free (id {free.pk})"],
        ["rates", "2/s", "1/s"],
        ["mode", "log only", "enforce"],
    ]
    assert confirm(operator, change, "after").status_code == 302
    assert field_values(RatePolicy.objects.get()) == change.after


def test_a_version_equal_to_the_object_is_not_restored(operator: Client, free: Plan) -> None:
    change = last()
    page = text_of(operator.get(url(change, "after")))
    assert "the object already matches this version" in page
    assert "Yes, restore it" not in page
    seen = plan_restoration(change, "after").seen
    assert operator.post(url(change, "after"), {"seen": seen}).status_code == 200
    assert last() == change
    assert not LogEntry.objects.exists()


def test_an_edit_before_the_confirmation_is_not_overwritten(operator: Client, free: Plan) -> None:
    Plan.objects.filter(pk=free.pk).update(description="second")
    change = last()
    seen = plan_restoration(change, "before").seen
    Plan.objects.filter(pk=free.pk).update(description="third")
    page = text_of(operator.post(url(change, "before"), {"seen": seen, "reason": "Ticket 4711"}))
    assert "The object was edited in the meantime" in page
    assert 'value="Ticket 4711"' in page
    assert "third" in page
    free.refresh_from_db()
    assert free.description == "third"
    seen = re.search(r'name="seen" value="(\w+)"', page)[1]  # type: ignore[index]
    assert operator.post(url(change, "before"), {"seen": seen}).status_code == 302
    assert Plan.objects.get().description == "For all"


# --- Cascaded deletions. ---


@pytest.fixture
def deleted_plan(free: Plan) -> Plan:
    """The plan Free, deleted with two policies and an assignment; a third policy was deleted two minutes before."""
    now = timezone.now()
    search = Endpoint.objects.create(name="search")
    with time_machine.travel(now - timedelta(minutes=2), tick=True):
        RatePolicy.objects.create(plan=free, rates="9/s", counted_per="everyone").delete()
    RatePolicy.objects.create(plan=free, rates="1/s")
    RatePolicy.objects.create(plan=free, endpoint=search, rates="2/s", ends_at=now + DAY, reason="A trial")
    RatePolicy.objects.create(rates="3/s")
    PlanAssignment.objects.create(user=User.objects.create(username="alice"), plan=free)
    pk = free.pk
    free.delete()
    free.pk = pk
    return free


def test_cascaded_deletions_are_not_restored_by_default(operator: Client, deleted_plan: Plan) -> None:
    change = last("delete", model="plan")
    page = text_of(operator.get(url(change, "before")))
    assert "It will be created again with its old id" in page
    listed = re.search(r"Deleted together with it</h2>\s*<ul>(.*?)</ul>", page, re.S)
    assert listed is not None
    assert sorted(re.findall(r"<bdi>(.*?)</bdi>", listed[1])) == [
        "alice: Free",
        "plan Free × all endpoints: 1/s",
        "plan Free × search: 2/s",
    ]
    assert confirm(operator, change, "before").status_code == 302
    assert Plan.objects.get().pk == deleted_plan.pk
    assert RatePolicy.objects.get().rates == "3/s"
    assert not PlanAssignment.objects.exists()


def test_cascaded_deletions_are_restored_on_request(
    operator: Client, deleted_plan: Plan, published: list[Any]
) -> None:
    published.clear()
    newest = last().pk
    assert confirm(operator, last("delete", model="plan"), "before", also="on").status_code == 302
    assert {policy.rates for policy in RatePolicy.objects.filter(plan=deleted_plan.pk)} == {"1/s", "2/s"}
    for policy in RatePolicy.objects.filter(plan=deleted_plan.pk):
        assert (
            field_values(policy)
            == PolicyChange.objects.get(model="ratepolicy", action="delete", object_id=str(policy.pk)).before
        )
    assert PlanAssignment.objects.get().plan_id == deleted_plan.pk
    assert len(published) == 1
    assert {(c.action, c.actor.username) for c in PolicyChange.objects.filter(pk__gt=newest)} == {
        ("create", "operator")
    }
    assert LogEntry.objects.count() == PolicyChange.objects.filter(pk__gt=newest).count() == 4


def test_cascaded_policies_are_restored_unless_they_exist_again(operator: Client) -> None:
    search = Endpoint.objects.create(name="search")
    for number, per in ((1, "ip"), (2, "caller"), (3, "everyone")):
        RatePolicy.objects.create(endpoint=search, rates=f"{number}/s", counted_per=per)
    pks = dict(RatePolicy.objects.values_list("rates", "pk"))
    Endpoint.objects.all().delete()
    deletion = last("delete", model="endpoint")
    assert {one.object_id for one in plan_restoration(deletion, "before").along} == {str(pk) for pk in pks.values()}
    PolicyChange.objects.filter(model="ratepolicy", object_id=str(pks["1/s"]), action="delete").update(
        change_id=uuid4()
    )
    RatePolicy.objects.create(pk=pks["2/s"], rates="2/s")
    (along,) = plan_restoration(deletion, "before").along
    assert along.object_id == str(pks["3/s"])
    assert confirm(operator, deletion, "before", also="on").status_code == 302
    assert set(Endpoint.objects.get().policies.values_list("pk", "rates")) == {(pks["3/s"], "3/s")}


def test_one_invalid_cascaded_deletion_stops_the_restore(operator: Client, deleted_plan: Plan) -> None:
    Endpoint.objects.all().delete()
    change = last("delete", model="plan")
    newest = last().pk
    page = text_of(confirm(operator, change, "before", also="on"))
    assert "Nothing was restored." in page
    assert re.search(r"search: 2/s cannot be restored with it: The endpoint with the id \d+ is deleted", page)
    assert not Plan.objects.exists()
    assert last().pk == newest
    assert not LogEntry.objects.exists()


# --- Versions that cannot be restored. ---


def refused(operator: Client, change: PolicyChange, version: str, message: str) -> None:
    """Assert that GET shows the message and no button, and that POST changes nothing."""
    newest = last().pk
    page = text_of(operator.get(url(change, version)))
    assert message in page
    assert "Yes, restore it" not in page
    page = text_of(operator.post(url(change, version), {"seen": "x" * 20, "reason": "Ticket 4711"}))
    assert message in page
    try:
        restoration = plan_restoration(change, version)  # type: ignore[arg-type]
    except ValidationError:
        pass
    else:
        assert message in text_of(operator.post(url(change, version), {"seen": restoration.seen}))
    assert last().pk == newest
    assert not LogEntry.objects.exists()


def test_an_override_of_a_deleted_user_is_not_restored(operator: Client) -> None:
    alice = User.objects.create(username="alice")
    pk = alice.pk
    RatePolicy.objects.create(user=alice, rates="1/s")
    alice.delete()
    refused(
        operator, last("delete"), "before", f"The user with the id {pk} is deleted; restore or create that first."
    )


def test_an_assignment_is_restored_without_its_deleted_creator(operator: Client, free: Plan) -> None:
    bob = User.objects.create(username="bob")
    alice = User.objects.create(username="alice")
    made = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
    with time_machine.travel(made, tick=False):
        assignment = PlanAssignment.objects.create(user=alice, plan=free, created_by=bob)
    pk = assignment.pk
    assignment.delete()
    bob.delete()
    assert confirm(operator, last("delete"), "before").status_code == 302
    found = PlanAssignment.objects.get(pk=pk)
    assert (found.created_by, found.created_at, found.starts_at) == (None, made, made)


def test_a_taken_name_and_a_second_default_are_refused_with_a_message(operator: Client, free: Plan) -> None:
    Plan.objects.filter(pk=free.pk).update(name="F", slug="f", default_for="")
    change = last()
    Plan.objects.create(name="Free", slug="pro")
    refused(operator, change, "before", "name: Plan with this Name already exists.")
    Plan.objects.filter(slug="pro").update(name="Pro", default_for="anonymous")
    refused(operator, change, "before", "Another plan is the default for these callers")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"colour": "red"}, "This version has fields that no longer exist (colour)"),
        ({"rates": "10/fortnight"}, "cannot be read any more"),
        ({"counted_per": "tenant"}, "Nothing is counted per &#x27;tenant&#x27;"),
        ({"algorithm": "abacus"}, "is not a valid choice"),
        ({"starts_at": "some day"}, "cannot be read any more"),
        ({"subject": "ip:no address"}, "subject"),
        ({"subject": "ip:::1"}, "Choose one audience"),
        ({"mode": None}, "mode: This field cannot be null."),
    ],
)
def test_versions_that_are_no_longer_valid_are_refused_with_a_message(
    operator: Client, free: Plan, state: dict[str, Any], message: str
) -> None:
    policy = RatePolicy.objects.create(plan=free, rates="1/s")
    change = last()
    PolicyChange.objects.filter(pk=change.pk).update(after={**change.after, **state})
    change.refresh_from_db()
    refused(operator, change, "after", message)
    policy.delete()
    refused(operator, change, "after", message)


def test_fields_missing_from_the_version_keep_their_values(operator: Client, free: Plan) -> None:
    policy = RatePolicy.objects.create(plan=free, rates="1/s", on_error="deny")
    change = last()
    known = {name: value for name, value in change.after.items() if name != "on_error"}
    PolicyChange.objects.filter(pk=change.pk).update(after=known)
    RatePolicy.objects.filter(pk=policy.pk).update(rates="2/s", on_error="local")
    assert confirm(operator, change, "after").status_code == 302
    assert RatePolicy.objects.values_list("rates", "on_error").get() == ("1/s", "local")


def test_restore_raises_the_problems_as_validation_errors(free: Plan) -> None:
    RatePolicy.objects.create(plan=free, rates="1/s").delete()
    restoration = plan_restoration(last("delete"), "before")
    assert problems(restoration) == []
    RatePolicy.objects.create(plan=free, rates="2/s")
    assert len(problems(restoration)) == 1
    with pytest.raises(ValidationError, match="A policy without dates already"):
        restore(restoration, actor=None, reason="")
    assert RatePolicy.objects.count() == 1


# --- Offered versions, and permissions. ---


def test_versions_offered_for_each_action(operator: Client, free: Plan) -> None:
    created = last()
    Plan.objects.filter(pk=free.pk).update(name="F")
    updated = last()
    free.delete()
    deleted = last()
    write_publication("by hand")
    published = last()
    assert [versions(c) for c in (created, updated, deleted, published)] == [
        ("after",),
        ("after", "before"),
        ("before",),
        (),
    ]
    for change in (created, updated, deleted, published):
        page = text_of(operator.get(f"{HISTORY}/{change.pk}/change/"))
        for version in ("after", "before", "other"):
            there = version in versions(change)
            assert (url(change, version) in page) is there
            assert operator.get(url(change, version)).status_code == (200 if there else 404)
    assert operator.get(f"{HISTORY}/4711/restore/after/").status_code == 404
    assert operator.get(f"{HISTORY}/x/restore/after/").status_code == 404


def scene(free: Plan) -> dict[str, PolicyChange]:
    """Return changes whose version before is to be restored, by name."""
    alice = User.objects.create(username="alice")
    pro = Plan.objects.create(name="Pro", slug="pro")
    override = RatePolicy.objects.create(user=alice, rates="1/s")
    policy = RatePolicy.objects.create(plan=free, rates="1/s")
    both = RatePolicy.objects.create(subject="ip:::1", rates="1/s")
    edits: dict[str, Any] = {
        "override": lambda: RatePolicy.objects.filter(pk=override.pk).update(rates="2/s"),
        "policy": lambda: RatePolicy.objects.filter(pk=policy.pk).update(rates="2/s"),
        "policy that was an override": lambda: RatePolicy.objects.filter(pk=both.pk).update(subject="", plan=pro),
        "deleted override": RatePolicy.objects.create(user=alice, rates="1/s", counted_per="ip").delete,
        "deleted policy": RatePolicy.objects.create(plan=free, rates="1/s", counted_per="ip").delete,
        "plan": lambda: Plan.objects.filter(pk=pro.pk).update(name="P"),
        "deleted endpoint": Endpoint.objects.create(name="gone").delete,
    }
    return {name: (edit(), last())[1] for name, edit in edits.items()}


@pytest.mark.parametrize(
    ("permissions", "restorable"),
    [
        (("view_plan", "view_ratepolicy", "view_endpoint", "change_endpoint", "delete_endpoint"), set()),
        (("change_ratepolicy",), {"policy"}),
        (("add_ratepolicy", "add_endpoint"), {"deleted policy", "deleted endpoint"}),
        (("grant_override",), {"override", "deleted override"}),
        (
            ("grant_override", "change_ratepolicy", "change_plan"),
            {"override", "policy", "policy that was an override", "deleted override", "plan"},
        ),
    ],
)
def test_restoring_needs_the_permission_for_the_version(
    free: Plan, permissions: tuple[str, ...], restorable: set[str]
) -> None:
    found = scene(free)
    client = client_of("view_policychange", *permissions)
    for name, change in found.items():
        page = client.get(f"{HISTORY}/{change.pk}/change/")
        assert (url(change, "before") in text_of(page)) is (name in restorable), name
        assert client.get(url(change, "before")).status_code == (200 if name in restorable else 403), name
        newest = last().pk
        done = client.post(url(change, "before"), {"seen": plan_restoration(change, "before").seen})
        assert done.status_code == (302 if name in restorable else 403), name
        assert (last().pk > newest) is (name in restorable), name


@pytest.mark.parametrize("grants", [True, False])
def test_restoring_cascaded_overrides_needs_permission_to_grant_them(grants: bool) -> None:
    search = Endpoint.objects.create(name="search")
    RatePolicy.objects.create(user=User.objects.create(username="alice"), endpoint=search, rates="1/s")
    RatePolicy.objects.create(subject="ip:::1", endpoint=search, rates="2/s")
    Endpoint.objects.all().delete()
    client = client_of("view_policychange", "add_endpoint", "add_ratepolicy", *(["grant_override"] if grants else []))
    change = last("delete", model="endpoint")
    assert ("You do not have permission to restore these" in text_of(client.get(url(change, "before")))) is not grants
    assert confirm(client, change, "before", also="on").status_code == 302
    assert Endpoint.objects.exists()
    assert RatePolicy.objects.count() == (2 if grants else 0)


def test_versions_of_unregistered_models_are_not_offered(operator: Client, free: Plan) -> None:
    change = last()
    Plan.objects.filter(pk=free.pk).update(name="F")
    reverse("admin:index")  # builds the URLs while the model is registered
    kept = admin.site._registry.pop(Plan)
    try:
        assert operator.get(url(change, "after")).status_code == 403
        assert "/restore/" not in text_of(operator.get(f"{HISTORY}/{change.pk}/change/"))
    finally:
        admin.site._registry[Plan] = kept


# --- The list. ---


def test_the_list_summarizes_each_change(operator: Client, free: Plan) -> None:
    pro = Plan.objects.create(name="Pro", slug="pro")
    policy = RatePolicy.objects.create(plan=free, rates="10/min")
    edits: list[tuple[dict[str, Any], str]] = [
        ({"plan": pro}, "plan: Free → Pro"),
        (
            {"mode": "off", "counted_per": "ip", "reason": "x", "on_error": "deny"},
            "counted per: caller → ip; mode: enforce → off; and 2 more fields",
        ),
        ({"reason": "y" * 100}, f"reason: x → {'y' * 39}…"),
        ({"reason": ""}, f"reason: {'y' * 39}… → empty"),
    ]
    for fields, _words in edits:
        RatePolicy.objects.filter(pk=policy.pk).update(**fields)
    pro_pk = pro.pk
    policy.delete()
    pro.delete()
    page = text_of(operator.get(f"{HISTORY}/"))
    cells = re.findall(r'<td class="field-what_changed">(.*?)</td>', re.sub("[\u2066\u2069]", "", page))
    texts = [words.replace("Pro", f"deleted (id {pro_pk})") for _fields, words in reversed(edits)]
    assert cells == ["-", "-", *texts, "-", "-", "-"]


def test_changes_are_filtered_by_user(operator: Client, free: Plan) -> None:
    alice, bob = (User.objects.create(username=name) for name in ("alice", "bob"))
    RatePolicy.objects.create(user=alice, rates="1/s")
    RatePolicy.objects.create(user=bob, rates="2/s")
    change = last(touched_user=str(alice.pk))

    def found(query: str) -> set[str]:
        page = operator.get(f"{HISTORY}/?touched_user={query}")
        assert page.status_code == 200
        return {row.touched_user for row in page.context["cl"].queryset}

    assert found(str(alice.pk)) == {str(alice.pk)}
    assert found("nobody") == set()
    page = text_of(operator.get(f"{HISTORY}/{change.pk}/change/"))
    link = f'<a href="{HISTORY}/?touched_user={alice.pk}">alice (id {alice.pk})</a>'
    assert link in page
    assert f"alice (id {alice.pk})" in text_of(operator.get(f"{HISTORY}/?touched_user={alice.pk}"))


def test_a_change_links_to_all_changes_of_its_object(operator: Client, free: Plan) -> None:
    Plan.objects.filter(pk=free.pk).update(name="F")
    Endpoint.objects.create(pk=free.pk, name="search")
    page = text_of(operator.get(f"{HISTORY}/{last(model='plan').pk}/change/"))
    link = re.search(r'href="([^"]*)">All changes of this object', page)
    assert link is not None
    listed = operator.get(link[1].replace("&amp;", "&")).context["cl"].queryset
    assert [(change.model, change.action) for change in listed] == [("plan", "update"), ("plan", "create")]
