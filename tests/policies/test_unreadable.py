"""Rates that this version cannot read: the last readable ones apply, or ``on_error`` decides; operators see which."""

from __future__ import annotations

import io
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection
from django.test import Client

from django_ratequota import Decision
from django_ratequota.checks.database import check_rates
from django_ratequota.models import Endpoint, Plan, PolicyChange, RatePolicy
from django_ratequota.operations.explain import explain_caller
from django_ratequota.policies.cache import policies
from django_ratequota.policies.loading import load_snapshot
from django_ratequota.policies.requests.caller import DescribedCaller
from django_ratequota.runtime import default_limiter
from tests.conftest import Check
from tests.policies.test_cache import queries
from tests.project.views import request_from
from tests.support.operators import client_of, text_of

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


def test_the_last_readable_rates_apply(check: Check, caplog: Any) -> None:
    policy = RatePolicy.objects.create(rates="10/hour")
    assert limits(check(request_from())) == [10]
    RatePolicy.objects.update(rates="20/hour")
    RatePolicy.objects.update(reason="later")
    write(policy, "30 tokens/hour")
    assert limits(check(request_from())) == [20]
    assert f"policy {policy.pk}: its rates '30 tokens/hour' cannot be read; '20/hour' goes on" in caplog.text


def test_all_else_of_the_row_is_obeyed(check: Check) -> None:
    policy = RatePolicy.objects.create(rates="10/hour")
    write(policy, "thirty", mode="log")
    assert [status.bucket.mode for status in check(request_from()).statuses] == ["log"]
    RatePolicy.objects.update(mode="off")
    assert check(request_from()).statuses == ()


def test_rates_are_read_with_the_algorithm_of_their_time(check: Check) -> None:
    policy = RatePolicy.objects.create(rates="10/hour burst 5")
    write(policy, "10/hour burst 5", algorithm="fixed_window")
    assert [str(status.bucket.rate) for status in check(request_from()).statuses] == ["10/hour burst 5"]


@pytest.fixture
def unheard_of() -> RatePolicy:
    """A policy whose rates nobody could ever read, and an endpoint's with room."""
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="search"), rates="20/hour")
    policy = RatePolicy(rates="1/s")
    policy.save()
    PolicyChange.objects.all().delete()
    return policy


@pytest.mark.parametrize(
    ("on_error", "setting", "status"),
    [("allow", "deny", 200), ("deny", "allow", 503), ("local", "deny", 200), ("", "deny", 503), ("", "allow", 200)],
)
def test_without_a_meaning_on_error_decides(
    check: Check, unheard_of: RatePolicy, settings: Any, on_error: str, setting: str, status: int
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ON_ERROR": setting}
    write(unheard_of, "thirty", on_error=on_error)
    decision = check(request_from(), "search")
    assert decision.allowed == (status == 200)
    if status == 200:
        assert (limits(decision), decision.error) == ([20], ""), "the other policies hold"
        return
    assert (decision.denied_by, decision.error, decision.retry_after) == (("all/unreadable",), "rates", 1)
    assert decision.statuses == (), "nothing was charged"
    RatePolicy.objects.filter(pk=unheard_of.pk).delete()
    assert [one.remaining for one in check(request_from(), "search").statuses] == [19]


@pytest.mark.parametrize("mode", ["log", "off"])
def test_what_is_not_enforced_denies_nobody(check: Check, unheard_of: RatePolicy, mode: str) -> None:
    write(unheard_of, "thirty", on_error="deny", mode=mode)
    assert limits(check(request_from(), "search")) == [20]


def test_a_store_that_is_down_decides_no_more_kindly(check: Check, unheard_of: RatePolicy, settings: Any) -> None:
    write(unheard_of, "thirty", on_error="deny")
    check(request_from())
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0", "POLL_SECONDS": 3600}
    decision = check(request_from(), "search")
    assert (decision.allowed, decision.denied_by) == (False, ("all/unreadable",))


def test_loading_reads_the_history_of_what_cannot_be_read_only(unheard_of: RatePolicy) -> None:
    assert queries(lambda: load_snapshot(1)) == 5
    write(unheard_of, "thirty")
    assert queries(lambda: load_snapshot(1)) == 6


def test_explain_says_what_counts() -> None:
    policy = RatePolicy.objects.create(rates="10/hour")
    caller = DescribedCaller(user_id=None, address="203.0.113.7")
    write(policy, "thirty")
    [candidate] = explain_caller(caller, scope=None).candidates
    assert candidate.won
    assert candidate.reason.endswith("its rates 'thirty' cannot be read: the last readable ones apply, 10/hour")
    PolicyChange.objects.all().delete()
    policies.forget()
    [candidate] = explain_caller(caller, scope=None).candidates
    assert candidate.won
    assert candidate.reason.endswith("its rates 'thirty' cannot be read: on_error decides")


@pytest.fixture
def broken() -> list[RatePolicy]:
    plan = Plan.objects.create(name="Free", slug="free")
    made = [RatePolicy.objects.create(plan=plan, counted_per=per, rates="10/hour") for per in ("caller", "ip")]
    made += [RatePolicy.objects.create(counted_per=per, rates="5/hour") for per in ("caller", "ip")]
    for policy in made[:2]:
        write(policy, "ten per hour")
    write(made[2], "<b>five</b>")
    PolicyChange.objects.filter(object_id=str(made[2].pk)).delete()
    return made


def test_the_check_names_them(broken: list[RatePolicy]) -> None:
    assert check_rates(databases=None) == []
    found = check_rates(databases=["default"])
    assert [message.id for message in found] == ["django_ratequota.W012"] * 2
    assert [message.msg for message in found] == [
        f"Policy {broken[0].pk} (plan Free at all endpoints) and 1 more: "
        "rates 'ten per hour' cannot be read; 10/hour goes on.",
        f"Policy {broken[2].pk} (everyone at all endpoints): rates '<b>five</b>' cannot be read; on_error decides.",
    ]


HEALTH = "/admin/django_ratequota/ratepolicy/health/"


def test_the_page_health_names_them(broken: list[RatePolicy], operator: Client) -> None:
    page = text_of(operator.get(HEALTH))
    assert f"Policy {broken[0].pk}: the rates &#x27;ten per hour&#x27; cannot be read." in page
    assert "The last readable rates still apply: 10/hour." in page
    assert f"Policy {broken[2].pk}: the rates &#x27;&lt;b&gt;five&lt;/b&gt;&#x27; cannot be read." in page
    assert "cannot be read" not in text_of(client_of("grant_override", name="support").get(HEALTH)), (
        "not theirs to see"
    )


def test_workers_report_what_on_error_decided(check: Check, unheard_of: RatePolicy) -> None:
    from django_ratequota.monitoring.health import health

    write(unheard_of, "thirty", on_error="deny")
    check(request_from())
    assert health().degraded == {"rates": 1}
    assert health().errors == {"rates": f"the rates of policy {unheard_of.pk} cannot be read"}
    assert default_limiter().stored_revision()
