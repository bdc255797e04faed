"""Changes of many rows: a few statements per batch, none longer than a batch; delete pages that stay small."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core.exceptions import FieldDoesNotExist
from django.db import connection, transaction
from django.db.models import Count, F, Q
from django.db.models.signals import pre_delete
from django.test import Client
from django.utils import timezone

from django_ratequota.changes.writer import BATCH
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.policyfile import apply_file
from tests.support.failure import Failure, fail
from tests.support.operators import client_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

PLANS = "/admin/django_ratequota/plan"


#: The verb and the number of parameters of each statement that is sent to the database.
Statements = list[tuple[str, int]]


@contextmanager
def statements() -> Iterator[Statements]:
    seen: Statements = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        seen.append((sql.split()[0], len(params or ())))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        yield seen


def widest(sent: Statements) -> int:
    return max(width for _verb, width in sent)


def subjects(count: int) -> list[RatePolicy]:
    return [RatePolicy(subject=f"ip:10.{n >> 16}.{n >> 8 & 255}.{n & 255}", rates="1/s") for n in range(count)]


def users(count: int) -> list[User]:
    User.objects.bulk_create([User(username=f"u{number}", password="x") for number in range(count)])
    return list(User.objects.filter(password="x").order_by("pk"))


def plan_with_assignments(count: int) -> Plan:
    """Return a plan with two policies and ``count`` assignments."""
    plan = Plan.objects.create(name="Free", slug="free")
    RatePolicy.objects.create(plan=plan, rates="1/s")
    RatePolicy.objects.create(plan=plan, rates="2/s", counted_per="ip")
    PlanAssignment.objects.bulk_create([PlanAssignment(user=user, plan=plan) for user in users(count)])
    return plan


def newest() -> int:
    found = PolicyChange.objects.first()
    return found.pk if found else 0


def a_batch_costs(change: Callable[[int], Statements], most: int) -> None:
    """Assert that another batch of rows adds at most ``most`` statements, none of them longer."""
    few, many = change(BATCH + 1), change(2 * BATCH + 1)
    assert len(many) - len(few) <= most
    assert widest(many) <= widest(few)


# --- Updates and creations. ---


@pytest.mark.thorough
@pytest.mark.parametrize("action", ["create", "update", "update by a join", "delete"])
def test_mass_changes_are_recorded_in_batches(action: str) -> None:
    search = Endpoint.objects.create(name="search")

    def change(count: int) -> Statements:
        RatePolicy.objects.all().delete()
        rows = subjects(count)
        for row in rows:
            row.endpoint = search
        last = newest()
        with statements() as sent:
            RatePolicy.objects.bulk_create(rows, batch_size=BATCH)
        if action != "create":
            last, kept = newest(), Q(endpoint__name="search") if "join" in action else Q()
            with statements() as sent:
                found = RatePolicy.objects.filter(kept)
                assert count == (found.delete()[0] if action == "delete" else found.update(rates="2/s"))
        recorded = PolicyChange.objects.filter(pk__gt=last, action=action.split()[0])
        assert recorded.count() == PolicyChange.objects.filter(pk__gt=last).count() == count
        if "update" in action:
            assert recorded.filter(before__rates="1/s", after__rates="2/s").count() == count
        return sent

    a_batch_costs(change, 25)


@pytest.mark.thorough
def test_a_long_list_of_keys_is_sent_once() -> None:
    rows = RatePolicy.objects.bulk_create(subjects(3 * BATCH))
    keys = [row.pk for row in rows][: 2 * BATCH + 1]
    with statements() as sent:
        assert RatePolicy.objects.filter(pk__in=keys).update(mode="off") == len(keys)
    assert sum(width >= len(keys) for verb, width in sent if verb != "INSERT") <= 1
    assert RatePolicy.objects.filter(mode="off").count() == len(keys)


@pytest.mark.thorough
def test_bulk_update_of_several_batches_keeps_each_value() -> None:
    rows = RatePolicy.objects.bulk_create(subjects(BATCH + 10))
    for number, row in enumerate(rows, 1):
        row.rates = f"{number}/min"
    with statements() as sent:
        assert RatePolicy.objects.bulk_update(rows, ["rates"]) == len(rows)
    # For each row its key twice and its rate; for the batch also its history rows.
    assert widest(sent) <= 15 * BATCH
    assert [row.rates for row in RatePolicy.objects.order_by("pk")] == [row.rates for row in rows]
    with pytest.raises(ValueError, match="Batch size"):
        RatePolicy.objects.bulk_update(rows, ["rates"], batch_size=0)


def test_a_row_that_a_join_returns_twice_is_updated_and_recorded_once() -> None:
    plan = plan_with_assignments(3)
    last = newest()
    assert Plan.objects.filter(assignments__user__username__startswith="u").update(description="x") == 1
    assert [change.object_id for change in PolicyChange.objects.filter(pk__gt=last)] == [str(plan.pk)]
    assert Plan.objects.annotate(Count("policies")).filter(policies__count=2).update(description="y") == 1
    assert Plan.objects.distinct().update(description="z") == 1
    assert Plan.objects.get().description == "z"


def test_an_update_may_use_annotations_and_refuses_unknown_fields() -> None:
    Endpoint.objects.create(name="search", cost=2)
    assert Endpoint.objects.annotate(twice=F("cost") * 2).filter(twice=4).update(cost=F("twice")) == 1
    assert Endpoint.objects.get().cost == 4
    for rows in (Endpoint.objects.none(), Endpoint.objects.all()):
        with pytest.raises(FieldDoesNotExist):
            rows.update(colour="red")


# --- Deletions. ---


@pytest.mark.thorough
def test_a_plan_and_its_assignments_are_deleted_in_batches() -> None:
    def delete(count: int) -> Statements:
        User.objects.all().delete()
        plan = plan_with_assignments(count)
        last = newest()
        with statements() as sent:
            assert plan.delete()[1]["django_ratequota.PlanAssignment"] == count
        recorded = PolicyChange.objects.filter(pk__gt=last, action="delete")
        assert recorded.filter(model="planassignment").exclude(touched_user="").count() == count
        assert recorded.count() == count + 3
        return sent

    a_batch_costs(delete, 25)


@pytest.mark.thorough
def test_what_a_deleted_user_takes_along_is_recorded_in_batches() -> None:
    plan = Plan.objects.create(name="Free", slug="free")

    def delete(count: int) -> Statements:
        (user,) = users(1)
        pk = user.pk
        dates = [timezone.now() + timedelta(days=day) for day in range(count)]
        RatePolicy.objects.bulk_create([RatePolicy(user=user, rates="1/s", starts_at=date) for date in dates])
        PlanAssignment.objects.create(user=user, plan=plan)
        last = newest()
        with statements() as sent:
            assert user.delete()[1]["django_ratequota.RatePolicy"] == count
        recorded = PolicyChange.objects.filter(pk__gt=last)
        assert recorded.filter(action="delete", touched_user=str(pk)).count() == recorded.count() == count + 1
        assert recorded.values("change_id").distinct().count() == 1
        return sent

    a_batch_costs(delete, 25)


def test_a_deletion_that_failed_before_its_first_statement_leaves_nothing_to_record() -> None:
    policies = [RatePolicy.objects.create(rates="1/s", counted_per=name) for name in ("caller", "ip")]
    last = newest()
    pre_delete.connect(fail, sender=RatePolicy)
    try:
        with pytest.raises(Failure):
            policies[0].delete()
    finally:
        pre_delete.disconnect(fail, sender=RatePolicy)
    # PostgreSQL has got no statement in between.
    second = policies[1].pk
    policies[1].delete()
    assert [change.object_id for change in PolicyChange.objects.filter(pk__gt=last)] == [str(second)]


def test_a_failed_deletion_is_not_recorded_later() -> None:
    plan = plan_with_assignments(2)
    last = newest()

    pre_delete.connect(fail, sender=RatePolicy)
    try:
        with pytest.raises(Failure):
            plan.delete()
        with transaction.atomic():
            with pytest.raises(Failure), transaction.atomic():
                Plan.objects.all().delete()
            Plan.objects.filter(pk=plan.pk).update(name="Basic")
    finally:
        pre_delete.disconnect(fail, sender=RatePolicy)
    assert [(change.model, change.action) for change in PolicyChange.objects.filter(pk__gt=last)] == [
        ("plan", "update")
    ]


def test_deletions_within_a_deletion_are_recorded_once() -> None:
    plan = plan_with_assignments(2)
    other = RatePolicy.objects.create(subject="ip:::1", rates="1/s")
    last = newest()

    def along(instance: Any, **_: Any) -> None:
        RatePolicy.objects.filter(pk=other.pk).delete()

    pre_delete.connect(along, sender=Plan)
    try:
        plan.delete()
    finally:
        pre_delete.disconnect(along, sender=Plan)
    deleted = PolicyChange.objects.filter(pk__gt=last, action="delete")
    assert sorted(deleted.values_list("model", flat=True)) == ["plan"] + 2 * ["planassignment"] + 3 * ["ratepolicy"]
    assert len(set(deleted.values_list("model", "object_id"))) == 6


def test_slices_and_values_cannot_be_deleted() -> None:
    plan_with_assignments(2)
    for rows in (Plan.objects.all()[:1], Plan.objects.values("pk")):
        with pytest.raises(TypeError, match="delete"):
            rows.delete()
    assert Plan.objects.exists()
    assert not hasattr(Plan.objects, "delete")


# --- The delete page. ---


@pytest.mark.thorough
@pytest.mark.parametrize(("of", "told"), [("user", "Rate policies: 2000"), ("plan", "Plan assignments: 2000")])
def test_a_delete_page_with_many_rows_is_bounded(of: str, told: str, django_assert_max_num_queries: Any) -> None:
    if of == "plan":
        url = f"{PLANS}/{plan_with_assignments(2000).pk}/delete/"
    else:
        (user,) = users(1)
        dates = [timezone.now() + timedelta(days=day) for day in range(2000)]
        RatePolicy.objects.bulk_create([RatePolicy(user=user, rates="1/s", starts_at=date) for date in dates])
        url = f"/admin/auth/user/{user.pk}/delete/"
    operator = client_of(superuser=True)
    with django_assert_max_num_queries(30):
        page = operator.get(url)
    assert len(page.content) < 100_000
    assert told in re.sub(r"<[^>]+>", "", page.content.decode())
    with statements() as sent:
        assert operator.post(url, {"post": "yes"}).status_code == 302
    assert len(sent) < 400
    assert PolicyChange.objects.filter(action="delete").count() >= 2000


@pytest.mark.parametrize("grants", [True, False])
def test_a_permission_that_only_an_unlisted_row_needs_is_required(grants: bool) -> None:
    search = Endpoint.objects.create(name="search")
    plans = Plan.objects.bulk_create([Plan(name=f"P{number}", slug=f"p{number}") for number in range(120)])
    RatePolicy.objects.bulk_create(
        [RatePolicy(endpoint=search, plan=plan, rates="1/s") for plan in plans]
        + [RatePolicy(endpoint=search, subject="ip:::1", rates="1/s")]
    )
    rights = ["view_endpoint", "delete_endpoint", "delete_ratepolicy", *(["grant_override"] if grants else [])]
    client = client_of(*rights)
    url = f"/admin/django_ratequota/endpoint/{search.pk}/delete/"
    text = client.get(url).content.decode()
    assert ("Rate policies: 121" in text) is grants
    assert ("doesn’t have permission" in text or "your account doesn't have permission" in text) is not grants
    assert client.post(url, {"post": "yes"}).status_code == (302 if grants else 403)
    assert Endpoint.objects.exists() is not grants


def deletion() -> PolicyChange:
    found = PolicyChange.objects.filter(model="plan", action="delete").first()
    assert found is not None
    return found


@pytest.mark.thorough
def test_a_plan_with_many_rows_is_restored_on_its_page(operator: Client) -> None:
    plan = plan_with_assignments(2 * BATCH)
    plan.delete()
    url = f"/admin/django_ratequota/policychange/{deletion().pk}/revert/save/"
    with statements() as sent:
        page = operator.get(url)
    assert len(sent) < 50
    text = page.content.decode()
    assert len(page.content) < 100_000
    assert f"and {2 * BATCH + 3 - 50} more" in text
    seen = re.search(r'name="seen" value="(\w+)"', text)
    assert seen is not None
    with statements() as sent:
        assert operator.post(url, {"seen": seen[1]}).status_code == 302
    assert len(sent) < 200
    assert PlanAssignment.objects.count() == 2 * BATCH
    assert LogEntry.objects.count() == 2 * BATCH + 3
    assert set(LogEntry.objects.values_list("action_flag", flat=True)) == {1}
    assert LogEntry.objects.filter(object_repr__startswith="u").count() == 2 * BATCH


@pytest.mark.thorough
def test_an_import_creates_changes_and_deletes_in_batches() -> None:
    def run(count: int) -> Statements:
        RatePolicy.objects.all().delete()
        entries = [f"- {{subject: 'ip:{row.subject[3:]}', rates: RATES}}" for row in subjects(count)]
        text = "version: 1\npolicies:\n" + "\n".join(entries)
        last = newest()
        with statements() as sent:
            assert len(apply_file(text.replace("RATES", "1/s")).of("create")) == count
            assert len(apply_file(text.replace("RATES", "2/s")).of("change")) == count
            assert len(apply_file("version: 1\npolicies: []", prune=True).of("delete")) == count
        actions = PolicyChange.objects.filter(pk__gt=last).order_by().values_list("action").annotate(Count("pk"))
        assert dict(actions) == {"create": count, "update": count, "delete": count}
        return sent

    a_batch_costs(run, 60)
