"""Resetting counters: which counters belong to an override, the confirmation page, and what is recorded."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from django_ratequota.admin.reset import _MAX_COUNTERS
from django_ratequota.engine import protocol
from django_ratequota.engine.decision import Decision
from django_ratequota.models import Endpoint, Plan, PolicyChange, RatePolicy
from django_ratequota.operations.counters import own_counters
from tests.engine.test_scripts import broken_script
from tests.support.commands import run
from tests.support.requests import check_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

LIST = "/admin/django_ratequota/ratepolicy/"
IDENTIFIERS = {"tenant": "tests.project.views.api_key"}


def remaining(decision: Decision) -> list[int]:
    return [status.remaining for status in decision.statuses]


def selected(*policies: RatePolicy, **fields: str) -> dict[str, Any]:
    """Return the form data of the list's action; with ``reset="yes"``, of its confirmation."""
    return {"action": "reset_usage", "_selected_action": [policy.pk for policy in policies], **fields}


def rows(page: Any) -> list[list[str]]:
    found = re.findall(
        r"<tr>\s*<th scope=\"row\">(.*?)</th>((?:\s*<td[^>]*>.*?</td>)+)\s*</tr>", page.content.decode(), re.S
    )
    cells = [[subject, *re.findall("<td[^>]*>(.*?)</td>", own, re.S)] for subject, own in found]
    return [[re.sub("</?bdi[^>]*>", "", cell) for cell in row] for row in cells]


# --- Which counters belong to an override. ---


@pytest.mark.parametrize(
    ("fields", "counted_per", "subject"),
    [
        ({"user": True}, "caller", "user:{user}"),
        ({"user": True}, "ip", None),
        ({"user": True}, "plan", None),
        ({"user": True}, "everyone", None),
        ({"user": True}, "tenant", None),
        ({"subject": "tenant:acme"}, "tenant", "tenant:acme"),
        ({"subject": "tenant:a:b"}, "tenant", "tenant:a:b"),
        # Callers of that tenant have separate counters, as users or addresses.
        ({"subject": "tenant:acme"}, "caller", None),
        ({"subject": "ip:203.0.113.7"}, "ip", "ip:203.0.113.7"),
        ({"subject": "ip:203.0.113.7"}, "caller", "ip:203.0.113.7"),
        ({"subject": "ip:203.0.113.7/32"}, "ip", "ip:203.0.113.7"),
        ({"subject": "ip:203.0.113.0/24"}, "ip", None),
        ({"subject": "ip:203.0.113.0/24"}, "caller", None),
        ({"subject": "ip:2001:db8::1"}, "ip", "ip:2001:db8::/64"),
        ({"subject": "ip:2001:db8::/64"}, "ip", "ip:2001:db8::/64"),
        ({"subject": "ip:2001:db8::/63"}, "ip", None),
        ({"subject": "ip:no address"}, "ip", None),
        ({"plan": True}, "caller", None),
        ({}, "caller", None),
        ({}, "everyone", None),
    ],
)
def test_an_override_owns_the_counters_of_its_subject(
    alice: User, settings: Any, fields: dict[str, Any], counted_per: str, subject: str | None
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": IDENTIFIERS}
    objects = {"user": alice, "plan": Plan.objects.create(name="Free", slug="free")}
    fields = {name: objects.get(name, value) for name, value in fields.items()}
    search = Endpoint.objects.create(name="search")
    policy = RatePolicy.objects.create(endpoint=search, counted_per=counted_per, rates="5/s, 9/min gcra", **fields)
    counters, without = own_counters([policy])
    if subject is None:
        assert (counters, list(without)) == ({}, [policy])
        assert without[policy]
    else:
        assert [bucket.subject for bucket in counters] == [subject.format(user=alice.pk)] * 2
        assert set(counters.values()) == {policy}
        assert without == {}


def test_policies_without_a_counter_are_explained(alice: User) -> None:
    for fields, why in (
        ({"user": alice, "rates": "unlimited"}, "It counts nothing."),
        ({"user": alice, "rates": "blocked"}, "It counts nothing."),
        ({"user": alice, "rates": "5/fortnight"}, "Its rates cannot be read."),
        ({"subject": "ip:no address", "rates": "5/s"}, "Its subject cannot be read."),
    ):
        policy = RatePolicy(pk=1, **fields)
        assert own_counters([policy]) == ({}, {policy: why})


def test_requests_use_the_same_counters(alice: User, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": IDENTIFIERS}
    search = Endpoint.objects.create(name="search")
    override = RatePolicy.objects.create(user=alice, endpoint=search, rates="5/hour, 9/day")
    decision = check_from(alice, scope="search")
    assert list(own_counters([override])[0]) == [status.bucket for status in decision.statuses]
    address = RatePolicy.objects.create(subject="ip:2001:db8::1", counted_per="ip", rates="5/hour")
    decision = check_from(address="2001:db8::1")
    assert list(own_counters([address])[0]) == [status.bucket for status in decision.statuses]


def test_a_counter_is_listed_once_with_the_current_limit(alice: User) -> None:
    later, now = timezone.now() + timedelta(days=1), timezone.now() - timedelta(days=1)
    usual = RatePolicy.objects.create(user=alice, rates="5/hour")
    future = RatePolicy.objects.create(user=alice, rates="6/hour", starts_at=later)
    dated = RatePolicy.objects.create(user=alice, rates="7/hour", starts_at=now)
    counters, without = own_counters([usual, future, dated])
    assert [(bucket.rate.limit, policy) for bucket, policy in counters.items()] == [(7, dated)]
    assert without == {}


# --- Confirmation. ---


def test_the_action_asks_for_confirmation_and_resets_nothing(operator: Client, alice: User) -> None:
    search = Endpoint.objects.create(name="search")
    override = RatePolicy.objects.create(user=alice, endpoint=search, rates="5/hour, 9/day")
    free = Plan.objects.create(name="Free", slug="free")
    others = [
        RatePolicy.objects.create(plan=free, rates="100/hour"),
        RatePolicy.objects.create(rates="100/hour"),
        RatePolicy.objects.create(subject="ip:203.0.113.0/24", counted_per="ip", rates="100/hour"),
    ]
    for _ in range(3):
        assert check_from(alice, scope="search").allowed
    page = operator.post(LIST, selected(override, *others))
    assert page.status_code == 200
    assert rows(page) == [
        ["user alice", "search", "3", "2 of 5", "5/hour"],
        ["user alice", "search", "3", "6 of 9", "9/day"],
    ]
    text = page.content.decode()
    assert "plan Free × all endpoints: 100/hour<br>It is not an override" in text
    assert "everyone × all endpoints: 100/hour<br>It is not an override" in text
    assert "ip:203.0.113.0/24 × all endpoints: 100/hour<br>It is for a network" in text
    assert re.findall(r'name="_selected_action" value="(\d+)"', text) == [str(override.pk)]
    assert remaining(check_from(alice, scope="search"))[-2:] == [1, 5]
    assert not PolicyChange.objects.filter(action="reset").exists()
    assert not LogEntry.objects.exists()


def test_confirming_resets_only_the_listed_counters(operator: Client, alice: User) -> None:
    root = User.objects.get(username="operator")
    search = Endpoint.objects.create(name="search")
    override = RatePolicy.objects.create(user=alice, endpoint=search, rates="5/hour, 9/day")
    RatePolicy.objects.create(endpoint=search, counted_per="everyone", rates="100/hour")
    RatePolicy.objects.create(rates="50/hour")
    bob = User.objects.create(username="bob")
    other = RatePolicy.objects.create(user=bob, endpoint=search, rates="5/hour")
    assert remaining(check_from(alice, scope="search")) == [49, 99, 4, 8]
    assert remaining(check_from(bob, scope="search")) == [49, 98, 4]
    page = operator.post(LIST, selected(override, reset="yes", reason="Ticket 4711"))
    assert (page.status_code, page["Location"]) == (302, LIST)
    assert "2 counters were reset." in operator.get(LIST).content.decode()
    assert remaining(check_from(alice, scope="search")) == [48, 97, 4, 8]
    assert remaining(check_from(bob, scope="search")) == [48, 96, 3]
    entry = PolicyChange.objects.get(action="reset")
    assert (entry.actor, entry.reason, entry.object_text) == (root, "Ticket 4711", f"user:{alice.pk}")
    assert entry.touched_user == str(alice.pk)
    assert entry.before == {"search/hour": {"used": 1, "remaining": 4}, "search/day": {"used": 1, "remaining": 8}}
    assert entry.after == {"search/hour": {"used": 0, "remaining": 5}, "search/day": {"used": 0, "remaining": 9}}
    logged = LogEntry.objects.get()
    assert (logged.user, logged.get_edited_object()) == (root, override)
    who = f"user:{alice.pk}"
    assert logged.get_change_message().endswith(f"search/hour, {who} (1 / 5); search/day, {who} (1 / 9)")
    assert not LogEntry.objects.filter(object_id=other.pk).exists()


def test_an_override_has_a_reset_page(operator: Client, alice: User) -> None:
    override = RatePolicy.objects.create(user=alice, rates="5/hour")
    check_from(alice)
    page = operator.get(f"{LIST}{override.pk}/change/").content.decode()
    assert f'<a href="{LIST}{override.pk}/reset/">Reset usage</a>' in page
    confirmation = operator.get(f"{LIST}{override.pk}/reset/?reset=yes")
    assert rows(confirmation) == [["user alice", "all endpoints", "1", "4 of 5", "5/hour"]]
    assert f'href="{LIST}{override.pk}/change/"' in confirmation.content.decode()
    assert remaining(check_from(alice)) == [3], "GET resets nothing"
    done = operator.post(f"{LIST}{override.pk}/reset/", {"reset": "yes"})
    assert (done.status_code, done["Location"]) == (302, f"{LIST}{override.pk}/change/")
    assert remaining(check_from(alice)) == [4]
    assert PolicyChange.objects.get(action="reset").actor == User.objects.get(username="operator")
    assert LogEntry.objects.get().object_id == str(override.pk)


def test_without_counters_there_is_no_reset_button(operator: Client) -> None:
    policy = RatePolicy.objects.create(rates="5/hour")
    for page in (operator.get(f"{LIST}{policy.pk}/reset/"), operator.post(LIST, selected(policy, reset="yes"))):
        assert page.status_code == 200
        assert 'type="submit"' not in re.sub(r'<form id="logout.*?</form>', "", page.content.decode(), flags=re.S)
        assert "Back" in page.content.decode()
    assert not PolicyChange.objects.filter(action="reset").exists()


@pytest.mark.slow
def test_the_number_of_counters_per_reset_is_bounded(operator: Client) -> None:
    for number in range(_MAX_COUNTERS + 1):
        RatePolicy.objects.create(subject=f"ip:10.0.{number // 256}.{number % 256}", counted_per="ip", rates="5/s")
    page = operator.post(LIST, selected(*RatePolicy.objects.all()), follow=True)
    assert f"The selected overrides have {_MAX_COUNTERS + 1} counters" in page.content.decode()
    page = operator.post(LIST, selected(*RatePolicy.objects.all()[1:]))
    assert len(rows(page)) == _MAX_COUNTERS


def test_the_command_records_an_entry_for_each_subject(alice: User, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": IDENTIFIERS}
    RatePolicy.objects.create(rates="5/hour")
    RatePolicy.objects.create(rates="6/hour", counted_per="tenant")
    RatePolicy.objects.create(rates="7/hour", counted_per="everyone")
    check_from(alice)
    printed = run("reset", "--user", "alice", "--identifier", "tenant=acme", "--reason", "OPS-7")
    assert f"reset all/hour of user:{alice.pk}: 4 of 5 were left" in printed
    assert "2 counters reset" in printed
    entries = PolicyChange.objects.filter(action="reset").order_by("pk")
    assert [(e.object_text, e.touched_user, e.actor, e.reason) for e in entries] == [
        ("tenant:acme", "", None, "OPS-7"),
        (f"user:{alice.pk}", str(alice.pk), None, "OPS-7"),
    ]
    assert entries[1].before == {"all/hour": {"used": 1, "remaining": 4}}
    assert remaining(check_from(alice))[0] == 4


# --- While Redis fails. ---


def test_redis_down_is_reported_and_nothing_is_recorded(operator: Client, alice: User, settings: Any) -> None:
    override = RatePolicy.objects.create(user=alice, rates="5/hour")
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0"}
    for page in (operator.get(f"{LIST}{override.pk}/reset/"), operator.post(LIST, selected(override))):
        assert page.status_code == 200
        assert "Redis did not answer (connection)" in page.content.decode()
        assert rows(page) == [["user alice", "all endpoints", "?", "?", "5/hour"]]
    for path, form in ((f"{override.pk}/reset/", {"reset": "yes"}), ("", selected(override, reset="yes"))):
        page = operator.post(LIST + path, form, follow=True)
        assert page.status_code == 200
        assert (
            "Redis did not answer (connection). Some counters may have been changed already." in page.content.decode()
        )
    assert not PolicyChange.objects.filter(action="reset").exists()
    assert not LogEntry.objects.exists()


def test_counters_reset_before_a_failure_are_recorded(
    operator: Client, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob = User.objects.create(username="bob")
    first = RatePolicy.objects.create(user=alice, rates="5/hour")
    second = RatePolicy.objects.create(user=bob, rates="5/hour sliding_window_log")
    check_from(alice)
    with monkeypatch.context() as broken:
        broken.setattr(protocol, "DECIDE", broken_script())
        broken.setattr(protocol, "prepare", protocol.CheckCommand)
        page = operator.post(LIST, selected(first, second, reset="yes"), follow=True)
    assert "Redis did not answer (response). Some counters may have been changed already." in page.content.decode()
    assert [entry.object_text for entry in PolicyChange.objects.filter(action="reset")] == [f"user:{alice.pk}"]
    assert [entry.object_id for entry in LogEntry.objects.all()] == [str(first.pk)]
    assert remaining(check_from(alice)) == [4]


def test_nothing_is_reset_while_nothing_is_enforced(operator: Client, alice: User, settings: Any) -> None:
    """Regression: with ENABLED = False the page showed 0 used and recorded a reset, and Redis kept the counts."""
    override = RatePolicy.objects.create(user=alice, rates="5/hour")
    check_from(alice)
    before = settings.RATEQUOTA
    settings.RATEQUOTA = {**before, "ENABLED": False}
    page = operator.get(f"{LIST}{override.pk}/reset/")
    assert rows(page) == [["user alice", "all endpoints", "?", "?", "5/hour"]]
    why = "This needs Redis, which is not used while nothing is enforced."
    assert why in page.content.decode()
    page = operator.post(f"{LIST}{override.pk}/reset/", {"reset": "yes"}, follow=True)
    assert why in [str(message) for message in page.context["messages"]]
    assert not PolicyChange.objects.filter(action="reset").exists()
    settings.RATEQUOTA = before
    assert remaining(check_from(alice)) == [3]
