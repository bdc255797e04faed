"""A policy's roll-out: what it would have refused in log mode, and switching its mode from there."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from django_ratequota import check_request
from django_ratequota.models import Endpoint, PolicyChange, RatePolicy
from django_ratequota.monitoring.collector import collector
from tests.project.views import request_from
from tests.support.operators import client_of, text_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "recording")]

LIST = "/admin/django_ratequota/ratepolicy/"


@pytest.fixture
def trial(redis_client: Any) -> RatePolicy:
    search = Endpoint.objects.create(name="search")
    policy = RatePolicy.objects.create(endpoint=search, rates="3/day", mode="log")
    alice = User.objects.create(username="alice")
    for _ in range(5):
        check_request(request_from(user=alice), scope="search")
    check_request(request_from(address="203.0.113.8"), scope="search")
    collector.flush()
    return policy


def url(policy: RatePolicy) -> str:
    return reverse("admin:django_ratequota_ratepolicy_rollout", args=[policy.pk])


def seen(page: str) -> str:
    return page.split('name="seen" value="')[1].split('"')[0]


def switch(client: Client, policy: RatePolicy, mode: str, state: str = "", **fields: Any) -> Any:
    data = {"mode": mode, "seen": state or seen(text_of(client.get(url(policy)))), "change_reason": "", **fields}
    return client.post(url(policy), data, follow=True)


def test_the_page_shows_what_a_policy_in_log_mode_would_have_refused(operator: Client, trial: RatePolicy) -> None:
    page = text_of(operator.get(url(trial)))
    assert "In the last day the policy applied to 6 requests. It would have refused 2 of them (33.3 %)." in page
    assert page.count("user alice") >= 2, "among the callers, and among the newest"
    assert "GET search" in page
    for span in ("hour", "week", "nonsense"):
        assert "would have refused 2" in text_of(operator.get(url(trial), {"span": span}))


def test_enforcing_and_going_back_is_recorded_and_takes_effect(operator: Client, trial: RatePolicy) -> None:
    alice = User.objects.get(username="alice")
    assert check_request(request_from(user=alice), scope="search").allowed
    page = text_of(switch(operator, trial, "enforce", change_reason="Ticket 4711"))
    assert "Enforced from the next request on: everyone × search: 3/day." in page
    assert not check_request(request_from(user=alice), scope="search").allowed
    change = PolicyChange.objects.latest("pk")
    assert (change.before["mode"], change.after["mode"]) == ("log", "enforce")
    assert (change.reason, change.actor) == ("Ticket 4711", User.objects.get(is_superuser=True))
    assert "mode" in LogEntry.objects.latest("pk").change_message
    collector.flush()
    page = text_of(operator.get(url(trial)))
    assert "It refused 1 of them" in page
    assert "It was last changed at" in page
    assert "It only logs from the next request on" in text_of(switch(operator, trial, "log"))
    assert check_request(request_from(user=alice), scope="search").allowed


def test_a_policy_that_was_edited_meanwhile_is_not_switched(operator: Client, trial: RatePolicy) -> None:
    state = seen(text_of(operator.get(url(trial))))
    trial.rates = "1/day"
    trial.save()
    assert "somebody else edited the policy meanwhile" in text_of(switch(operator, trial, "enforce", state))
    trial.refresh_from_db()
    assert trial.mode == "log"


@pytest.mark.parametrize("mode", ["", "off", "nonsense"])
def test_only_the_two_modes_are_offered(operator: Client, trial: RatePolicy, mode: str) -> None:
    assert "Please correct" in text_of(switch(operator, trial, mode))
    assert "Please correct" in text_of(switch(operator, trial, "enforce", change_reason="x" * 300))
    trial.refresh_from_db()
    assert trial.mode == "log"


def test_a_policy_that_is_off_is_offered_log_mode_first(operator: Client, trial: RatePolicy) -> None:
    RatePolicy.objects.filter(pk=trial.pk).update(mode="off")
    page = text_of(operator.get(url(trial)))
    assert page.index('value="log" class="button default"')
    assert 'value="enforce" class="button"' in page


@pytest.mark.parametrize(
    ("permissions", "override", "status", "switches"),
    [
        (("view_ratepolicy",), False, 200, False),
        (("change_ratepolicy",), False, 200, True),
        (("change_ratepolicy",), True, 200, False),
        (("grant_override",), True, 200, True),
        (("grant_override",), False, 404, False),
        (("reset_usage",), True, 200, False),
        (("add_ratepolicy",), False, 403, False),
    ],
)
def test_switching_needs_the_permission_to_change_the_policy(
    trial: RatePolicy, permissions: tuple[str, ...], override: bool, status: int, switches: bool
) -> None:
    client = client_of(*permissions)
    policy = RatePolicy.objects.create(subject="tenant:acme", rates="1/s", mode="log") if override else trial
    page = client.get(url(policy))
    assert page.status_code == status
    if status == 200:
        assert (b'value="enforce"' in page.content) is switches
    answer = client.post(url(policy), {"mode": "enforce", "seen": str(PolicyChange.objects.filter(
        model="ratepolicy", object_id=policy.pk).latest("pk").pk)})  # fmt: skip
    assert answer.status_code == (302 if switches else 403 if status == 200 else status)
    policy.refresh_from_db()
    assert policy.mode == ("enforce" if switches else "log")


def test_the_policys_page_and_its_row_lead_there(operator: Client, trial: RatePolicy) -> None:
    link = f'href="{url(trial)}"'
    for address in (f"{LIST}{trial.pk}/change/", LIST):
        assert link in text_of(operator.get(address)), address
    RatePolicy.objects.filter(pk=trial.pk).update(mode="enforce")
    assert link not in text_of(operator.get(LIST))


def test_without_an_answer_of_redis_the_mode_can_be_switched(
    operator: Client, trial: RatePolicy, settings: Any
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0", "TIMEOUT": 0.2}
    assert "Redis did not answer" in text_of(operator.get(url(trial)))
    switch(operator, trial, "enforce")
    trial.refresh_from_db()
    assert trial.mode == "enforce"
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "memory://"}
    assert "Nothing is recorded" in text_of(operator.get(url(trial)))
