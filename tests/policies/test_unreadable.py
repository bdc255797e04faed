"""Rates that this version cannot read: ``on_error`` decides, and operators see which."""

from __future__ import annotations

import io
from typing import Any

import pytest
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import connection

from django_ratequota import Decision
from django_ratequota.checks.database import check_rates
from django_ratequota.models import Endpoint, Plan, RatePolicy
from django_ratequota.operations.explain import explain_caller
from django_ratequota.policies.requests.caller import DescribedCaller
from django_ratequota.runtime import default_limiter
from tests.conftest import Check
from tests.project.views import request_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


def write(policy: RatePolicy, rates: str, **columns: Any) -> None:
    """Past the model's validation, as raw SQL does or a newer version; then published."""
    assigned = {"rates": rates, **columns}
    with connection.cursor() as cursor:
        names = ", ".join(f"{name} = %s" for name in assigned)
        cursor.execute(
            f"UPDATE django_ratequota_ratepolicy SET {names} WHERE id = %s",
            [*assigned.values(), policy.pk],
        )
    call_command("ratequota", "publish", stdout=io.StringIO())


def limits(decision: Decision) -> list[int]:
    return [status.limit for status in decision.statuses]


@pytest.fixture
def unreadable() -> RatePolicy:
    """A policy for ``write``, and an endpoint's with room."""
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="search"), rates="20/hour")
    return RatePolicy.objects.create(rates="1/s")


@pytest.mark.parametrize(
    ("on_error", "setting", "status"),
    [("allow", "deny", 200), ("deny", "allow", 503), ("local", "deny", 200), ("", "deny", 503), ("", "allow", 200)],
)
def test_without_a_meaning_on_error_decides(
    check: Check, unreadable: RatePolicy, settings: Any, on_error: str, setting: str, status: int
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ON_ERROR": setting}
    write(unreadable, "thirty", on_error=on_error)
    decision = check(request_from(), "search")
    assert decision.allowed == (status == 200)
    if status == 200:
        assert (limits(decision), decision.error) == ([20], ""), "the other policies hold"
        return
    assert (decision.denied_by, decision.error, decision.retry_after) == (("all/unreadable",), "rates", 1)
    assert decision.statuses == (), "nothing was charged"
    RatePolicy.objects.filter(pk=unreadable.pk).delete()
    assert [one.remaining for one in check(request_from(), "search").statuses] == [19]


@pytest.mark.parametrize("mode", ["log", "off"])
def test_what_is_not_enforced_denies_nobody(check: Check, unreadable: RatePolicy, mode: str) -> None:
    write(unreadable, "thirty", on_error="deny", mode=mode)
    assert limits(check(request_from(), "search")) == [20]


def test_a_store_that_is_down_decides_no_more_kindly(check: Check, unreadable: RatePolicy, settings: Any) -> None:
    write(unreadable, "thirty", on_error="deny")
    check(request_from())
    down = {"REDIS_URL": "redis://127.0.0.1:1/0", "POLL_SECONDS": 3600, "ON_ERROR": "local", "LOCAL_SHARE": 1}
    settings.RATEQUOTA = {**settings.RATEQUOTA, **down}
    decision = check(request_from(), "search")
    assert (decision.allowed, decision.denied_by) == (False, ("all/unreadable",))
    assert [one.remaining for one in decision.statuses] == [20], "nothing was charged"


def test_explain_says_what_decides() -> None:
    write(RatePolicy.objects.create(rates="10/hour"), "thirty")
    [candidate] = explain_caller(DescribedCaller(user_id=None, address="203.0.113.7"), scope=None).candidates
    assert candidate.won
    assert candidate.reason.endswith("its rates 'thirty' cannot be read, so on_error applies")


@pytest.fixture
def broken() -> list[RatePolicy]:
    plan = Plan.objects.create(name="Free", slug="free")
    made = [RatePolicy.objects.create(plan=plan, counted_per=per, rates="10/hour") for per in ("caller", "ip")]
    made += [RatePolicy.objects.create(counted_per=per, rates="5/hour") for per in ("caller", "ip")]
    for policy in made[:2]:
        write(policy, "ten per hour")
    write(made[2], "<b>five</b>")
    return made


def test_the_check_names_them(broken: list[RatePolicy]) -> None:
    assert run_checks(tags=["database"], databases=[]) == []
    found = check_rates()
    assert [message.id for message in found] == ["django_ratequota.W012"] * 2
    end = "cannot be read, so on_error applies."
    assert [message.msg for message in found] == [
        f"Policy {broken[0].pk} (plan Free for all endpoints): rates 'ten per hour' {end}",
        f"Policy {broken[2].pk} (everyone for all endpoints): rates '<b>five</b>' {end}",
    ]


def test_workers_report_what_on_error_decided(check: Check, unreadable: RatePolicy) -> None:
    from django_ratequota.monitoring.health import health

    write(unreadable, "thirty", on_error="deny")
    check(request_from())
    assert health().degraded == {"rates": 1}
    assert health().errors == {"rates": f"the rates of policy {unreadable.pk} cannot be read"}
    assert default_limiter().stored_revision()
