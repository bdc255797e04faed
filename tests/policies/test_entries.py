"""The entries of users and subjects: read in parts until all are held; then nobody's entry takes a query."""

from __future__ import annotations

import tracemalloc
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_ratequota import check_request
from django_ratequota.models import Plan, PlanAssignment, RatePolicy
from django_ratequota.policies import entries, loading
from django_ratequota.policies.cache import PolicyCache
from django_ratequota.policies.facts import NOBODY, UserEntry
from tests.policies.test_cache import newest, queries
from tests.project.views import request_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


@pytest.fixture
def policies() -> PolicyCache:
    return PolicyCache()


def customers(number: int, plan: Plan, **dates: Any) -> list[User]:
    """Users who have been on the plan for a month."""
    began = {"starts_at": timezone.now() - timedelta(days=30), **dates}
    users = User.objects.bulk_create([User(username=f"{plan.slug}{at}") for at in range(number)])
    PlanAssignment.objects.bulk_create([PlanAssignment(user=user, plan=plan, **began) for user in users])
    return users


def facts(entry: UserEntry | None) -> Any:
    return entry and (entry.policies, [(one.plan_id, one.ends_us, one.anchor) for one in entry.assignments])


@pytest.fixture
def parts_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "_PART", 2)


def test_each_request_that_reads_an_entry_reads_the_next_part(
    policies: PolicyCache, free: Plan, parts_of_two: None
) -> None:
    users = customers(5, free)
    for user in users[3:]:
        RatePolicy.objects.create(user=user, rates="1/s")
    PlanAssignment.objects.create(subject="tenant:acme", plan=free)
    stranger, keys = "4711", [*(str(user.pk) for user in users), ("tenant", "acme")]
    policies.reload(newest())
    held = [sum(policies.user(key) is not None for key in keys)]
    while not policies._entries.whole:
        policies.entries([f"{len(held)}000"])
        held.append(sum(policies.user(key) is not None for key in keys))
    assert held == [2, 4, 6, 6, 6]
    assert (policies.user(stranger), queries(lambda: policies.entries([stranger, *keys]))) == (NOBODY, 0)
    read = loading.load_entries(keys)
    assert [facts(policies.user(key)) for key in keys] == [facts(read[key]) for key in keys]


def test_at_the_start_of_a_worker_all_parts_are_read(policies: PolicyCache, free: Plan, parts_of_two: None) -> None:
    users = customers(5, free)
    policies.reload(newest())
    policies.load_all_entries()
    assert queries(lambda: policies.entries([*(str(user.pk) for user in users), "4711"])) == 0


@pytest.mark.parametrize("whole", [True, False], ids=["all are held", "while parts are read"])
def test_an_edit_binds_whoever_it_is_about(
    policies: PolicyCache, free: Plan, parts_of_two: None, whole: bool
) -> None:
    users = customers(5, free)
    stranger = User.objects.create(username="stranger")
    policies.reload(newest())
    if whole:
        policies.load_all_entries()
    PlanAssignment.objects.filter(user=users[0]).delete()
    PlanAssignment.objects.create(user=stranger, plan=free)
    RatePolicy.objects.create(user=users[4], rates="1/s")
    policies.reload(newest())
    found = policies.entries([str(user.pk) for user in (users[0], stranger, users[4])])
    assert [(len(one.policies), len(one.assignments)) for one in found.values()] == [(0, 0), (0, 1), (1, 1)]


def test_a_part_that_was_read_during_an_edit_is_read_again(
    policies: PolicyCache, free: Plan, parts_of_two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = customers(4, free)
    policies.reload(newest())
    load = loading.load_entries

    def load_slowly(keys: Any) -> Any:
        found = load(keys)
        monkeypatch.undo()
        PlanAssignment.objects.filter(user=users[3]).delete()
        policies.reload(newest())
        return found

    monkeypatch.setattr(loading, "load_entries", load_slowly)
    policies.entries(["4711"])
    policies.load_all_entries()
    assert [len(policies.load_user(str(user.pk)).assignments) for user in users] == [1, 1, 1, 0]


def test_a_thread_that_looks_while_everything_is_read_again_finds_the_customer(
    policies: PolicyCache, free: Plan
) -> None:
    """A key that is missing means nobody, but not among entries that are being replaced."""
    [user] = customers(1, free)
    policies.reload(newest())
    before = policies._entries
    policies.expire()
    assert (policies.user(str(user.pk)), policies.user("4711")) == (None, None)
    assert before.known.get(str(user.pk), before.missing) is not NOBODY, "a thread that has them looks there"


def test_customers_who_have_only_a_plan_share_an_entry(policies: PolicyCache, free: Plan) -> None:
    old, new = customers(2, free), customers(1, Plan.objects.create(slug="new"), starts_at=timezone.now())
    ending = customers(1, Plan.objects.create(slug="ends", name="Ends"), ends_at=timezone.now() + timedelta(days=9))
    policies.reload(newest())
    first, second, started, ends = (policies.load_user(str(user.pk)) for user in (*old, *new, *ending))
    assert first is second
    assert [one.assignments[0].starts_us > 0 for one in (first, started, ends)] == [False, True, True]


def test_many_customers_take_few_queries_and_little_memory(free: Plan) -> None:
    RatePolicy.objects.create(plan=free, rates="100/min")
    users = customers(12_000, free)
    check_request(request_from(users[0]))
    asked = users[::10]
    with CaptureQueriesContext(connection) as captured:
        assert [check_request(request_from(user)).limit for user in asked] == [100] * 1_200
    assert len(captured) <= 0.05 * len(asked)
    cache = PolicyCache()
    tracemalloc.start()
    try:
        cache.reload(newest())
        cache.load_all_entries()
        held, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 12_000 * 120
