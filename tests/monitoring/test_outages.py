"""What a process writes of an outage: one row, replaced each time, once the database answers."""

from __future__ import annotations

from typing import Any

import pytest
import time_machine
from django.db import OperationalError, connection

from django_ratequota import check_request
from django_ratequota.models import Endpoint, Outage, RatePolicy
from django_ratequota.monitoring.health import process_name
from django_ratequota.monitoring.outages import outages
from tests.project.views import request_from

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies", "checkpointing"),
]
NOON = 1_795_780_800


@pytest.fixture
def policies(settings: Any) -> dict[str, RatePolicy]:
    """A policy with each ``on_error``, and a Redis that is away."""
    found = {
        mode: RatePolicy.objects.create(
            endpoint=Endpoint.objects.create(name=mode), rates="100/hour, 9/s", on_error=mode
        )
        for mode in ("allow", "deny", "local")
    }
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="log"), rates="1/hour", mode="log")
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0"}
    return found


def ask(**times: int) -> None:
    for scope, number in times.items():
        for _ in range(number):
            check_request(request_from(), scope=scope)


def test_requests_are_counted_by_what_decided_them(policies: dict[str, RatePolicy]) -> None:
    ask(allow=2, local=3)
    outages.flush()
    ask(deny=1, log=5, elsewhere=5)
    outages.flush()
    outages.flush()
    [row] = Outage.objects.all()
    assert (row.allow, row.deny, row.local, row.reason) == (2, 1, 3, "connection")
    assert row.policies == {
        str(policies[mode].pk): {mode: number} for mode, number in (("allow", 2), ("local", 3), ("deny", 1))
    }
    assert row.began_at <= row.ended_at
    assert row.worker == process_name()


def test_a_request_that_a_policy_refuses_is_refused(policies: dict[str, RatePolicy]) -> None:
    everywhere = RatePolicy.objects.create(rates="50/hour", on_error="deny")
    ask(allow=1)
    outages.flush()
    [row] = Outage.objects.all()
    assert (row.allow, row.deny) == (0, 1)
    assert row.policies == {str(policies["allow"].pk): {"allow": 1}, str(everywhere.pk): {"deny": 1}}


def test_blocked_requests_would_be_refused_anyway(policies: dict[str, RatePolicy]) -> None:
    RatePolicy.objects.create(subject="ip:203.0.113.7", rates="blocked")
    ask(allow=1)
    outages.flush()
    assert not Outage.objects.exists()


def test_settings_that_name_no_redis_are_an_outage(policies: dict[str, RatePolicy], settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "http://127.0.0.1/"}
    ask(allow=2, deny=1)
    outages.flush()
    [row] = Outage.objects.all()
    assert (row.allow, row.deny, row.reason) == (2, 1, "configuration")


def test_an_outage_goes_on_while_the_server_is_left_alone(policies: dict[str, RatePolicy]) -> None:
    with time_machine.travel(NOON, tick=False) as now:
        ask(allow=3)  # opens the breaker
        for _ in range(4):
            now.shift(30)
            outages.flush()
        [row] = Outage.objects.all()
        assert (row.ended_at - row.began_at).total_seconds() == 120
        now.shift(61)  # nobody looked for so long
        outages.flush()
        ask(allow=1)
        outages.flush()
    assert list(Outage.objects.order_by("began_at").values_list("allow", flat=True)) == [3, 1]


def test_what_the_database_did_not_take_is_written_later(policies: dict[str, RatePolicy]) -> None:
    def away(*_: Any) -> None:
        raise OperationalError("the database is away")

    ask(allow=1)
    with connection.execute_wrapper(away):
        outages.flush()
    assert not Outage.objects.exists()
    outages.flush()
    assert Outage.objects.get().allow == 1


def test_an_outage_ends_with_its_last_request_where_the_server_is_asked_again(
    policies: dict[str, RatePolicy], settings: Any
) -> None:
    before = settings.RATEQUOTA
    with time_machine.travel(NOON, tick=False) as now:
        ask(allow=1)
        now.shift(30)
        settings.RATEQUOTA = {**before, "CHECKPOINT_SECONDS": 0}
        outages.flush()
        assert not Outage.objects.exists()
        settings.RATEQUOTA = before
        outages.flush()
    row = Outage.objects.get()
    assert row.began_at == row.ended_at


def test_of_too_many_outages_the_newest_wait_for_the_database() -> None:
    with time_machine.travel(NOON, tick=False) as now:
        for _ in range(103):
            now.shift(61)
            outages.note("timeout", {1: "allow"})
    outages.flush()
    assert Outage.objects.count() == 100
    assert Outage.objects.latest("began_at").began_at.timestamp() == NOON + 103 * 61


def test_policies_beyond_a_bound_are_not_counted_apart() -> None:
    for number in (None, *range(1_200), 0):
        outages.note("timeout", {number: "allow"})
    outages.flush()
    row = Outage.objects.get()
    assert (row.allow, len(row.policies), row.policies["0"]) == (1_202, 1_000, {"allow": 2})
    assert "null" not in row.policies
