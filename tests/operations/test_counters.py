"""Resetting counters: what the command records, failures half way, and modes in which nothing is counted in Redis."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User

from django_ratequota import Limiter
from django_ratequota.engine import protocol
from django_ratequota.engine.decision import Decision
from django_ratequota.exceptions import StoreError
from django_ratequota.models import PolicyChange, RatePolicy
from django_ratequota.operations.counters import give_back
from tests.engine.test_scripts import broken_script
from tests.support.commands import run
from tests.support.requests import check_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


def remaining(decision: Decision) -> list[int]:
    return [status.remaining for status in decision.statuses]


def test_the_command_records_an_entry_for_each_subject(alice: User, api_keys: None) -> None:
    RatePolicy.objects.create(rates="5/hour")
    RatePolicy.objects.create(rates="6/hour", counted_per="tenant")
    RatePolicy.objects.create(rates="7/hour", counted_per="everyone")
    check_from(alice)
    printed = run("reset", "--user", "alice", "--identifier", "tenant=acme", "--reason", "OPS-7")
    assert f"reset all endpoints: 5/hour of user:{alice.pk}: 1 used before, 0 now" in printed
    assert "2 counters reset" in printed
    entries = PolicyChange.objects.filter(action="reset").order_by("pk")
    assert [(e.object_text, e.touched_user, e.actor, e.reason) for e in entries] == [
        ("tenant:acme", "", None, "OPS-7"),
        (f"user:{alice.pk}", str(alice.pk), None, "OPS-7"),
    ]
    assert entries[1].before == {"all/hour": {"used": 1, "remaining": 4}}
    assert remaining(check_from(alice))[0] == 4


def test_a_limit_on_trial_has_a_state_and_a_name_of_its_own(alice: User) -> None:
    """The history keyed counters by a title that both have, so the trial's state replaced the enforced one's."""
    RatePolicy.objects.create(rates="5/hour")
    check_from(alice)
    RatePolicy.objects.create(rates="5/hour", mode="log", user=alice)
    check_from(alice)
    assert "all endpoints: 5/hour (log only) of" in run("explain", "--user", "alice")
    run("give-back", "--user", "alice", "--units", "2", "--limit", "all endpoints: 5/hour")
    run("reset", "--user", "alice")
    given, reset = PolicyChange.objects.filter(model="counter").order_by("pk")
    assert (given.before, given.after) == (
        {"all/hour": {"used": 2, "remaining": 3}},
        {"all/hour": {"used": 0, "remaining": 5}},
    )
    assert reset.before == {
        "all/hour": {"used": 0, "remaining": 5},
        "all/hour (log only)": {"used": 1, "remaining": 4},
    }


def test_counters_reset_before_a_failure_are_recorded(alice: User, monkeypatch: pytest.MonkeyPatch) -> None:
    # In the order of their counters: keys of users may be random.
    first, second = sorted((alice, User.objects.create(username="bob")), key=lambda user: str(user.pk))
    RatePolicy.objects.create(user=first, rates="5/hour")
    RatePolicy.objects.create(user=second, rates="5/hour sliding_window_log")
    buckets = [status.bucket for user in (first, second) for status in check_from(user).statuses]
    with monkeypatch.context() as broken:
        broken.setattr(protocol, "DECIDE", broken_script())
        broken.setattr(protocol, "prepare", protocol.CheckCommand)
        with pytest.raises(StoreError):
            give_back(buckets)
    assert [entry.object_text for entry in PolicyChange.objects.filter(action="reset")] == [f"user:{first.pk}"]
    assert remaining(check_from(first)) == [4]


def test_what_redis_did_not_change_is_not_recorded(alice: User, monkeypatch: pytest.MonkeyPatch) -> None:
    RatePolicy.objects.create(user=alice, rates="5/hour")
    buckets = [status.bucket for status in check_from(alice).statuses]

    def fail(*_args: Any) -> None:
        raise StoreError("timeout", "Redis did not answer")

    monkeypatch.setattr(Limiter, "reset", fail)
    with pytest.raises(StoreError):
        give_back(buckets)
    assert not PolicyChange.objects.filter(action="reset").exists()


def test_units_are_given_back_to_rates_that_count_requests(alice: User) -> None:
    RatePolicy.objects.create(user=alice, rates="5 requests/hour")
    buckets = [status.bucket for _ in range(3) for status in check_from(alice).statuses]
    give_back(buckets[:1], 2)
    assert remaining(check_from(alice)) == [3]


def test_nothing_is_reset_while_nothing_is_enforced(alice: User, settings: Any) -> None:
    """Regression: with ENABLED = False a reset was recorded, and Redis kept the counts."""
    RatePolicy.objects.create(user=alice, rates="5/hour")
    buckets = [status.bucket for status in check_from(alice).statuses]
    before = settings.RATEQUOTA
    settings.RATEQUOTA = {**before, "ENABLED": False}
    with pytest.raises(StoreError, match="limits are not enforced"):
        give_back(buckets)
    assert not PolicyChange.objects.filter(action="reset").exists()
    settings.RATEQUOTA = before
    assert remaining(check_from(alice)) == [3]
