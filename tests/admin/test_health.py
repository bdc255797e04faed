"""The page Health: the status in words, workers, Redis servers, and outages."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import User
from django.test import Client, RequestFactory
from django.utils import timezone

from django_ratequota import check_request
from django_ratequota.changes.publication import published_at
from django_ratequota.models import Outage, Plan, RatePolicy
from django_ratequota.monitoring import health
from django_ratequota.monitoring.health import Health, state_of
from django_ratequota.runtime import default_limiter
from django_ratequota.utils.histogram import BOUNDS
from tests.admin.test_permissions import client_of
from tests.admin.test_traffic import rows
from tests.support.operators import text_of, words_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "redis_client")]

PAGE = "/admin/django_ratequota/ratepolicy/health/"
#: A minute, in revisions.
MINUTE = 60 * 10**6


def worker(name: str, revision: int, *, age: float = 1.0, **fields: Any) -> Health:
    """What a worker reports that began to use the revision a minute ago."""
    latency = [0] * (len(BOUNDS) + 1)
    one = Health(
        process=name,
        at=time.time() - age,
        revision=revision,
        policies_age=60.0,
        degraded={},
        down={},
        latency=latency,
    )
    return replace(one, **fields)


def boxes(page: Any) -> list[str]:
    return re.findall(r'<p class="ratequota-status ([^"]*"[^>]*>[^<]*)</p>', text_of(page))


Reported = Callable[..., Any]


@pytest.fixture
def reported(operator: Client, monkeypatch: pytest.MonkeyPatch) -> Reported:
    """Opens the page after these reports, for a revision that was published a minute ago."""

    def show(*found: Health) -> Any:
        monkeypatch.setattr(health, "reports", lambda: found)
        monkeypatch.setattr(type(default_limiter()), "stored_revision", lambda self: PUBLISHED)
        return operator.get(PAGE)

    return show


PUBLISHED = time.time_ns() // 1000 - MINUTE


def test_all_changes_are_live(reported: Reported) -> None:
    """Idle workers and those that just started load the newest policies before their next decision."""
    page = reported(
        worker("a:1", PUBLISHED, idle=0.5), worker("b:2", PUBLISHED - 1, idle=None), worker("c:3", 0, idle=None)
    )
    [box] = boxes(page)
    assert re.fullmatch(
        rf'ratequota-good" title="Policy version {PUBLISHED}, published [^"]* UTC">All changes are live\.', box
    )
    assert text_of(page).count(str(PUBLISHED)) == 1, "in the tooltip alone"
    assert [row[:2] for row in rows(page, "workers")] == [
        ["a:1", "up to date"],
        ["b:2", "idle"],
        ["c:3", "no policies loaded yet"],
    ]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"revision": PUBLISHED - 1, "idle": 30.0}, "Older policies still apply on b:2, c:3. Check the log there."),
        (
            {"age": 45},
            "No reports come from b:2, c:3. A worker that is not reporting has stopped, hangs or cannot reach Redis.",
        ),
        (
            {"written_until": 250.0},
            "Quota usage on b:2, c:3 has been waiting for the database for up to 5 min. It is lost if the worker "
            "is killed. Check the log there.",
        ),
        (
            {"down": {"cache:6379": "timeout"}},
            "Redis at cache:6379 is unavailable on b:2, c:3 (timeout), so the “on error” of each policy applies.",
        ),
        (
            {"errors": {"wrongtype": "WRONGTYPE <Operation>"}},
            "In the last minute, “on error” was applied to requests on b:2, c:3 (wrongtype): "
            "WRONGTYPE &lt;Operation&gt;",
        ),
        (
            {"site": "another"},
            "Another site with another SECRET_KEY uses the same counters on b:2, c:3. Give each site its own "
            "PREFIX unless the sites share their policies.",
        ),
        ({"errors": {"routes": "a route failed"}}, "In the last minute, on b:2, c:3: a route failed"),
    ],
    ids=["behind", "silent", "late", "away", "undecided", "site", "failed"],
)
def test_each_cause_has_one_sentence(reported: Reported, fields: dict[str, Any], text: str) -> None:
    values = {"revision": PUBLISHED, "idle": 0.5, **fields}
    if "written_until" in values:
        values["written_until"] = time.time() - fields["written_until"]
    found = [worker(name, **values) for name in ("b:2", "c:3")]
    page = reported(worker("a:1", PUBLISHED, idle=0.5), *found)
    assert boxes(page) == [f'ratequota-bad">{text}']
    in_trouble = "revision" in fields or "age" in fields
    assert rows(page, "workers")[0][0] == ("b:2" if in_trouble else "a:1"), "trouble comes first"


def test_a_sentence_names_three_workers_and_counts_the_others(reported: Reported) -> None:
    [box] = boxes(reported(*(worker(f"w:{number}", PUBLISHED, down={"r": "oom"}) for number in range(9))))
    assert "on w:0, w:1, w:2 and 6 more (oom), so" in box


def test_without_reports_the_page_makes_no_claim(operator: Client, settings: Any) -> None:
    assert boxes(operator.get(PAGE)) == ['ratequota-">Workers do not report, because STATISTICS_SECONDS is 0.']
    settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 1}
    assert boxes(operator.get(PAGE)) == ['ratequota-">No worker has reported in the last minute.']


def test_the_state_of_a_worker_follows_from_its_revision_and_its_last_decision() -> None:
    decided = [1, *[0] * len(BOUNDS)]
    assert state_of(worker("a:1", 6, idle=30.0, latency=decided), 7) == "behind", "no time of publication"
    assert state_of(worker("a:1", 6, idle=90.0), 7) == "idle"
    assert state_of(worker("a:1", 8), 7) == "live"
    assert [published_at(revision) for revision in (7, 2**62)] == [None, None]


def test_a_change_of_one_user_resets_the_age_of_the_policies() -> None:
    """Otherwise a worker would seem to have loaded the revision before it was published."""
    RatePolicy.objects.create(rates="5/hour")
    check_request(RequestFactory().get("/"))
    before = health.health()
    RatePolicy.objects.create(user=User.objects.create(username="alice"), rates="9/hour")
    check_request(RequestFactory().get("/"))
    after = health.health()
    assert after.revision > before.revision
    assert after.at - after.policies_age > before.at - before.policies_age + 1e-3


def test_this_worker_is_shown_as_it_is_now(operator: Client) -> None:
    """Its last report may name an older revision than its last decision."""
    policy = RatePolicy.objects.create(rates="5/hour")
    check_request(RequestFactory().get("/"))
    health.report()
    policy.rates = "6/hour"
    policy.save()
    assert rows(operator.get(PAGE), "workers")[0][1] == "idle"
    check_request(RequestFactory().get("/"))
    assert rows(operator.get(PAGE), "workers")[0][1] == "up to date"


def test_redis_servers_are_listed(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    page = operator.get(PAGE)
    [[name, version, up, memory, _most, evicted]] = rows(page, "servers")
    assert re.fullmatch(r"127\.0\.0\.1:\d+|/.*|localhost:\d+", name)
    assert re.fullmatch(r"(valkey|redis) \d+\.\d+.*", version)
    assert up == "0"
    assert re.fullmatch(r"[\d.]+[KM]", memory)
    assert evicted == "0"
    info = {"redis_version": "7.4.0", "evicted_keys": "1234", "maxmemory": "1000", "used_memory": "800"}
    monkeypatch.setattr(type(default_limiter().store), "info", lambda self: {"cache:6379": info})
    page = operator.get(PAGE)
    assert rows(page, "servers") == [["cache:6379", "redis 7.4.0", "–", "–", "–", "1234"]]
    assert 'ratequota-bad">cache:6379 has evicted keys.' in boxes(page)[-2]
    assert 'ratequota-bad">cache:6379 uses 80 % of its maxmemory.' in boxes(page)[-1]


def outage(began: timedelta, **fields: Any) -> Outage:
    at = timezone.now() - began
    values = {"worker": "web:1", "reason": "timeout", "allow": 0, "deny": 0, "local": 0, "policies": {}}
    return Outage.objects.create(id=uuid4(), began_at=at, ended_at=at + timedelta(minutes=10), **{**values, **fields})


def test_outages_are_shown_with_the_policies_that_decided_while_redis_is_down(settings: Any) -> None:
    everyone = RatePolicy.objects.create(plan=Plan.objects.create(name="Free", slug="free"), rates="77/min")
    override = RatePolicy.objects.create(subject="ip:203.0.113.7", rates="9/min")
    decided = {str(everyone.pk): {"allow": 1200}, str(override.pk): {"deny": 3}, "999": {"allow": 1}}
    outage(timedelta(days=3), allow=1200, deny=3, policies=decided)
    outage(timedelta(days=3), allow=34, worker="web:2", reason="connection")
    outage(timedelta(days=1), local=5)
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0"}
    page = client_of("superuser").get(PAGE)
    assert boxes(page) == [
        'ratequota-bad">Redis did not answer (connection). The “on error” of each policy applies until it does.'
    ]
    last, first = listed(page)
    assert re.fullmatch(
        r"Redis was unavailable \d\d/\d\d/\d{4} \d\d:\d\d–\d\d:\d\d \(1,234 requests were admitted without limits, "
        r"3 requests were refused\)\. 2 workers \(connection, timeout\) · plan Free × all endpoints: 77/min 1,200 · "
        r"ip:203\.0\.113\.7 × all endpoints: 9/min 3",
        first,
    )
    assert last.endswith(" (5 requests were decided by their workers alone). 1 worker (timeout)")
    page = client_of("granter").get(PAGE)
    assert listed(page)[1].endswith(" · ip:203.0.113.7 × all endpoints: 9/min 3")
    assert "77/min" not in text_of(page)


def listed(page: Any) -> list[str]:
    """Return the outages as text."""
    found = re.findall(r"<li>(Redis was unavailable.*?)</li>", text_of(page), re.DOTALL)
    return [re.sub("<.*?>", "", one.replace("<br>", " ")) for one in found]


def test_without_outages_the_page_says_so(operator: Client) -> None:
    assert "None in the last 35 days." in words_of(operator.get(PAGE))
