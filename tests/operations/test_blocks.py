"""Blocks: who can be named, who would be hit, the page that asks, its permission, and how a block is ended."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from django_ratequota.models import Endpoint, PolicyChange, RatePolicy
from django_ratequota.monitoring.collector import collector
from django_ratequota.operations import overrides
from django_ratequota.policies.requests.caller import Caller
from tests.admin.test_explain import DOWN, IDENTIFIERS, LIST, PAGE, staff
from tests.project.views import request_from
from tests.support.operators import a_customer, client_of, words_of
from tests.support.requests import check_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "recording")]

URL, TRAFFIC = f"{LIST}block/", f"{LIST}traffic/"
FORM = {"until": "day", "reason": "Ticket 4711"}


@pytest.fixture
def alice() -> User:
    return a_customer()


def choices(text: str) -> list[str]:
    return re.findall(r'name="target" value="(.*?)"', text)


@pytest.mark.parametrize(
    ("caller", "ip", "names"),
    [
        ("user:7", "", ["user:7"]),
        ("user:7", "ip:203.0.113.7", ["user:7", "ip:203.0.113.7", "ip:203.0.113.0/24"]),
        ("ip:203.0.113.7", "", ["ip:203.0.113.7", "ip:203.0.113.0/24"]),
        ("ip:2001:db8::/64", "", ["ip:2001:db8::/64"]),
        ("ip:2001:db8::7", "", ["ip:2001:db8::7", "ip:2001:db8::/64"]),
        ("tenant:acme", "ip:203.0.113.7", ["tenant:acme", "ip:203.0.113.7", "ip:203.0.113.0/24"]),
        ("tenant:", "", []),
        ("tenant:acme ", "", []),
        ("tenant:" + "x" * 300, "", []),
        ("planet:mars", "", []),
        ("ip:unknown", "", []),
        ("ip:unknown", "ip:unknown", []),
        ("", "", []),
    ],
)
def test_a_block_names_the_caller_the_address_or_its_network(
    settings: Any, caller: str, ip: str, names: list[str]
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": IDENTIFIERS}
    assert overrides.block_targets(caller, ip) == names


@pytest.mark.parametrize(
    ("target", "until"),
    [
        ("user", "hour"),
        ("user", "never"),
        ("ip:203.0.113.7", "day"),
        ("ip:203.0.113.7", "date"),
        ("ip:203.0.113.0/24", "week"),
    ],
)
def test_a_block_refuses_at_once_until_it_is_ended(operator: Client, alice: User, target: str, until: str) -> None:
    url = f"{URL}?{urlencode({'caller': f'user:{alice.pk}', 'ip': 'ip:203.0.113.7'})}"
    assert check_from(alice).allowed
    form = {**FORM, "until": until, "target": f"user:{alice.pk}" if target == "user" else target}
    if until == "date":
        form |= {"until": "hour", "ends_at_0": "2100-01-01"}
    done = operator.post(url, form)
    assert (done.status_code, done["Location"]) == (302, url)
    assert not check_from(alice).allowed
    [block] = RatePolicy.objects.filter(rates="blocked")
    assert (block.reason, block.counted_per, block.endpoint) == ("Ticket 4711", "caller", None)
    assert (block.user or block.subject) == (alice if target == "user" else target)
    assert block.starts_at is not None
    assert (block.ends_at is None) is (until == "never")
    if until in ("hour", "day", "week") and block.ends_at:
        length = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(weeks=1)}[until]
        assert abs(block.ends_at - timezone.now() - length) < timedelta(minutes=1)
    assert PolicyChange.objects.get(object_id=str(block.pk)).reason == "Ticket 4711"
    page = words_of(operator.get(url))
    assert "Blocked until" in page
    done = operator.post(url, {"end": form["target"], "change_reason": "A mistake"})
    assert done.status_code == 302
    assert check_from(alice).allowed
    block.refresh_from_db()
    assert block.ends_at is not None
    assert block.ends_at <= timezone.now() + timedelta(seconds=5)
    ended = PolicyChange.objects.filter(object_id=str(block.pk)).order_by("-pk")[0]
    assert (ended.action, ended.reason) == ("update", "A mistake")
    assert LogEntry.objects.filter(object_id=str(block.pk)).count() == 2


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        ({"reason": ""}, "This field is required."),
        ({"target": "ip:0.0.0.0/0"}, "ip:0.0.0.0/0 is not one of the available choices."),
        ({"target": ""}, "This field is required."),
    ],
)
def test_an_invalid_block_is_reported(operator: Client, alice: User, sent: dict[str, str], error: str) -> None:
    url = f"{URL}?caller=user:{alice.pk}"
    page = words_of(operator.post(url, {**FORM, "target": f"user:{alice.pk}", **sent}))
    assert error in page
    assert not RatePolicy.objects.filter(rates="blocked").exists()


@pytest.mark.parametrize(
    "query",
    [{"caller": "user:4711"}, {"caller": "user:x"}, {"caller": f"user:{'9' * 40}"}, {"caller": "ip:unknown"}, {}],
)
def test_nobody_is_blocked_where_the_caller_has_no_name(operator: Client, query: dict[str, str]) -> None:
    page = operator.get(URL, query)
    assert page.status_code == 302
    assert page["Location"].startswith(PAGE)
    operator.post(f"{URL}?{urlencode(query)}", {**FORM, "target": query.get("caller", "")})
    assert not RatePolicy.objects.exists()


def test_the_page_says_who_would_be_hit(operator: Client, alice: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_ratequota.monitoring.collector._CHUNK_SECONDS", 0.0)
    for address, times in (("203.0.113.7", 3), ("203.0.113.8", 2), ("198.51.100.1", 9)):
        for _ in range(times):
            check_from(address=address)
    check_from(alice, address="203.0.113.7")
    collector.flush()
    page = words_of(operator.get(URL, {"caller": f"user:{alice.pk}", "ip": "ip:203.0.113.7"}))
    assert "user alice: 1 request in the last hour" in page
    assert "ip:203.0.113.7: 4 requests from 2 customers in the last hour" in page
    assert "ip:203.0.113.0/24: 6 requests from 3 customers in the last hour" in page


def test_the_operator_is_warned_of_blocking_themselves() -> None:
    support = User.objects.create(username="support")
    request = request_from(support, "10.0.0.7")
    other = User.objects.create(username="other")
    names = (f"user:{support.pk}", "ip:10.0.0.7", "ip:10.0.0.0/24", "ip:10.1.0.0/24", f"user:{other.pk}")
    found = [overrides.block_caution(overrides.propose_block(name), Caller(request)) for name in names]
    assert [("is you." in text, "includes you." in text) for text in found] == [
        (True, False),
        (False, True),
        (False, True),
        (False, False),
        (False, False),
    ]


def test_the_block_that_lasts_longest_is_shown() -> None:
    now = timezone.now()
    for hours in (1, None, 2):
        ends = hours and now + timedelta(hours=hours)
        RatePolicy.objects.create(subject="ip:203.0.113.7", rates="blocked", starts_at=now, ends_at=ends or None)
    RatePolicy.objects.create(subject="ip:203.0.113.8", rates="blocked", starts_at=now + timedelta(hours=1))
    RatePolicy.objects.create(subject="ip:203.0.113.9", rates="blocked", mode="log")
    RatePolicy.objects.create(subject="ip:203.0.113.10", rates="1/s")
    RatePolicy.objects.create(subject="ip:203.0.113.11", rates="blocked", endpoint=Endpoint.objects.create(name="x"))
    names = [f"ip:203.0.113.{last}" for last in (7, 8, 9, 10, 11)]
    found = overrides.blocks_in_force([*names, "user:x", f"user:{'9' * 40}"])
    ends = {name: [block.ends_at for block in own] for name, own in found.items()}
    assert ends == {"ip:203.0.113.7": [None, now + timedelta(hours=2), now + timedelta(hours=1)]}


def test_a_block_is_ended_without_its_other_fields() -> None:
    """Somebody else may have changed these meanwhile. The end follows a start that the clock has not reached."""
    block = overrides.propose_block("ip:203.0.113.7")
    block.starts_at = timezone.now() + timedelta(hours=1)
    block.save()
    RatePolicy.objects.update(reason="Ticket 4711")
    overrides.end(block)
    ended = RatePolicy.objects.get()
    assert (ended.reason, ended.ends_at) == ("Ticket 4711", block.starts_at + timedelta(microseconds=1))


def test_a_block_that_was_sent_twice_is_ended_at_once(operator: Client, alice: User) -> None:
    url, user = f"{URL}?caller=user:{alice.pk}", f"user:{alice.pk}"
    for until in ("hour", "day"):
        operator.post(url, {**FORM, "until": until, "target": user})
    page = words_of(operator.get(url))
    assert re.findall(r'name="end" value="(.*?)"', page) == [user]
    done = words_of(operator.post(url, {"end": user}, follow=True))
    # Regression: the admin begins messages with a capital letter, so it said "Ip:203.0.113.7: ...".
    assert "No longer blocked: user alice." in done
    assert check_from(alice).allowed
    assert "That block has already ended." in words_of(operator.post(url, {"end": user}, follow=True))


# --- Links and permissions. ---


def test_explain_and_traffic_lead_to_the_page_and_to_its_end(operator: Client, alice: User) -> None:
    RatePolicy.objects.filter(plan__isnull=False, endpoint__isnull=False).update(rates="1/hour")
    refusal_id = [check_from(alice, scope="search").refusal_id for _ in range(2)][-1]
    collector.flush()
    pages = [(PAGE, {"user": alice.pk}), (PAGE, {"id": refusal_id}), (TRAFFIC, {})]
    for page, query in pages:
        text = words_of(operator.get(page, query))
        links = re.findall(rf'href="({URL}[^"]*)"[^>]*>Block…</a>', text)
        assert links, page
        assert all(operator.get(link).status_code == 200 for link in links)
    assert operator.post(links[-1], {**FORM, "target": "ip:203.0.113.0/24"})["Location"] == TRAFFIC
    for page, query in pages[1:]:
        assert re.search(
            rf'href="{URL}[^"]*"[^>]*>Blocked until [^<]*: End it…</a>', words_of(operator.get(page, query))
        )


@pytest.mark.parametrize("permission", ["block_callers", "grant_override"])
def test_only_the_permission_to_block_blocks(alice: User, permission: str) -> None:
    client, may = staff((permission,)), permission == "block_callers"
    url, block = f"{URL}?caller=user:{alice.pk}", overrides.propose_block(f"user:{alice.pk}")
    assert (URL in client.get(PAGE, {"user": alice.pk}).content.decode()) is may
    assert client.post(url, {**FORM, "target": f"user:{alice.pk}"}).status_code == (302 if may else 403)
    assert RatePolicy.objects.filter(rates="blocked").exists() is may
    block.save()
    client.post(url, {"end": f"user:{alice.pk}"})
    assert (RatePolicy.objects.get(pk=block.pk).ends_at is not None) is may


def test_who_may_only_block_can_neither_add_nor_change_nor_end_other_policies(alice: User) -> None:
    client = client_of("block_callers")
    override = RatePolicy.objects.get(user=alice)
    form = {"user": alice.pk, "counted_per": "caller", "rates": "9/s", "algorithm": "gcra", "mode": "enforce"}
    for path in ("add/", f"{override.pk}/change/", f"{override.pk}/delete/"):
        assert client.post(f"{LIST}{path}", {**form, "post": "yes"}).status_code == 403
    assert client.post(f"{URL}?caller=user:{alice.pk}", {"end": f"user:{alice.pk}"}).status_code == 302
    override.refresh_from_db()
    assert (override.rates, override.ends_at) == ("1000/day", None)


def test_a_block_is_saved_while_redis_is_down(operator: Client, alice: User, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": DOWN}
    url = f"{URL}?caller=user:{alice.pk}"
    assert "recent requests unknown" in words_of(operator.get(url))
    assert operator.post(url, {**FORM, "target": f"user:{alice.pk}"}).status_code == 302
    assert RatePolicy.objects.filter(rates="blocked").exists()
