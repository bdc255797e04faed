"""The page Traffic: what was requested and refused, by endpoint and caller, and the page while Redis is down."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from django_ratequota import check_request
from django_ratequota.models import Endpoint, Outage, RatePolicy
from django_ratequota.monitoring.collector import collector
from django_ratequota.runtime import default_limiter
from tests.project.views import request_from
from tests.support.operators import client_of, text_of, words_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "recording")]

LIST = "/admin/django_ratequota/ratepolicy/"
PAGE = f"{LIST}traffic/"
HOSTILE = "<script>alert(1)</script>\u202e" + "x" * 10_000


def rows(page: Any, name: str) -> list[list[str]]:
    """Return the rows of a section's table, as text of each cell."""
    found = re.search(rf'<section aria-labelledby="ratequota-{name}">.*?</section>', text_of(page), re.DOTALL)
    assert found is not None
    rows = re.findall(r"<tr>\s*(<th scope=\"row\">.*?)</tr>", found[0], re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    texts = [[html.unescape(re.sub(r"<[^>]*>", "", one)).strip() for one in row] for row in cells]
    return [[text.removesuffix(" Block…") for text in row] for row in texts]


@pytest.fixture
def asked(search: Endpoint) -> User:
    """Alice asked five times, and was refused twice; an address asked once without a scope, and was admitted."""
    alice = User.objects.create(username="alice")
    RatePolicy.objects.create(endpoint=search, rates="3/hour")
    RatePolicy.objects.create(rates="1/hour", mode="log")
    for _ in range(5):
        check_request(request_from(alice), scope="search")
    check_request(request_from(address="203.0.113.7"))
    collector.flush()
    return alice


def test_traffic_of_all_requests(operator: Client, asked: User) -> None:
    for span in ("hour", "day", "week"):
        page = operator.get(PAGE, {"span": span})
        numbers = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text_of(page))
        assert [(name, re.sub("<.*?>", "", number)) for name, number in numbers] == [
            ("Admitted", "4"),
            ("Of these, log only", "2"),
            ("Refused", "2 (33.3 %)"),
        ]
        assert rows(page, "endpoints") == [
            ["search", "3", "2", "2", "40.0 %"],
            ["no endpoint", "1", "0", "0", "0.0 %"],
        ]
        assert rows(page, "callers") == [
            ["user alice", "3 of 3 used search: 3/hour", "3", "2", "2", "40.0 %"],
            ["ip:203.0.113.7", "0 of 3 used search: 3/hour", "1", "0", "0", "0.0 %"],
        ]
    [[at, count, caller, what, by]] = rows(page, "refusals")
    assert at.endswith("UTC")
    assert (count, caller, what, by) == ("2", "user alice", "GET search", "search: 3/hour")
    [link] = re.findall(r'href="([^"]*explain/\?id=\w{10})"', text_of(page))
    assert operator.get(link).context["refusal"].count == 2


@pytest.mark.parametrize("permission", ["view_ratepolicy", "grant_override", "block_callers", "reset_usage"])
def test_limits_are_named_to_those_who_may_see_their_policies(permission: str, asked: User, search: Endpoint) -> None:
    """Regression: who may see overrides alone was shown the rates of all policies."""
    bob = User.objects.create(username="bob")
    RatePolicy.objects.create(user=bob, endpoint=search, rates="1/day")
    for _ in range(2):
        check_request(request_from(bob), scope="search")
    collector.flush()
    client = client_of(permission)
    page = client.get(PAGE)
    sees = permission == "view_ratepolicy"
    found = {row[0]: row[1] for row in rows(page, "callers")}
    assert found["user alice"] == ("3 of 3 used search: 3/hour" if sees else "–")
    assert found["user bob"] == "1 of 1 used search: 1/day"
    refused = {row[2]: row[4] for row in rows(page, "refusals")}
    assert refused == {"user alice": "search: 3/hour" if sees else "–", "user bob": "search: 1/day"}
    RatePolicy.objects.all().delete()
    refused = {row[2]: row[4] for row in rows(client.get(PAGE), "refusals")}
    assert refused["user alice"] == ("search: 3/hour" if sees else "–")


def test_an_endpoint_is_selected_by_its_row(operator: Client, asked: User, search: Endpoint) -> None:
    page = operator.get(PAGE, {"span": "day", "order": "refused"})
    assert f'href="?span=day&amp;order=refused&amp;endpoint={search.pk}"' in text_of(page)
    page = operator.get(PAGE, {"endpoint": search.pk})
    assert page.context["totals"][:3] == ["3", "2", "2"]
    assert [row[0] for row in rows(page, "callers")] == ["user alice"]
    assert f"explain/?user={asked.pk}&amp;endpoint=search" in text_of(page)
    assert len(rows(page, "refusals")) == 1
    page = operator.get(PAGE, {"endpoint": 0})
    assert page.context["totals"][:3] == ["1", "0", "0"]
    assert [row[0] for row in rows(page, "callers")] == ["ip:203.0.113.7"]
    assert "No refusals are recorded." in text_of(page)


def test_callers_are_sorted_by_the_column_that_is_chosen(operator: Client, search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="2/hour")
    for last, scope, times in ((7, "search", 5), (8, "search", 3), (9, None, 9)):
        for _ in range(times):
            check_request(request_from(address=f"203.0.113.{last}"), scope=scope)
    collector.flush()
    for query, order in (({}, "978"), ({"order": "refused"}, "789")):
        page = operator.get(PAGE, query)
        assert "".join(row[0][-1] for row in rows(page, "callers")) == order
        [sorted_by] = re.findall(r'aria-sort="descending"><a href="\?order=(\w+)"', text_of(page))
        assert sorted_by == query.get("order", "admitted")


def test_unknown_parameters_are_ignored_with_a_warning(operator: Client) -> None:
    for name, value in (("span", HOSTILE), ("endpoint", "-1"), ("endpoint", "١"), ("order", "\x00")):
        page = operator.get(PAGE, {name: value})
        (warning,) = [str(message) for message in page.context["messages"]]
        assert f"{name}=" in warning
        assert "was ignored, because the value is unknown." in warning
        assert len(warning) < 200
        assert "<script>alert" not in text_of(page)
    assert "deleted (id 999)" in text_of(operator.get(PAGE, {"endpoint": "999"}))


def test_more_callers_take_no_more_commands(
    operator: Client, search: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, commands = type(default_limiter().store), []
    execute = store.execute
    monkeypatch.setattr(store, "execute", lambda self, command: (commands.append(command), execute(self, command))[1])
    counts = []
    for first in (0, 10):
        for number in range(first, first + 10):
            user = User.objects.create(username=f"u{number}")
            RatePolicy.objects.create(user=user, rates="1/hour")
            for _ in range(2):
                check_request(request_from(user), scope="search")
        collector.flush()
        operator.get(PAGE)  # reads the policies
        commands.clear()
        assert len(rows(operator.get(PAGE), "callers")) == 10
        counts.append(len(commands))
    assert counts[0] == counts[1] < 12


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"REDIS_URL": "redis://127.0.0.1:1/0"},
            "Redis did not answer (connection). Traffic cannot be shown. Try again later.",
        ),
        ({"REDIS_URL": "memory://"}, "This needs Redis, but each worker counts in its own memory (memory://)."),
        ({"ENABLED": False}, "This needs Redis, which is unused while limits are not enforced."),
    ],
)
def test_without_redis_the_page_says_why_once(
    operator: Client, settings: Any, change: dict[str, Any], why: str, search: Endpoint
) -> None:
    now = timezone.now()
    Outage.objects.create(
        id="12345678-1234-5678-1234-567812345678",
        worker="web:1",
        began_at=now,
        ended_at=now,
        reason="connection",
        allow=1234,
        deny=1,
        local=0,
        policies={},
    )
    settings.RATEQUOTA = {**settings.RATEQUOTA, **change}
    words = words_of(operator.get(PAGE))
    assert words.count(why) == 1
    assert "<h2" not in words.partition('id="content-main"')[2]
    told = r"\d\d:\d\d \(1,234 requests were admitted without limits, 1 request was refused\)\."
    assert re.search(rf"Redis was unavailable (\d\d/\d\d/\d{{4}} )?{told}", words), (
        "with a date if midnight has passed"
    )


def test_a_log_only_policy_leads_to_what_it_would_have_refused(
    operator: Client, redis_client: Any, search: Endpoint
) -> None:
    policy = RatePolicy.objects.create(endpoint=search, rates="1/day", mode="log")
    for _ in range(3):
        check_request(request_from(address="203.0.113.7"), scope="search")
    collector.flush()
    link = re.search(r'href="([^"]*)">Log-only refusals</a>', text_of(operator.get(LIST)))
    assert link is not None
    assert f'href="{link[1]}"' in text_of(operator.get(f"{LIST}{policy.pk}/change/"))
    page = text_of(operator.get(html.unescape(link[1])))
    refusals = page[page.index('<section aria-labelledby="ratequota-refusals">') :]
    [row] = re.findall(r"<tr>\s*<th scope=\"row\">.*?</tr>", refusals, re.S)
    for text in (" (log only)<", ">2<", "ip:203.0.113.7", "GET search"):
        assert text in row
