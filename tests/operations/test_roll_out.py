"""Rolling out a log-only policy: it takes the enforced one's place in one save, which can be undone."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import transaction

from django_ratequota import check_caller
from django_ratequota.changes.writer import changed_by
from django_ratequota.models import Endpoint, Plan, PolicyChange, RatePolicy
from django_ratequota.operations.revert import apply, of_save, plan
from django_ratequota.operations.roll_out import replaced_by, roll_out, state_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


def rolled_out(policy: RatePolicy) -> list[RatePolicy]:
    return roll_out(policy, state_of([policy, *replaced_by(policy)]))


def stored() -> list[Any]:
    return sorted(RatePolicy.objects.values_list("pk", "rates", "mode"))


@pytest.fixture
def free() -> Plan:
    return Plan.objects.create(name="Free", slug="free", default_for="authenticated")


@pytest.mark.parametrize("tried_first", [False, True])
def test_what_the_enforced_policy_has_counted_goes_on(
    alice: User, free: Plan, published: list[Any], tried_first: bool
) -> None:
    rows = [RatePolicy(plan=free, rates="30/hour"), RatePolicy(plan=free, rates="10/hour", mode="log")]
    for row in reversed(rows) if tried_first else rows:
        row.save()
    enforced, trial = rows
    decisions = [check_caller(user=alice) for _ in range(8)]
    assert all(decision.allowed for decision in decisions)
    assert [(one.limit, one.remaining) for one in decisions[-1].statuses] == [(30, 22), (10, 2)]
    before = stored()
    published.clear()
    with changed_by(alice, "OPS-1"):
        assert rolled_out(trial) == [enforced]
    assert stored() == [(trial.pk, "10/hour", "enforce")]
    assert len(published) == 1
    changes = PolicyChange.objects.filter(reason="OPS-1", actor=alice)
    assert sorted(changes.values_list("action", flat=True)) == ["delete", "update"]
    assert len({*changes.values_list("change_id", flat=True)}) == 1
    assert [check_caller(user=alice).allowed for _ in range(3)] == [True, True, False]
    with transaction.atomic():
        apply(plan(of_save(changes[0].change_id), lock=True), actor=None, reason="")
    assert stored() == before
    [usual, tried] = check_caller(user=alice).statuses
    assert (usual.limit, usual.remaining, tried.limit, tried.allowed) == (30, 19, 10, True)


def test_without_an_enforced_policy_it_just_becomes_enforced(free: Plan) -> None:
    search = Endpoint.objects.create(name="search")
    trial = RatePolicy.objects.create(plan=free, endpoint=search, rates="1/s", mode="log")
    others: list[dict[str, Any]] = [
        {"plan": free},
        {"endpoint": search},
        {"plan": free, "endpoint": search, "counted_per": "ip"},
        {"plan": free, "endpoint": search, "ends_at": "2100-01-01T00:00:00Z"},
    ]
    RatePolicy.objects.bulk_create([RatePolicy(rates="2/s", **fields) for fields in others])
    assert rolled_out(trial) == []
    assert set(RatePolicy.objects.values_list("rates", "mode")) == {("1/s", "enforce"), ("2/s", "enforce")}
    assert RatePolicy.objects.count() == 5


def test_a_policy_that_is_off_is_replaced_too(free: Plan) -> None:
    off = RatePolicy.objects.create(plan=free, rates="2/s", mode="off")
    trial = RatePolicy.objects.create(plan=free, rates="1/s", mode="log")
    assert rolled_out(trial) == [off]


@pytest.mark.parametrize("meanwhile", ["trial", "mode", "deleted", "rival", "new rival"])
def test_another_state_than_the_operator_saw_is_refused(free: Plan, meanwhile: str) -> None:
    trial = RatePolicy.objects.create(plan=free, rates="1/s", mode="log")
    if meanwhile != "new rival":
        RatePolicy.objects.create(plan=free, rates="2/s")
    seen = state_of([trial, *replaced_by(trial)])
    rivals, own = replaced_by(trial), RatePolicy.objects.filter(pk=trial.pk)
    if meanwhile == "trial":
        own.update(rates="3/s")
    elif meanwhile == "mode":
        rolled_out(trial)
    elif meanwhile == "deleted":
        own.delete()
    elif meanwhile == "rival":
        rivals.update(rates="3/s")
    else:
        RatePolicy.objects.create(plan=free, rates="2/s")
    before = stored()
    with pytest.raises(ValidationError, match="An object was changed in the meantime"):
        roll_out(trial, seen)
    assert stored() == before
