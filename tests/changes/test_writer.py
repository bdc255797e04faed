"""What is recorded of a change, in which transaction, and when it is published."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import redis
from asgiref.sync import async_to_sync
from django.apps import apps
from django.contrib.auth.models import User
from django.db import IntegrityError, OperationalError, connection, transaction
from django.db.models import F
from django.db.models.signals import pre_save
from django.test.utils import CaptureQueriesContext

from django_ratequota.changes.validators import unsupported_constraints
from django_ratequota.changes.writer import changed_by, field_values, write_publication
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.models.base import TrackingQuerySet, connect_receivers
from django_ratequota.runtime import default_limiter
from tests.faults import poll

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

RECORDED = (Plan, PlanAssignment, Endpoint, RatePolicy)
JANUARY = datetime(2026, 1, 1, 12, 30, tzinfo=UTC)


def json_of(pk: Any) -> Any:
    """Return a user's key as in JSON: a number, or the text of a UUID."""
    return pk if isinstance(pk, int) else str(pk)


class Failure(Exception):
    """An error raised by a test."""


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


def undone(change: Callable[[], Any]) -> None:
    """Make a change in a transaction, or a savepoint, that is rolled back."""
    with transaction.atomic():
        change()
        transaction.set_rollback(True)


def summary(rows: list[PolicyChange]) -> list[tuple[str, str, str]]:
    """Return (model, action, touched user) of each row."""
    return [(row.model, row.action, row.touched_user) for row in rows]


def users(*owners: User) -> list[str]:
    return sorted(str(owner.pk) for owner in owners)


# One object, one change.


def test_saves_and_deletes_of_each_model_are_recorded(alice: User, free: Plan, search: Endpoint) -> None:
    own = str(alice.pk)
    for instance, touched in (
        (Plan(name="Pro", slug="pro"), ""),
        (PlanAssignment(user=alice, plan=free), own),
        (Endpoint(name="reports"), ""),
        (RatePolicy(rates="1/s"), ""),
        (RatePolicy(rates="1/s", plan=free), ""),
        (RatePolicy(rates="1/s", subject="ip:203.0.113.7"), ""),
        (RatePolicy(rates="1/s", user=alice), own),
    ):
        name = instance._meta.model_name
        assert summary(recorded_by(instance.save)) == [(name, "create", touched)]
        field = {"plan": "name", "endpoint": "name"}.get(str(name), "reason")
        setattr(instance, field, "changed")
        assert summary(recorded_by(instance.save)) == [(name, "update", touched)]
        assert summary(recorded_by(instance.delete)) == [(name, "delete", touched)]


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
        "durable": True,
        "starts_at": "2026-01-01T12:30:00Z",
        "ends_at": None,
        "reason": "OPS-1",
    }
    assert (created.before, created.after) == (None, expected)
    assert (created.object_id, created.object_text) == (str(policy.pk), "user alice × search: 100/min")
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


def test_values_computed_by_the_database_are_recorded() -> None:
    """``endpoint.cost = F("cost") + 1; endpoint.save()`` failed: an expression is not JSON."""
    endpoint = Endpoint.objects.create(name="reports", cost=2)
    endpoint.cost = F("cost") + 1
    (row,) = recorded_by(endpoint.save)
    assert (row.before["cost"], row.after["cost"]) == (2, 3)
    assert Endpoint.objects.get().cost == 3


def test_all_fields_of_a_deferred_object_are_recorded(search: Endpoint) -> None:
    part = Endpoint.objects.only("name").get()
    part.name = "find"
    (row,) = recorded_by(part.save)
    assert row.after == {**field_values(search), "name": "find"}


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


def test_a_delete_touches_the_user_stored_in_the_database(alice: User, bob: User) -> None:
    """An object read before the row was moved recorded its old user, and the new one kept the deleted policy."""
    policy = RatePolicy.objects.create(user=alice, rates="1/s")
    RatePolicy.objects.filter(pk=policy.pk).update(user=bob)
    (row,) = recorded_by(policy.delete)
    assert (row.touched_user, row.before["user"]) == (str(bob.pk), json_of(bob.pk))


# Many objects at once.


def test_mass_changes_are_recorded_for_each_row(alice: User, bob: User, free: Plan, pro: Plan) -> None:
    assignments = [PlanAssignment(user=user, plan=free) for user in (alice, bob)]
    created = recorded_by(lambda: PlanAssignment.objects.bulk_create(assignments))
    assert summary(created) == [("planassignment", "create", str(user.pk)) for user in (alice, bob)]
    assert [row.after["id"] for row in created] == [assignment.pk for assignment in assignments]
    updated = recorded_by(lambda: PlanAssignment.objects.filter(plan=free).update(plan=pro))
    assert sorted(row.touched_user for row in updated) == users(alice, bob)
    assert {(row.action, row.before["plan"], row.after["plan"]) for row in updated} == {("update", free.pk, pro.pk)}
    for assignment in assignments:
        assignment.reason = f"for {assignment.user}"
    bulk = recorded_by(lambda: PlanAssignment.objects.bulk_update(assignments, ["reason"], batch_size=1))
    assert sorted(row.after["reason"] for row in bulk) == ["for alice", "for bob"]
    deleted = recorded_by(lambda: PlanAssignment.objects.all().delete())
    assert sorted(row.touched_user for row in deleted) == users(alice, bob)
    assert {(row.action, row.after) for row in deleted} == {("delete", None)}


def test_only_rows_that_change_are_recorded(free: Plan, pro: Plan, published: list[int | None]) -> None:
    published.clear()
    for nothing in (
        lambda: Plan.objects.none().update(name="x"),
        lambda: Plan.objects.filter(name="x").update(name="y"),
        lambda: Plan.objects.bulk_create([]),
        lambda: Plan.objects.filter(name="x").delete(),
    ):
        assert recorded_by(nothing) == []
    assert published == []
    Plan.objects.filter(pk=free.pk).update(description="x")
    matched: list[int] = []
    (row,) = recorded_by(lambda: matched.append(Plan.objects.order_by("-name").update(description="x")))
    assert (row.object_id, matched) == (str(pro.pk), [2])


@pytest.mark.parametrize("how", ["ignore", "update", "positional"])
def test_a_bulk_create_over_existing_rows_publishes_everything(how: str, free: Plan, alice: User) -> None:
    plans = [Plan(name="Free", slug="free", description="new"), Plan(name="Pro", slug="pro")]

    def write() -> None:
        with changed_by(alice):
            if how == "ignore":
                Plan.objects.bulk_create(plans, ignore_conflicts=True)
            elif how == "positional":
                Plan.objects.bulk_create(plans, None, True)
            else:
                target = connection.features.supports_update_conflicts_with_target
                Plan.objects.bulk_create(
                    plans,
                    update_conflicts=True,
                    unique_fields=["slug"] if target else None,
                    update_fields=["description"],
                )

    (row,) = recorded_by(write)
    assert (row.model, row.action, row.reason) == ("*", "publish", "bulk_create of plans")
    assert row.actor == alice
    assert Plan.objects.count() == 2


def test_an_update_records_every_row_that_it_changes(
    alice: User, bob: User, free: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that another transaction committed after the rows were read was changed, and not recorded."""
    PlanAssignment.objects.create(user=alice, plan=free)
    plain_rows = TrackingQuerySet._rows

    def rows_before_another_change(self: Any) -> Any:
        rows = plain_rows(self)
        monkeypatch.undo()
        PlanAssignment.objects.create(user=bob, plan=free)
        return rows

    monkeypatch.setattr(TrackingQuerySet, "_rows", rows_before_another_change)
    rows = recorded_by(lambda: PlanAssignment.objects.filter(plan=free).update(reason="OPS-7"))
    recorded = sorted(row.touched_user for row in rows if row.action == "update")
    changed = PlanAssignment.objects.filter(reason="OPS-7")
    assert recorded == sorted(str(assignment.user_id) for assignment in changed)


# Changes made by Django.


@pytest.mark.parametrize("what", ["user", "plan", "endpoint"])
@pytest.mark.parametrize("how", ["object", "queryset"])
def test_cascaded_deletions_are_recorded(
    what: str, how: str, alice: User, bob: User, free: Plan, search: Endpoint
) -> None:
    """A user with an override could not be deleted at all, nor a plan or endpoint with policies."""
    RatePolicy.objects.create(user=alice, rates="1/s")
    RatePolicy.objects.create(plan=free, rates="2/s")
    RatePolicy.objects.create(endpoint=search, rates="3/s")
    PlanAssignment.objects.create(user=alice, plan=free)
    kept = PlanAssignment.objects.create(user=bob, plan=Plan.objects.create(name="Pro", slug="pro"))
    doomed: Any = {"user": alice, "plan": free, "endpoint": search}[what]
    own = str(alice.pk)
    # Read again, as a view would, because the object caches related ones.
    doomed = type(doomed).objects.filter(pk=doomed.pk)
    rows = recorded_by(doomed.delete if how == "queryset" else doomed.get().delete)
    assert (
        sorted(summary(rows))
        == {
            "user": [("planassignment", "delete", own), ("ratepolicy", "delete", own)],
            "plan": [("plan", "delete", ""), ("planassignment", "delete", own), ("ratepolicy", "delete", "")],
            "endpoint": [("endpoint", "delete", ""), ("ratepolicy", "delete", "")],
        }[what]
    )
    names = {row.model: row.object_text for row in rows}
    assert (
        names["ratepolicy"]
        == {
            "user": "user alice × all endpoints: 1/s",
            "plan": "plan Free × all endpoints: 2/s",
            "endpoint": "everyone × search: 3/s",
        }[what]
    )
    assert PlanAssignment.objects.filter(pk=kept.pk).exists()


def test_users_may_delete_themselves(alice: User) -> None:
    """The rows of cascaded deletions referred to an actor who was deleted when the transaction committed."""
    RatePolicy.objects.create(user=alice, rates="1/s")
    own = str(alice.pk)
    with changed_by(alice):
        rows = recorded_by(alice.delete)
    assert summary(rows) == [("ratepolicy", "delete", own)]
    assert rows[0].actor is None


@pytest.mark.parametrize("verb", ["add", "set", "create", "remove", "clear"])
def test_changes_through_a_related_object_are_recorded(verb: str, search: Endpoint) -> None:
    """``endpoint.policies.add(policy)`` updates through the base manager, not the recording one."""
    policy = RatePolicy.objects.create(rates="1/s", endpoint=search if verb in ("remove", "clear") else None)
    change: dict[str, Callable[[], Any]] = {
        "add": lambda: search.policies.add(policy),
        "set": lambda: search.policies.set([policy]),
        "create": lambda: search.policies.create(rates="2/s"),
        "remove": lambda: search.policies.remove(policy),
        "clear": search.policies.clear,
    }
    (row,) = recorded_by(change[verb])
    moved_to = None if verb in ("remove", "clear") else search.pk
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
            policy.rates = "4/s"
            await RatePolicy.objects.abulk_update([policy], ["rates"])
            await RatePolicy.objects.aupdate_or_create(user=alice, defaults={"rates": "5/s"})
            await policy.arefresh_from_db()
            await policy.adelete()
            await RatePolicy.objects.abulk_create([RatePolicy(user=alice, rates="6/s")])
            await RatePolicy.objects.all().adelete()

    rows = recorded_by(async_to_sync(changes))
    assert [row.after and row.after["rates"] for row in rows] == [*(f"{n}/s" for n in range(1, 6)), None, "6/s", None]
    assert {(row.actor, row.reason, row.touched_user) for row in rows} == {(bob, "OPS-9", str(alice.pk))}


# Actor and reason.


def test_recorded_as_sets_actor_and_reason(alice: User, bob: User) -> None:
    policy = RatePolicy(rates="1/s")
    assert [(row.actor, row.reason) for row in recorded_by(policy.save)] == [(None, "")]
    policy.rates = "2/s"
    with changed_by(alice, "OPS-1"):
        assert [(row.actor, row.reason) for row in recorded_by(policy.save)] == [(alice, "OPS-1")]
        with changed_by(bob):
            policy.reason = "contract 7"
            assert [(row.actor, row.reason) for row in recorded_by(policy.save)] == [(bob, "contract 7")]
        policy.rates = "3/s"
        assert [(row.actor, row.reason) for row in recorded_by(policy.save)] == [(alice, "OPS-1")]
    policy.rates = "4/s"
    assert [(row.actor, row.reason) for row in recorded_by(policy.save)] == [(None, "")]
    with pytest.raises(Failure), changed_by(alice, "OPS-1"):
        raise Failure
    with changed_by(None, "é" * 500):
        assert [(row.actor, row.reason) for row in recorded_by(policy.delete)] == [(None, "é" * 200)]


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
change_by = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


def everything() -> Any:
    """Return all rows of policies and of the history."""
    return list(RatePolicy.objects.values()), list(PolicyChange.objects.values())


@change_by
def test_a_change_is_published_at_once_unless_it_is_rolled_back(
    change: Callable[[RatePolicy], Any], published: list[int | None]
) -> None:
    policy = RatePolicy.objects.create(rates="1/s")
    published.clear()
    before, revision = everything(), default_limiter().stored_revision()
    during: list[Any] = []
    undone(lambda: change(policy) or during.append(everything()))
    assert during != [before]
    assert (everything(), default_limiter().stored_revision(), published) == (before, revision, [])
    policy.refresh_from_db()
    change(policy)
    assert published == [default_limiter().stored_revision()]
    assert published[0] > revision


@change_by
def test_a_rolled_back_savepoint_leaves_nothing_and_the_rest_is_published(
    change: Callable[[RatePolicy], Any], published: list[int | None]
) -> None:
    policy = RatePolicy.objects.create(rates="1/s")
    published.clear()
    before = everything()
    with transaction.atomic():
        undone(lambda: change(policy))
        assert everything() == before
        with transaction.atomic():
            Plan.objects.create(name="Free", slug="free")
        undone(lambda: Plan.objects.create(name="Pro", slug="pro"))
        assert published == []
    assert len(published) == 1
    assert PolicyChange.objects.count() == len(before[1]) + 1


def test_a_change_that_the_database_refuses_is_not_recorded(free: Plan, published: list[int | None]) -> None:
    before = list(PolicyChange.objects.values())
    with pytest.raises(IntegrityError):
        Plan.objects.create(name="Free", slug="other")
    with pytest.raises(IntegrityError):
        RatePolicy.objects.bulk_create([RatePolicy(rates="1/s"), RatePolicy(rates="2/s")])
    assert list(PolicyChange.objects.values()) == before
    assert not RatePolicy.objects.exists()


def test_a_change_that_cannot_be_recorded_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a transaction Django commits a save before post_save is sent."""

    def fail(*args: Any) -> None:
        raise Failure

    policy = RatePolicy.objects.create(rates="1/s")
    before = everything()
    monkeypatch.setattr("django_ratequota.changes.writer.join_save", fail)
    for change in CHANGES.values():
        with pytest.raises(Failure):
            change(policy)
    assert everything() == before


def test_a_hundred_saves_in_one_transaction_are_published_once(
    redis_client: redis.Redis, published: list[int | None]
) -> None:
    default_limiter().publish()
    calls = evalsha_calls(redis_client)
    with transaction.atomic():
        for number in range(100):
            RatePolicy.objects.create(rates="1/s", subject=f"ip:203.0.113.{number}")
    assert evalsha_calls(redis_client) - calls == 1
    assert len(published) == 1
    assert PolicyChange.objects.count() == 100


def evalsha_calls(client: redis.Redis) -> int:
    """Return how often clients of the server have run a script."""
    return int(client.info("commandstats")["cmdstat_evalsha"]["calls"])


def test_a_single_save_takes_few_queries(alice: User) -> None:
    with CaptureQueriesContext(connection) as captured:
        policy = RatePolicy.objects.create(user=alice, rates="1/s")
    # BEGIN, the policy, its row, COMMIT; PostgreSQL's own BEGIN and COMMIT are not among the queries.
    # A database that cannot enforce the constraint is searched for a conflicting policy first.
    twins = len(unsupported_constraints(RatePolicy, "default")) * ["SELECT"]
    assert [query["sql"].split()[0] for query in captured if query["sql"].split()[0] in ("SELECT", "INSERT")] == [
        "INSERT",
        "SELECT",
        *twins,
        "INSERT",
    ]
    policy.rates = "2/s"
    with CaptureQueriesContext(connection) as captured:
        policy.save()
    words = [query["sql"].split()[0] for query in captured]
    assert [word for word in words if word in ("SELECT", "UPDATE", "INSERT")] == [
        "SELECT",
        "UPDATE",
        "SELECT",
        *twins,
        "INSERT",
    ]


def test_record_publication_is_recorded_as_its_own_row(alice: User, published: list[int | None]) -> None:
    with changed_by(alice), transaction.atomic():
        rows = recorded_by(lambda: write_publication("after a migration"))
        assert published == []
    (row,) = rows
    assert (row.model, row.action, row.reason, row.actor) == ("*", "publish", "after a migration", alice)
    assert len(published) == 1


def test_a_save_over_a_concurrent_one_is_recorded(search: Endpoint) -> None:
    """Another transaction committed between reading the stored row and saving the old value again.

    The save looked like no change, so the old value was never published.
    """
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
    """Return whether any transaction waits for the lock of another."""
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
