"""The snapshot and the protocol that keeps it current, its races included: no sleeps, only barriers."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import DatabaseError, OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_ratequota.changes.publication import publication_pending
from django_ratequota.changes.writer import write_publication
from django_ratequota.exceptions import StoreError
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.policies import entries, loading
from django_ratequota.policies.cache import PolicyCache
from django_ratequota.policies.loading import load_snapshot
from django_ratequota.runtime import default_limiter
from tests.enforcement.test_check import database_down
from tests.support.properties import thorough_after
from tests.support.requests import check_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


@pytest.fixture
def policies() -> PolicyCache:
    return PolicyCache()


def newest() -> int:
    return default_limiter().stored_revision()


def rates(policies: PolicyCache) -> list[str]:
    """The rate texts that the snapshot holds for all endpoints and callers."""
    snapshot = policies.current()
    assert snapshot is not None
    group = snapshot.groups.get(None, {}).get("caller")
    return [policy.text for policy in group] if group else []


def queries(call: Callable[[], Any]) -> int:
    with CaptureQueriesContext(connection) as captured:
        call()
    return len(captured)


def pro() -> Plan:
    return Plan.objects.create(name="Pro", slug="pro")


def fill(plans: int) -> None:
    for number in range(plans):
        plan = Plan.objects.create(name=f"p{number}", slug=f"p{number}")
        endpoint = Endpoint.objects.create(name=f"e{number}", routes="/a/*\n/b/*", methods="GET")
        RatePolicy.objects.create(plan=plan, endpoint=endpoint, rates="5/min, 9/hour")


@pytest.mark.parametrize("plans", [2, 20])
def test_loading_takes_five_queries_however_many_rows(plans: int) -> None:
    fill(plans)
    assert queries(lambda: load_snapshot(1)) == 5


def test_a_user_who_is_not_in_memory_takes_two_queries(
    policies: PolicyCache, alice: User, too_many_entries: None
) -> None:
    for number in range(5):
        RatePolicy.objects.create(user=alice, rates="1/s", ends_at=timezone.now() + timedelta(days=number + 1))
    policies.reload(newest())
    assert queries(lambda: policies.load_user(str(alice.pk))) == 2
    entry = policies.user(str(alice.pk))
    assert entry is not None
    assert len(entry.policies) == 5


def override_by_sql(alice: User) -> None:
    RatePolicy.objects.bulk_create([RatePolicy(user=alice, rates="1/s")])
    PolicyChange.objects.all().delete()
    write_publication("raw SQL")
    default_limiter().publish()


def test_the_entries_of_the_last_users_only_are_kept(
    policies: PolicyCache, alice: User, monkeypatch: pytest.MonkeyPatch, too_many_entries: None
) -> None:
    policies.reload(newest())
    monkeypatch.setattr(entries, "MOST_ENTRIES", 2)
    policies.entries(["7", "8", "9"])
    assert [policies.user(key) is not None for key in ("7", "8", "9")] == [False, True, True]


@pytest.mark.parametrize(
    ("first", "more"),
    [
        pytest.param(lambda alice: RatePolicy.objects.create(user=alice, rates="1/s"), 2, id="override"),
        pytest.param(override_by_sql, 0, id="by SQL"),
        pytest.param(lambda alice: PlanAssignment.objects.create(user=alice, plan=pro()), 2, id="user's plan"),
        pytest.param(
            lambda _: PlanAssignment.objects.create(subject="tenant:acme", plan=pro()), 0, id="tenant's plan"
        ),
    ],
)
def test_users_take_no_query_until_their_own_rows_change(
    policies: PolicyCache, alice: User, first: Callable[[User], Any], more: int, settings: Any
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "tests.project.views.tenant"}}
    policies.reload(newest())
    assert queries(lambda: policies.load_user(str(alice.pk))) == 0
    first(alice)
    policies.reload(newest())
    assert queries(lambda: policies.load_user(str(alice.pk))) == more
    assert queries(lambda: policies.load_user(str(alice.pk))) == 0


def test_what_one_connection_writes_is_pending_for_that_one_until_it_ends(policies: PolicyCache) -> None:
    policies.reload(newest())
    with ThreadPoolExecutor(1) as pool, transaction.atomic():
        RatePolicy.objects.create(rates="1/s")
        assert (publication_pending(), policies.current()) == (True, None)
        assert pool.submit(lambda: (publication_pending(), policies.current() is None)).result(10) == (False, False)
        assert publication_pending(), "another thread's look changes nothing"
        transaction.set_rollback(True)
    assert not publication_pending()


def test_changes_are_read_before_the_data(policies: PolicyCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the other way round, what commits in between would be noted as seen and never loaded."""
    policies.reload(newest())
    RatePolicy.objects.create(rates="1/s")
    update = loading.update_snapshot

    def update_then_commit(*args: Any) -> Any:
        updated = update(*args)
        if not RatePolicy.objects.filter(rates="2/s").exists():
            RatePolicy.objects.create(rates="2/s", counted_per="caller", starts_at=timezone.now())
        return updated

    monkeypatch.setattr(loading, "update_snapshot", update_then_commit)
    policies.reload(newest())
    assert rates(policies) == ["1/s"]
    policies.reload(newest())
    assert sorted(rates(policies)) == ["1/s", "2/s"]


@pytest.mark.parametrize("own", [True, False], ids=["the user's", "shared"])
def test_an_entry_read_during_a_reload_is_kept_unless_it_changed(
    policies: PolicyCache, alice: User, monkeypatch: pytest.MonkeyPatch, too_many_entries: None, own: bool
) -> None:
    """A slow thread put back what a reload had dropped; under a burst of shared edits no user stayed in memory."""
    RatePolicy.objects.create(user=User.objects.create(username="bob"), rates="1/s")
    policies.reload(newest())
    load = loading.load_entries

    def load_slowly(keys: Any) -> Any:
        entries = load(keys)
        RatePolicy.objects.create(user=alice if own else None, rates="1/s")
        policies.reload(newest())
        return entries

    monkeypatch.setattr(loading, "load_entries", load_slowly)
    assert policies.load_user(str(alice.pk)).policies == ()
    assert (policies.user(str(alice.pk)) is None) is own
    monkeypatch.setattr(loading, "load_entries", load)
    assert len(policies.load_user(str(alice.pk)).policies) == own


def unreachable() -> Any:
    raise StoreError("timeout", "no reply")


def test_a_lost_publication_is_found_by_polling(policies: PolicyCache, settings: Any) -> None:
    revision = policies.reload(newest()).revision
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django_ratequota.runtime.default_limiter", unreachable)
        RatePolicy.objects.create(rates="1/s")
    assert newest() == revision
    assert not policies.overdue()
    policies.poll()
    assert rates(policies) == [], "not before its time"
    settings.RATEQUOTA = {**settings.RATEQUOTA, "POLL_SECONDS": 0}
    assert policies.overdue()
    polled = policies.poll()
    assert rates(policies) == ["1/s"]
    assert polled is not None
    assert polled.revision == revision, "only Redis assigns revisions: one made up here could hide the next"
    settings.RATEQUOTA = {**settings.RATEQUOTA, "POLL_SECONDS": 3600}
    assert queries(policies.poll) == 0


def test_reloading_reads_no_more_than_it_needs(policies: PolicyCache, alice: User) -> None:
    fill(3)
    policies.reload(newest())
    assert queries(lambda: policies.reload(newest())) == 0
    default_limiter().publish()
    assert queries(lambda: policies.reload(newest())) == 1, "nothing new among the changes"
    RatePolicy.objects.create(user=alice, rates="1/s")
    assert queries(lambda: policies.reload(newest())) == 1, "a change of one user's: no policy is read"
    Plan.objects.filter(slug="p1").update(slug="x")
    assert queries(lambda: policies.reload(newest())) == 2


def test_a_process_that_starts_reads_the_latest_changes_only(policies: PolicyCache) -> None:
    """Each start read the ids of the whole history."""
    PolicyChange.objects.bulk_create([PolicyChange(model="plan", action="update") for _ in range(5000)])
    PolicyChange.objects.update(at=timezone.now() - timedelta(days=30))
    with CaptureQueriesContext(connection) as captured:
        policies.reload(1)
    assert rows_read(captured) < 2500


def rows_read(captured: CaptureQueriesContext) -> int:
    """How many rows the queries give, asked once more."""
    count = 0
    for query in captured.captured_queries:
        with connection.cursor() as cursor:
            # PostgreSQL reads through a cursor on the server.
            cursor.execute(re.sub(r"^DECLARE .*? FOR (?=SELECT)", "", query["sql"], flags=re.S))
            count += len(cursor.fetchall())
    return count


def change_of(user: User, **fields: Any) -> PolicyChange:
    """A row as recorded for a change of the user's own, by itself."""
    return PolicyChange(model="ratepolicy", action="update", touched_user=str(user.pk), **fields)


def late(offsets: Iterable[int], place: int, *seen: Iterable[int], start: int = 0, slow: bool = True) -> Any:
    """Rows, by their offset, that commit after those in ``seen``; alice's is at ``place``.

    The process starts once ``start`` batches of ``seen`` have been published.
    """
    return pytest.param(offsets, place, seen, start, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    ("offsets", "place", "seen", "start"),
    [
        # A mass change went by while another transaction was open.
        *thorough_after(1, [late([0], 0, range(1, 5001), [6000], start=start) for start in (1, 0, 2)]),
        # One save was committed while thousands of rows were being written.
        *thorough_after(1, [late(range(10_000), place, [10_000]) for place in (5000, 0, 9999)]),
        # Two imports at once, one of them in one transaction: its ids are hundreds of gaps among the other's.
        *(late(range(0, 600, 2), n, range(1, 600, 2), start=s, slow=False) for n in (0, 300, 598) for s in (0, 1)),
        # More rows than are read one by one: the oldest were passed over.
        *thorough_after(1, [late(range(5000), place) for place in (0, 4999)]),
        # The rows of a look were cut off at a number, and the lowest was the first to fall off.
        *thorough_after(2, [late([0, *range(2, 2 + n)], 0, [1], slow=False) for n in (999, 1000, 1999, 2000, 2001)]),
    ],
)
def test_rows_that_commit_late_are_not_missed(
    policies: PolicyCache, alice: User, offsets: Iterable[int], place: int, seen: Any, start: int
) -> None:
    bob = User.objects.create(username="bob")
    RatePolicy.objects.create(user=alice, rates="1/s")
    first = PolicyChange.objects.latest("pk").pk + 1
    for number, batch in enumerate([(), *seen]):
        PolicyChange.objects.bulk_create([change_of(bob, pk=first + offset) for offset in batch])
        if number >= start:
            policies.reload(default_limiter().publish())
    before = policies.load_user(str(alice.pk))
    rows = [change_of(alice if offset == place else bob, pk=first + offset) for offset in offsets]
    PolicyChange.objects.bulk_create(rows)
    policies.reload(default_limiter().publish())
    assert policies.user(str(alice.pk)) is not before


def test_ids_that_never_come_are_not_read_again_and_again(policies: PolicyCache, alice: User) -> None:
    """Ids are left out for good where a transaction was rolled back: the changes around them are read once."""
    RatePolicy.objects.create(user=alice, rates="1/s")
    first = PolicyChange.objects.latest("pk").pk + 1
    policies.reload(newest())
    PolicyChange.objects.bulk_create([change_of(alice, pk=first + 300 * number) for number in range(90)])
    policies.reload(default_limiter().publish())
    policies.load_user(str(alice.pk))
    assert queries(lambda: policies.reload(default_limiter().publish())) == 1
    assert policies.user(str(alice.pk)) is not None, "nothing of hers has changed since"


def test_a_mass_change_is_read_whatever_number_of_parameters_the_database_takes(
    policies: PolicyCache, alice: User
) -> None:
    """More unseen rows than a query takes parameters stopped every later reload: the process was stuck for good."""
    policies.reload(newest())
    policies.load_user(str(alice.pk))
    if connection.vendor == "sqlite":
        connection.connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 1000)
    try:
        rows = [change_of(alice) for _ in range(1200)]
        PolicyChange.objects.bulk_create(rows)
        policies.reload(default_limiter().publish())
    finally:
        if connection.vendor == "sqlite":
            connection.connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 250_000)
    assert policies.user(str(alice.pk)) is None


@pytest.mark.parametrize("change", ["policy", "user", "publish"])
def test_a_database_restored_from_a_backup_is_read_again(policies: PolicyCache, alice: User, change: str) -> None:
    """New changes get ids that this process has seen: it took them for old ones, ``publish`` included."""
    RatePolicy.objects.create(user=User.objects.create(username="bob"), rates="1/s")
    RatePolicy.objects.create(user=alice, rates="1/s")
    restored_to = PolicyChange.objects.create(model="plan", action="update").pk
    RatePolicy.objects.create(rates="1/s")
    Plan.objects.create(name="Pro", slug="pro")
    policies.reload(newest())
    before = policies.load_user(str(alice.pk))
    RatePolicy.objects.filter(user=None)._raw_delete("default")
    PolicyChange.objects.filter(pk__gt=restored_to).delete()
    if change == "policy":
        row = PolicyChange(model="ratepolicy", action="create", after={"user": None})
        RatePolicy.objects.bulk_create([RatePolicy(rates="2/s")])
    elif change == "user":
        row = change_of(alice)
    else:
        row = PolicyChange(model="*", action="publish")
    PolicyChange.objects.filter(pk__gt=restored_to).delete()
    row.pk = restored_to + 1
    row.save(force_insert=True)
    policies.reload(default_limiter().publish())
    assert rates(policies) == (["2/s"] if change == "policy" else [])
    assert policies.user(str(alice.pk)) is not before


def test_history_that_was_tidied_up_hides_no_change(policies: PolicyCache) -> None:
    RatePolicy.objects.create(rates="1/s")
    policies.reload(newest())
    PolicyChange.objects.all().delete()
    RatePolicy.objects.update(rates="2/s")
    policies.reload(newest())
    assert rates(policies) == ["2/s"]
    PolicyChange.objects.all().delete()
    for _ in range(2):
        policies.reload(default_limiter().publish())
    RatePolicy.objects.update(rates="3/s")
    policies.reload(newest())
    assert rates(policies) == ["3/s"]


@pytest.mark.parametrize("failing", range(4))
def test_whichever_query_fails_the_change_is_still_unseen(policies: PolicyCache, alice: User, failing: int) -> None:
    RatePolicy.objects.create(rates="1/s")
    policies.reload(newest())
    before = policies.current()
    policies.load_user(str(alice.pk))
    with transaction.atomic():
        RatePolicy.objects.update(rates="2/s")
        RatePolicy.objects.create(user=alice, rates="3/s")
        Plan.objects.create(name="Pro", slug="pro")
        Endpoint.objects.create(name="search")
    seen = 0

    def fail_one(execute: Callable[..., Any], *args: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == failing + 1:
            raise OperationalError("gone away")
        return execute(*args)

    with connection.execute_wrapper(fail_one), pytest.raises(DatabaseError):
        policies.reload(newest())
    assert policies.current() is before
    policies.reload(newest())
    assert rates(policies) == ["2/s"]
    assert policies.user(str(alice.pk)) is None


def test_only_what_is_new_enough_has_the_revision_that_others_wait_for(policies: PolicyCache) -> None:
    policies.reload(1)
    with database_down(), pytest.raises(DatabaseError):
        policies.reload(9)
    with transaction.atomic():  # which may read what was there before
        assert policies.reload(5).revision == 5
    assert policies.reload(6).revision == 9
    assert policies.reload(7, instead_of=9).revision == 7, "9 was of a clock that has been set back"


def test_polling_takes_in_nothing_that_is_not_committed(policies: PolicyCache, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "POLL_SECONDS": 0}
    policies.reload(newest())
    with transaction.atomic():
        RatePolicy.objects.create(rates="1/s")
        policies.poll()
        transaction.set_rollback(True)
    assert rates(policies) == []


def test_polling_waits_for_nobody(policies: PolicyCache, settings: Any) -> None:
    """While one thread reads, the others go on with what they have."""
    policies.reload(newest())
    settings.RATEQUOTA = {**settings.RATEQUOTA, "POLL_SECONDS": 0}
    with policies._lock, ThreadPoolExecutor(1) as pool:
        assert pool.submit(policies.poll).result(30) is policies.current()


def limit_of(user: User | None = None) -> int:
    (status,) = check_from(user).statuses
    return status.limit


def test_a_request_is_judged_by_what_its_own_transaction_changed(alice: User) -> None:
    """Nothing is published before the commit, so the last snapshot went on: a TestCase never saw its own policies."""
    RatePolicy.objects.create(rates="1/s")
    RatePolicy.objects.create(user=alice, rates="2/s")
    assert (limit_of(), limit_of(alice)) == (1, 2)
    with transaction.atomic():
        RatePolicy.objects.filter(user=None).update(rates="10/s")
        RatePolicy.objects.filter(user=alice).update(rates="20/s")
        assert (limit_of(), limit_of(alice)) == (10, 20)
        transaction.set_rollback(True)
    assert (limit_of(), limit_of(alice)) == (1, 2)


def test_a_users_entry_is_not_older_than_what_was_published_before_the_request(alice: User) -> None:
    """Inside a transaction with changes of its own, a request loaded the snapshot anew and the user from memory."""
    RatePolicy.objects.create(user=alice, rates="2/s")
    assert limit_of(alice) == 2
    with transaction.atomic():
        RatePolicy.objects.update(rates="20/s")
        default_limiter().publish()  # some other process's
        assert limit_of(alice) == 20
