"""The snapshot and the protocol that keeps it current, its races included: no sleeps, only barriers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import DatabaseError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_ratequota import snapshot as module
from django_ratequota.limiter import default_limiter
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.snapshot import Policies, UserEntry, load_snapshot

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


@pytest.fixture
def policies() -> Policies:
    return Policies()


@pytest.fixture
def alice() -> User:
    return User.objects.create(username="alice")


def newest() -> int:
    return default_limiter().stored_revision()


def rates(policies: Policies) -> list[str]:
    """The rate texts that the snapshot holds for all endpoints and callers."""
    snapshot = policies.current()
    assert snapshot is not None
    group = snapshot.groups.get(None, {}).get("caller")
    return [policy.text for policy in group.policies] if group else []


def queries(call: Callable[[], Any]) -> int:
    with CaptureQueriesContext(connection) as captured:
        call()
    return len(captured)


def fill(plans: int) -> None:
    """Plans, endpoints and policies in the given number."""
    for number in range(plans):
        plan = Plan.objects.create(name=f"p{number}", slug=f"p{number}")
        endpoint = Endpoint.objects.create(name=f"e{number}", routes="/a/*\n/b/*", methods="GET")
        RatePolicy.objects.create(plan=plan, endpoint=endpoint, rates="5/min, 9/hour")


def test_loading_takes_three_queries_however_many_rows() -> None:
    fill(2)
    assert queries(lambda: load_snapshot(1)) == 3
    fill_more = [Plan(name=f"q{n}", slug=f"q{n}") for n in range(30)]
    RatePolicy.objects.bulk_create(
        [RatePolicy(plan=plan, rates="1/s") for plan in Plan.objects.bulk_create(fill_more)]
    )
    assert queries(lambda: load_snapshot(1)) == 3


def test_a_user_takes_two_queries(policies: Policies, alice: User) -> None:
    for number in range(5):
        RatePolicy.objects.create(user=alice, rates="1/s", ends_at=timezone.now() + timedelta(days=number + 1))
    assert queries(lambda: policies.load_user(str(alice.pk))) == 2
    entry = policies.user(str(alice.pk))
    assert entry is not None
    assert len(entry.policies) == 5


def test_what_ended_long_ago_is_left_out(policies: Policies) -> None:
    RatePolicy.objects.create(rates="1/s", ends_at=timezone.now() - timedelta(days=2))
    RatePolicy.objects.create(rates="2/s", ends_at=timezone.now() - timedelta(hours=1))
    RatePolicy.objects.create(rates="3/s", starts_at=timezone.now() + timedelta(days=2))
    policies.reload(newest())
    assert sorted(rates(policies)) == ["2/s", "3/s"], "what the store's clock may still call active stays"


def test_a_reload_to_a_revision_that_is_there_reads_nothing(policies: Policies) -> None:
    RatePolicy.objects.create(rates="1/s")
    policies.reload(newest())
    assert queries(lambda: policies.reload(newest())) == 0


def test_a_users_change_drops_that_user_only(policies: Policies, alice: User) -> None:
    bob = User.objects.create(username="bob")
    policies.reload(newest())
    first = policies.current()
    for user in (alice, bob):
        policies.load_user(str(user.pk))
    RatePolicy.objects.create(user=alice, rates="1/s")
    policies.reload(newest())
    assert policies.user(str(alice.pk)) is None
    assert policies.user(str(bob.pk)) is not None
    after = policies.current()
    assert after is not None
    assert first is not None
    assert after.groups is first.groups, "nothing shared was read anew"
    assert after.revision == newest()


def test_a_policy_that_moves_drops_both_users(policies: Policies, alice: User) -> None:
    bob, carol = User.objects.create(username="bob"), User.objects.create(username="carol")
    policy = RatePolicy.objects.create(user=alice, rates="1/s")
    policies.reload(newest())
    for user in (alice, bob, carol):
        policies.load_user(str(user.pk))
    policy.user = bob
    policy.save()
    policies.reload(newest())
    assert [policies.user(str(user.pk)) is None for user in (alice, bob, carol)] == [True, True, False]
    policies.load_user(str(bob.pk))
    policy.user = None
    policy.save()
    policies.reload(newest())
    assert policies.user(str(bob.pk)) is None
    assert rates(policies) == ["1/s"]


def test_a_row_that_commits_late_is_not_missed(policies: Policies) -> None:
    """Ids are handed out before commits: a lower id may turn up after a higher one was seen."""
    RatePolicy.objects.create(rates="1/s")
    late = PolicyChange.objects.get()
    fields = {field.attname: getattr(late, field.attname) for field in PolicyChange._meta.concrete_fields}
    late.delete()
    Plan.objects.create(name="Pro", slug="pro")
    RatePolicy.objects.all()._raw_delete("default")  # past the recording, as if it had not committed yet
    policies.reload(newest())
    assert rates(policies) == []
    RatePolicy(rates="1/s").save_base(raw=True)
    PolicyChange.objects.all().order_by("-pk").first().delete()  # what save_base recorded
    PolicyChange(**fields).save(force_insert=True)
    policies.reload(default_limiter().publish())
    assert rates(policies) == ["1/s"]


def test_changes_are_read_before_the_data(policies: Policies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the other way round, what commits in between would be noted as seen and never loaded."""
    policies.reload(newest())
    RatePolicy.objects.create(rates="1/s")
    load = module.load_snapshot

    def load_then_commit(revision: int) -> Any:
        loaded = load(revision)
        if not RatePolicy.objects.filter(rates="2/s").exists():
            RatePolicy.objects.create(rates="2/s", counted_per="caller", starts_at=timezone.now())
        return loaded

    monkeypatch.setattr(module, "load_snapshot", load_then_commit)
    policies.reload(newest())
    assert rates(policies) == ["1/s"]
    policies.reload(newest())
    assert sorted(rates(policies)) == ["1/s", "2/s"]


def test_an_entry_read_before_a_reload_is_not_kept_after_it(
    policies: Policies, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow thread must not put back what a reload has just dropped."""
    policies.reload(newest())
    load = module._load_user

    def load_slowly(user_id: str) -> UserEntry:
        entry = load(user_id)
        RatePolicy.objects.create(user=alice, rates="1/s")
        policies.reload(newest())
        return entry

    monkeypatch.setattr(module, "_load_user", load_slowly)
    assert policies.load_user(str(alice.pk)).policies == ()
    assert policies.user(str(alice.pk)) is None
    monkeypatch.setattr(module, "_load_user", load)
    assert len(policies.load_user(str(alice.pk)).policies) == 1


def test_one_thread_reads_and_the_others_wait_for_it(policies: Policies, monkeypatch: pytest.MonkeyPatch) -> None:
    RatePolicy.objects.create(rates="1/s")
    revision = newest()
    loads: list[int] = []
    together = threading.Barrier(8, timeout=30)
    load = module.load_snapshot

    def count(to: int) -> Any:
        loads.append(to)
        return load(to)

    def ask() -> None:
        together.wait()
        try:
            found.append(policies.reload(revision))
        finally:
            connection.close()

    monkeypatch.setattr(module, "load_snapshot", count)
    found: list[Any] = []
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert loads == [revision]
    assert len(found) == 8
    assert len({id(snapshot) for snapshot in found}) == 1


def test_a_database_that_fails_leaves_the_last_snapshot(policies: Policies, monkeypatch: pytest.MonkeyPatch) -> None:
    RatePolicy.objects.create(rates="1/s")
    policies.reload(newest())
    before = policies.current()
    RatePolicy.objects.update(rates="2/s")

    def fail(revision: int) -> Any:
        raise DatabaseError

    with monkeypatch.context() as patch:
        patch.setattr(module, "load_snapshot", fail)
        with pytest.raises(DatabaseError):
            policies.reload(newest())
    assert policies.current() is before
    policies.reload(newest())
    assert rates(policies) == ["2/s"], "the change that could not be read is still unseen"


def test_what_an_open_transaction_reads_is_not_kept(policies: Policies, alice: User) -> None:
    """It may be rolled back, and nothing would be published then."""
    policies.reload(newest())
    with transaction.atomic():
        RatePolicy.objects.create(user=alice, rates="1/s")
        RatePolicy.objects.create(rates="2/s")
        assert len(policies.load_user(str(alice.pk)).policies) == 1
        own = policies.reload(newest() + 1)
        assert [policy.text for policy in own.groups[None]["caller"].policies] == ["2/s"]
        transaction.set_rollback(True)
    assert policies.user(str(alice.pk)) is None
    assert rates(policies) == []


def test_a_lost_publication_is_found_by_polling(policies: Policies, settings: Any) -> None:
    policies.reload(newest())
    revision = newest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django_ratequota.recording._publish", lambda: None)
        RatePolicy.objects.create(rates="1/s")
    assert newest() == revision
    assert not policies.overdue()
    policies.poll()
    assert rates(policies) == [], "not before its time"
    settings.RATEQUOTA = {**settings.RATEQUOTA, "POLL_SECONDS": 0}
    assert policies.overdue()
    policies.poll()
    assert rates(policies) == ["1/s"]


def test_users_in_memory_are_bounded_and_the_least_used_goes(policies: Policies, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "USER_CACHE_SIZE": 2}
    policies.load_user("1")
    policies.load_user("2")
    policies.user("1")
    policies.load_user("3")
    assert [policies.user(key) is not None for key in ("1", "2", "3")] == [True, False, True]


def test_plans_of_a_user_by_time(alice: User, policies: Policies) -> None:
    """A dated assignment beats an open one, then the latest start; else an old plan hides an upgrade."""
    now = timezone.now()
    plans = {name: Plan.objects.create(name=name, slug=name) for name in ("free", "pro", "trial", "next")}

    def assign(name: str, start: int, end: int | None) -> None:
        PlanAssignment.objects.create(
            user=alice,
            plan=plans[name],
            starts_at=now + timedelta(days=start),
            ends_at=None if end is None else now + timedelta(days=end),
        )

    assign("free", -100, None)
    assign("trial", -50, -20)
    assign("pro", -30, 10)
    assign("next", 20, None)
    entry = policies.load_user(str(alice.pk))

    def plan(day: float) -> str | None:
        moment = round((now + timedelta(days=day)).timestamp() * 10**6)
        return next((name for name, row in plans.items() if row.pk == entry.plan_id(moment)), None)

    assert [plan(day) for day in (-101, -60, -40, -25, 0, 15, 25)] == [
        None,
        "free",
        "trial",
        "pro",
        "pro",
        "free",
        "next",
    ]
