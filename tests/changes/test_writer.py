"""What is recorded of a change, in which transaction, and when it is published."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.contrib.auth.models import User
from django.db import OperationalError, connection, transaction
from django.db.models import F, QuerySet
from django.db.models.signals import pre_save
from django.test.utils import CaptureQueriesContext

from django_ratequota.changes.validators import unsupported_constraints
from django_ratequota.changes.writer import changed_by, field_values, write_counted
from django_ratequota.models import Endpoint, ListMember, Plan, PlanAssignment, PolicyChange, RatePolicy, SubjectList
from django_ratequota.models.base import connect_receivers
from django_ratequota.runtime import default_limiter
from tests.faults import poll
from tests.support.failure import Failure, fail

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

JANUARY = datetime(2026, 1, 1, 12, 30, tzinfo=UTC)


def json_of(pk: Any) -> Any:
    """Return a user's key as in JSON: a number, or the text of a UUID."""
    return pk if isinstance(pk, int) else str(pk)


@pytest.fixture
def bob() -> User:
    return User.objects.create(username="bob")


@pytest.fixture
def pro() -> Plan:
    return Plan.objects.create(name="Pro", slug="pro")


def recorded_by(change: Callable[[], Any]) -> list[PolicyChange]:
    """Make a change; returns its rows of the history, oldest first."""
    last = PolicyChange.objects.first()
    change()
    return list(PolicyChange.objects.filter(pk__gt=last.pk if last else 0).order_by("pk"))


def summary(rows: list[PolicyChange]) -> list[tuple[str, str, str]]:
    """Return (model, action, touched user) of each row."""
    return [(row.model, row.action, row.touched_user) for row in rows]


# One object, one change.


def test_a_row_has_the_fields_before_and_after(alice: User, search: Endpoint) -> None:
    policy = RatePolicy(user=alice, endpoint=search, rates="100/60s", starts_at=JANUARY, reason="OPS-1")
    (created,) = recorded_by(policy.save)
    expected = {
        "id": policy.pk,
        "endpoint": search.pk,
        "user": json_of(alice.pk),
        "subject": "",
        "subject_list": None,
        "plan": None,
        "counted_per": "caller",
        "rates": "100/min",
        "algorithm": "token_bucket",
        "mode": "enforce",
        "on_error": "",
        "durable": None,
        "leads_headers": False,
        "starts_at": "2026-01-01T12:30:00Z",
        "ends_at": None,
        "reason": "OPS-1",
    }
    assert (created.before, created.after) == (None, expected)
    assert (created.object_id, created.object_text) == (str(policy.pk), f"user:{alice.pk} × search: 100/min")
    policy.rates = "5/min"
    (updated,) = recorded_by(policy.save)
    assert (updated.before, updated.after) == (expected, {**expected, "rates": "5/min"})
    pk = policy.pk
    (deleted,) = recorded_by(policy.delete)
    assert (deleted.before, deleted.after) == ({**expected, "rates": "5/min"}, None)
    assert deleted.object_id == str(pk)


def test_long_texts_are_cut_to_the_column() -> None:
    plan = Plan.objects.create(name="é" * 100, slug="long")
    rates = ", ".join(f"{number}/{number}s" for number in range(1, 25))
    endpoint = Endpoint.objects.create(name="e" * 100)
    (row,) = recorded_by(RatePolicy(plan=plan, endpoint=endpoint, rates=rates, reason="r" * 200).save)
    assert (len(row.object_text), row.reason) == (300, "r" * 200)


def test_saving_unchanged_objects_records_nothing(alice: User, free: Plan, published: list[int | None]) -> None:
    for instance in (
        free,
        Endpoint.objects.create(name="reports", routes="/a/"),
        PlanAssignment.objects.create(user=alice, plan=free, starts_at=JANUARY),
        RatePolicy.objects.create(user=alice, rates="60/min", starts_at=JANUARY),
    ):
        published.clear()
        assert recorded_by(instance.save) == []
        assert recorded_by(instance._meta.model.objects.get(pk=instance.pk).save) == []
        assert published == []
    # The same rate in another spelling is no change.
    assert recorded_by(lambda: RatePolicy.objects.update(rates="60/60s")) == []


def test_the_same_time_in_another_time_zone_is_not_recorded() -> None:
    """An admin form sets dates in the server's TIME_ZONE: each save of a dated policy was recorded as an edit."""
    policy = RatePolicy.objects.create(rates="1/s", starts_at=JANUARY)
    policy.starts_at = JANUARY.astimezone(ZoneInfo("Europe/Berlin"))
    assert recorded_by(policy.save) == []


def test_a_save_with_update_fields_records_the_stored_values() -> None:
    policy = RatePolicy.objects.create(rates="1/s")
    policy.rates, policy.mode = "2/s", "log"
    (row,) = recorded_by(lambda: policy.save(update_fields=["mode"]))
    assert (row.after["mode"], row.after["rates"]) == ("log", "1/s")
    assert recorded_by(lambda: policy.save(update_fields=[])) == []


def test_values_of_the_database_are_recorded_for_expressions_and_deferred_fields() -> None:
    """``endpoint.cost = F("cost") + 1; endpoint.save()`` failed: an expression is not JSON."""
    endpoint = Endpoint.objects.create(name="reports", cost=2)
    endpoint.cost = F("cost") + 1
    (row,) = recorded_by(endpoint.save)
    assert (row.before["cost"], row.after["cost"], Endpoint.objects.get().cost) == (2, 3, 3)
    part = Endpoint.objects.only("name").get()
    part.name = "find"
    (row,) = recorded_by(part.save)
    assert row.after == {**field_values(Endpoint.objects.get()), "name": "find"}


# Touched users.


def test_a_policy_moved_to_another_user_touches_both_users(alice: User, bob: User, free: Plan) -> None:
    policy = RatePolicy.objects.create(user=alice, rates="1/s")
    for before, after, plan in ((alice, bob, None), (bob, None, free), (None, alice, None)):
        (row,) = recorded_by(lambda owner=after, plan=plan: RatePolicy.objects.update(user=owner, plan=plan))
        keys = [None if owner is None else json_of(owner.pk) for owner in (before, after)]
        assert (row.touched_user, [row.before["user"], row.after["user"]]) == ("", keys)
    policy.refresh_from_db()
    policy.user = bob
    (row,) = recorded_by(policy.save)
    assert row.touched_user == ""


def test_a_key_that_is_too_long_touches_nobody() -> None:
    """A part of it could be another user's."""
    write_counted(f"user:{'9' * 300}", "reset", before={}, after={})
    assert PolicyChange.objects.get().touched_user == ""


def test_a_delete_touches_the_user_stored_in_the_database(alice: User, bob: User) -> None:
    """An object read before the row was moved recorded its old user, and the new one kept the deleted policy."""
    policy = RatePolicy.objects.create(user=alice, rates="1/s")
    RatePolicy.objects.filter(pk=policy.pk).update(user=bob)
    (row,) = recorded_by(policy.delete)
    assert (row.touched_user, row.before["user"]) == (str(bob.pk), json_of(bob.pk))


# Many objects at once.


def test_mass_changes_are_recorded_for_each_row(alice: User, bob: User, free: Plan, pro: Plan) -> None:
    keys = [str(user.pk) for user in (alice, bob)]
    assignments = [PlanAssignment(user=user, plan=free) for user in (alice, bob)]
    created = recorded_by(lambda: PlanAssignment.objects.bulk_create(assignments))
    assert [(row.touched_user, row.after["id"]) for row in created] == [
        (key, one.pk) for key, one in zip(keys, assignments, strict=True)
    ]
    updated = recorded_by(lambda: PlanAssignment.objects.filter(plan=free).update(plan=pro))
    assert {(row.action, row.before["plan"], row.after["plan"]) for row in updated} == {("update", free.pk, pro.pk)}
    for assignment in assignments:
        assignment.reason = f"for {assignment.user}"
    bulk = recorded_by(lambda: PlanAssignment.objects.bulk_update(assignments, ["reason"], batch_size=1))
    assert sorted(row.after["reason"] for row in bulk) == ["for alice", "for bob"]
    deleted = recorded_by(lambda: PlanAssignment.objects.all().delete())
    assert {(row.action, row.after) for row in deleted} == {("delete", None)}
    for rows in (updated, deleted):
        assert sorted(row.touched_user for row in rows) == sorted(keys)


def test_a_bulk_create_over_existing_rows_publishes_everything(free: Plan, alice: User) -> None:
    target = ["slug"] if connection.features.supports_update_conflicts_with_target else None
    update = {"update_conflicts": True, "unique_fields": target, "update_fields": ["description"]}
    ways: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
        ((), {"ignore_conflicts": True}),
        ((), update),
        ((None, True), {}),
    )
    for arguments, options in ways:
        plans = [Plan(name="Free", slug="free", description="new"), Plan(name="Pro", slug="pro")]
        with changed_by(alice):
            (row,) = recorded_by(lambda p=plans, a=arguments, o=options: Plan.objects.bulk_create(p, *a, **o))
        assert (row.model, row.action, row.reason, row.actor) == ("*", "publish", "bulk_create of plans", alice)
        assert Plan.objects.count() == 2


def test_an_update_records_every_row_that_it_changes(alice: User, bob: User, free: Plan) -> None:
    """A row that another transaction committed after the rows were read was changed, and not recorded."""
    PlanAssignment.objects.create(user=alice, plan=free)
    late = [PlanAssignment(user=bob, plan=free)]

    def insert_before_the_update(execute: Any, sql: str, *statement: Any) -> Any:
        if late and sql.startswith("UPDATE"):
            QuerySet(PlanAssignment).bulk_create([late.pop()])
        return execute(sql, *statement)

    with connection.execute_wrapper(insert_before_the_update):
        rows = recorded_by(lambda: PlanAssignment.objects.filter(plan=free).update(reason="OPS-7"))
    changed = PlanAssignment.objects.filter(reason="OPS-7")
    assert not late
    assert sorted(row.touched_user for row in rows) == sorted(str(one.user_id) for one in changed)


# Changes made by Django.


@pytest.mark.parametrize(
    ("what", "models"),
    [
        ("user", ["listmember", "planassignment", "ratepolicy"]),
        ("plan", ["plan", "planassignment", "ratepolicy"]),
        ("endpoint", ["endpoint", "ratepolicy"]),
    ],
)
@pytest.mark.parametrize("how", ["object", "queryset"])
def test_cascaded_deletions_are_recorded(
    what: str, models: list[str], how: str, alice: User, free: Plan, search: Endpoint
) -> None:
    """A user with an override could not be deleted at all, nor a plan or endpoint with policies."""
    for owner, rates in (({"user": alice}, "1/s"), ({"plan": free}, "2/s"), ({"endpoint": search}, "3/s")):
        RatePolicy.objects.create(**owner, rates=rates)
    PlanAssignment.objects.create(user=alice, plan=free)
    ListMember.objects.create(user=alice, subject_list=SubjectList.objects.create(name="Partners"))
    own = str(alice.pk) if what == "user" else ""
    doomed: Any = {"user": alice, "plan": free, "endpoint": search}[what]
    # Read again, as a view would, because the object caches related ones.
    doomed = type(doomed).objects.filter(pk=doomed.pk)
    rows = recorded_by(doomed.delete if how == "queryset" else doomed.get().delete)
    assert sorted(row.model for row in rows) == models
    assert {row.action for row in rows} == {"delete"}
    assert {row.touched_user for row in rows if row.model != "planassignment"} == {own}
    [text] = [row.object_text for row in rows if row.model == "ratepolicy"]
    texts = {"user": f"user:{own} × all endpoints: 1/s", "plan": "plan Free × all endpoints: 2/s"}
    assert text == texts.get(what, "everyone × search: 3/s")


def test_users_may_delete_themselves(alice: User) -> None:
    """The rows of cascaded deletions referred to an actor who was deleted when the transaction committed."""
    RatePolicy.objects.create(user=alice, rates="1/s")
    own = str(alice.pk)
    with changed_by(alice):
        (row,) = recorded_by(alice.delete)
    assert (row.model, row.action, row.touched_user, row.actor) == ("ratepolicy", "delete", own, None)


def test_changes_through_a_related_object_are_recorded(search: Endpoint) -> None:
    """``endpoint.policies.add(policy)`` updates through the base manager, not the recording one."""
    policy = RatePolicy.objects.create(rates="1/s")
    for change, moved_to in (
        (lambda: search.policies.add(policy), search.pk),
        (lambda: search.policies.remove(policy), None),
        (lambda: search.policies.set([policy]), search.pk),
        (search.policies.clear, None),
        (lambda: search.policies.create(rates="2/s"), search.pk),
    ):
        (row,) = recorded_by(change)
        assert (row.model, row.after["endpoint"]) == ("ratepolicy", moved_to)


def test_changes_through_a_proxy_model_are_recorded(free: Plan) -> None:
    """Signals have the proxy as their sender, and no receiver was connected to it."""
    try:

        class ProxyPlan(Plan):
            class Meta:
                proxy = True
                app_label = "django_ratequota"

        connect_receivers()  # as at start-up, after all models are loaded
        proxy = ProxyPlan.objects.get()
        proxy.name = "Basic"
        assert summary(recorded_by(proxy.save)) == [("plan", "update", "")]
    finally:
        del apps.all_models["django_ratequota"]["proxyplan"]
        apps.clear_cache()


# Asynchronous code.


def test_asynchronous_changes_are_recorded(alice: User, bob: User, free: Plan) -> None:
    async def changes() -> None:
        with changed_by(bob, "OPS-9"):
            policy = await RatePolicy.objects.acreate(user=alice, rates="1/s")
            policy.rates = "2/s"
            await policy.asave()
            await RatePolicy.objects.filter(pk=policy.pk).aupdate(rates="3/s")
            await RatePolicy.objects.all().adelete()

    rows = recorded_by(async_to_sync(changes))
    assert [row.after and row.after["rates"] for row in rows] == ["1/s", "2/s", "3/s", None]
    assert {(row.actor, row.reason, row.touched_user) for row in rows} == {(bob, "OPS-9", str(alice.pk))}


# Actor and reason.


def test_changed_by_sets_actor_and_reason(alice: User, bob: User) -> None:
    policy = RatePolicy(rates="1/s")
    rates = iter(range(2, 9))

    def recorded() -> tuple[Any, str]:
        policy.rates = f"{next(rates)}/s"
        (row,) = recorded_by(policy.save)
        return row.actor, row.reason

    assert recorded() == (None, "")
    with changed_by(alice, "OPS-1"):
        assert recorded() == (alice, "OPS-1")
        with changed_by(bob):
            policy.reason = "contract 7"
            assert recorded() == (bob, "contract 7")
        assert recorded() == (alice, "OPS-1")
    with pytest.raises(Failure), changed_by(alice, "OPS-1"):
        raise Failure
    assert recorded() == (None, "")
    with changed_by(None, "é" * 500):
        assert recorded() == (None, "é" * 200)


# The transaction, and the publication on its commit.


def _save(policy: RatePolicy) -> None:
    policy.rates = "7/s"
    policy.save()


def _bulk_update(policy: RatePolicy) -> None:
    policy.rates = "7/s"
    RatePolicy.objects.bulk_update([policy], ["rates"])


CHANGES: dict[str, Callable[[RatePolicy], Any]] = {
    "create": lambda policy: RatePolicy.objects.create(rates="7/s", counted_per="ip"),
    "save": _save,
    "update": lambda policy: RatePolicy.objects.update(rates="7/s"),
    "bulk_create": lambda policy: RatePolicy.objects.bulk_create([RatePolicy(rates="7/s", counted_per="ip")]),
    "bulk_update": _bulk_update,
    "delete": lambda policy: RatePolicy.objects.get(pk=policy.pk).delete(),
    "queryset delete": lambda policy: RatePolicy.objects.all().delete(),
}


def everything() -> Any:
    return list(RatePolicy.objects.values()), list(PolicyChange.objects.values())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_published_at_once_unless_it_is_rolled_back(
    change: Callable[[RatePolicy], Any], published: list[int | None]
) -> None:
    policy = RatePolicy.objects.create(rates="1/s")
    published.clear()
    before, revision = everything(), default_limiter().stored_revision()
    with transaction.atomic():
        change(policy)
        assert everything() != before
        transaction.set_rollback(True)
    assert (everything(), default_limiter().stored_revision(), published) == (before, revision, [])
    policy.refresh_from_db()
    change(policy)
    assert published == [default_limiter().stored_revision()]
    assert published[0] > revision


def test_a_change_that_cannot_be_recorded_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a transaction Django commits a save before post_save is sent."""
    policy = RatePolicy.objects.create(rates="1/s")
    before = everything()
    monkeypatch.setattr("django_ratequota.changes.writer.join_save", fail)
    for change in CHANGES.values():
        with pytest.raises(Failure):
            change(policy)
    assert everything() == before


def test_a_single_save_takes_few_queries(alice: User) -> None:
    """PostgreSQL's own BEGIN and COMMIT are not among the queries."""
    # A database that cannot enforce the constraint is searched for a conflicting policy.
    twins = len(unsupported_constraints(RatePolicy, "default")) * ["SELECT"]
    policy = RatePolicy(user=alice, rates="1/s")
    for expected in (["INSERT", "SELECT", *twins, "INSERT"], ["SELECT", "UPDATE", "SELECT", *twins, "INSERT"]):
        with CaptureQueriesContext(connection) as captured:
            policy.save()
        words = [query["sql"].split()[0] for query in captured]
        assert [word for word in words if word in ("SELECT", "UPDATE", "INSERT")] == expected
        policy.rates = "2/s"


def test_a_save_over_a_concurrent_one_is_recorded(search: Endpoint) -> None:
    """It looked like no change where another transaction had committed meanwhile, and was never published."""
    search.description = "mine"
    search.save()
    fresh = Endpoint.objects.get()

    def other_transaction() -> None:
        try:
            Endpoint.objects.filter(pk=search.pk).update(description="theirs")
        except OperationalError:
            pass  # SQLite has one writer at a time and refuses the second
        finally:
            raw = connection.connection
            connection.close()
            if raw is not None and connection.vendor == "sqlite":
                raw.close()

    rival = threading.Thread(target=other_transaction)

    def interfere(**_: Any) -> None:
        pre_save.disconnect(interfere, sender=Endpoint)
        rival.start()
        poll(
            lambda: waits_for_a_lock() or not rival.is_alive(),
            30,
            "the other transaction to write, or to wait for a lock",
        )

    pre_save.connect(interfere, sender=Endpoint)
    fresh.save()
    rival.join(timeout=30)
    newest = PolicyChange.objects.first()
    assert newest is not None
    assert newest.after["description"] == Endpoint.objects.get().description


def waits_for_a_lock() -> bool:
    waiting = {
        "postgresql": "SELECT count(*) FROM pg_locks WHERE NOT granted",
        # Not innodb_trx: it shows the same rows while it is read every 100 ms.
        "mysql": "SELECT variable_value + 0 FROM information_schema.global_status "
        "WHERE variable_name = 'INNODB_ROW_LOCK_CURRENT_WAITS'",
    }
    if connection.vendor not in waiting:
        return False
    with connection.cursor() as cursor:
        cursor.execute(waiting[connection.vendor])
        return bool(cursor.fetchone()[0])
