"""``manage.py ratequota``: what it prints, and that explaining consumes nothing."""

from __future__ import annotations

import io
import re
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection
from django.utils import timezone

from django_ratequota.management import maintenance
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.monitoring import health
from django_ratequota.runtime import default_limiter
from django_ratequota.store.base import server_version
from django_ratequota.utils.histogram import BOUNDS
from tests.support.commands import run
from tests.support.fake_redis import fake_redis
from tests.support.operators import a_customer
from tests.support.requests import check_from
from tests.support.server import memory_limit
from tests.support.windows import counted

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

DOWN = {"REDIS_URL": "redis://127.0.0.1:1/0", "TIMEOUT": 5.0, "STATISTICS_SECONDS": 0}


@pytest.fixture
def alice() -> User:
    return a_customer()


def test_explain_names_winners_losers_and_live_counters(alice: User) -> None:
    for _ in range(3):
        assert check_from(alice, scope="search").allowed
    text = run("explain", "--user", "alice", "--endpoint", "search")
    assert f"of user:{alice.pk}: " in run("explain", "--user", str(alice.pk), "--endpoint", "search")
    assert "plan         Free" in text
    assert "1000/day, counted per caller: wins: the user is the most specific audience here" in text
    override = RatePolicy.objects.get(user=alice)
    assert f"100/min, counted per caller: lost: policy {override.pk} for the user is more specific" in text
    assert f"search: 10/min of user:{alice.pk}: 7 of 10 left" in text
    assert "search: 10000/month for everyone together of everyone: 9997 of 10000 left" in text
    assert "a request of cost 1 would be admitted now" in text


def test_explain_takes_the_plan_that_a_resolver_would_return(alice: User, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": "builtins.repr"}
    Plan.objects.create(name="Pro", slug="pro")
    with pytest.raises(CommandError, match="with --plan SLUG"):
        run("explain", "--user", "alice")
    PlanAssignment.objects.create(user=alice, plan=Plan.objects.create(name="Team", slug="team"))
    assert "plan         Team (assigned to the user)" in run("explain", "--user", "alice", "--plan", "")
    text = run("explain", "--user", "alice", "--plan", "pro", "--endpoint", "search")
    assert "plan         Pro" in text
    assert "2 more policies are for other customers (plan)." in text


def test_explain_resolves_a_path_and_its_view() -> None:
    endpoint = Endpoint.objects.create(name="admin-login", routes="/admin/login/")
    RatePolicy.objects.create(endpoint=endpoint, counted_per="ip", rates="5/min")
    text = run("explain", "--ip", "203.0.113.7", "--path", "/admin/login/?next=/", "--method", "post")
    assert "admin-login: 5/min per address of ip:203.0.113.7: 5 of 5 left" in text


def test_explain_says_that_the_views_scope_has_no_endpoint(settings: Any) -> None:
    line = "scope        search: no endpoint has this name, so the view has no limits of its own"
    assert line in run("explain", "--ip", "203.0.113.7", "--path", "/decorated/").splitlines()
    assert "scope " not in run("explain", "--ip", "203.0.113.7", "--path", "/quota/usage/")
    Endpoint.objects.create(name="search", methods="POST")
    assert "scope " not in run("explain", "--ip", "203.0.113.7", "--path", "/decorated/", "--method", "GET")
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENABLED": False}
    assert "scope " not in run("explain", "--ip", "203.0.113.7", "--path", "/quota/usage/")


def test_explain_does_not_say_when_a_full_counter_will_be_full() -> None:
    RatePolicy.objects.create(rates="5/min")
    text = run("explain", "--ip", "203.0.113.7")
    assert "         all endpoints: 5/min of ip:203.0.113.7: 5 of 5 left" in text.splitlines()


@pytest.mark.parametrize("args", [["--endpoint", "usage"], ["--path", "/quota/usage/"]])
def test_explain_shows_the_built_in_limit_of_the_usage_endpoint(args: list[str]) -> None:
    RatePolicy.objects.create(rates="5/min")
    text = run("explain", "--ip", "203.0.113.7", *args)
    assert "lost: policies for all endpoints do not apply to the usage endpoint" in text
    assert "  built in: usage: 60/min of ip:203.0.113.7: 60 of 60 left" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["explain"], "Choose a customer"),
        (["explain", "--user", "nobody"], "There is no user 'nobody'"),
        (["explain", "--ip", "300.1.1.1"], "does not appear to be an IPv4 or IPv6 address"),
        (["explain", "--ip", "::1", "--endpoint", "serach"], "There is no endpoint 'serach'."),
        (["explain", "--ip", "::1", "--path", "/nowhere/"], "No route matches '/nowhere/'"),
        (["explain", "--ip", "::1", "--plan", "gold"], "There is no plan 'gold' (existing plans: none yet)"),
        (
            ["explain", "--identifier", "tenant=acme"],
            "with a name from RATEQUOTA['IDENTIFIERS'] (none are configured)",
        ),
    ],
)
def test_invalid_arguments_are_explained(args: list[str], message: str) -> None:
    with pytest.raises(CommandError) as caught:
        run(*args)
    assert message in str(caught.value)


def test_publish_applies_raw_sql_to_the_next_request(alice: User) -> None:
    assert check_from(alice).allowed
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_ratequota_ratepolicy SET rates = 'blocked' WHERE user_id IS NOT NULL")
    assert check_from(alice).allowed
    before = default_limiter().stored_revision()
    assert "Every worker reloads all policies" in run("publish", "--reason", "OPS-7")
    assert default_limiter().stored_revision() > before
    assert not check_from(alice).allowed
    assert PolicyChange.objects.first().reason == "OPS-7"


def test_status_shows_store_revision_last_change_and_ledger(
    alice: User, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, text = redis_client.info(), run("status")
    lines = text.splitlines()
    name, version = server_version(info)
    assert lines[0].startswith(f"store        {name} {version} at 127.0.0.1:")
    assert lines[0].endswith(" s")
    assert lines[1] == f"eviction     noeviction, {info['evicted_keys']} keys evicted"
    assert f"version      {default_limiter().stored_revision()}" in text
    assert f"created: user:{alice.pk} × all endpoints: 1000/day\n" in text
    [undo] = re.findall(r"^to undo it   manage\.py ratequota (undo \S+)$", text, re.MULTILINE)
    assert "deleted" in run(*undo.split(), "--dry-run")
    assert "keys         rqtest:*" in text
    assert "ledger       0 rows\n" in text
    assert "workers      none has reported in the last minute\n" in text
    counted(subject="user:1", starts_at=timezone.now(), ends_at=timezone.now() + timedelta(days=9), used=1, limit=2)
    monkeypatch.setattr(maintenance, "MANY_ROWS", 0)
    assert "ledger       1 rows: many, lower KEEP_QUOTA_MONTHS\n" in run("status")


def test_status_undoes_the_last_edit_although_policies_were_published_since(alice: User) -> None:
    change = PolicyChange.objects.latest("pk")
    run("publish")
    assert f"to undo it   manage.py ratequota undo {change.change_id}\n" in run("status")


def status_until_its_error(match: str) -> str:
    out = io.StringIO()
    with pytest.raises(CommandError, match=match):
        call_command("ratequota", "status", stdout=out)
    return out.getvalue()


def test_status_shows_the_last_change_while_redis_is_down(alice: User, settings: Any) -> None:
    settings.RATEQUOTA = DOWN
    text = status_until_its_error(r"Redis did not answer \(connection\)")
    assert "store        could not be read: " in text
    assert "to undo it   manage.py ratequota undo " in text
    assert "ledger       0 rows\n" in text
    assert "workers      could not be read: " in text


def test_status_shows_the_last_change_while_redis_is_full(alice: User, redis_client: redis.Redis) -> None:
    with memory_limit(redis_client, used=2):
        text = status_until_its_error(r"Redis did not answer \(oom\)")
    assert "of maxmemory" in text
    assert "to undo it   manage.py ratequota undo " in text


def test_status_shows_redis_while_the_database_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OperationalError("connection refused")

    monkeypatch.setattr(maintenance, "find_unreadable", fail)
    monkeypatch.setattr("django.db.migrations.loader.MigrationLoader", fail)
    text = status_until_its_error("The database is unavailable: connection refused")
    assert "version      " in text
    assert "last change  could not be read: connection refused\n" in text
    assert "workers      none has reported in the last minute\n" in text


def test_status_warns_of_a_server_that_is_nearly_full(redis_client: redis.Redis) -> None:
    """A full one refuses the script for every caller, with a counter or not."""
    assert "maxmemory" not in run("status")
    with memory_limit(redis_client, used=0.87):
        assert re.search(
            r"^memory +(8|9)\d% of maxmemory, each policy's on_error applies when it is full",
            run("status"),
            re.MULTILINE,
        )
        redis_client.config_set("maxmemory-policy", "allkeys-lru")
        assert "of maxmemory" not in run("status"), "it evicts instead"
    with memory_limit(redis_client, used=0.5):
        assert "of maxmemory" not in run("status")


def report_as(name: str, **values: Any) -> None:
    """Send a report as another process would."""
    one = replace(
        health.health(),
        **{"process": name, "degraded": {}, "down": {}, "latency": [0] * (len(BOUNDS) + 1), **values},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "health", lambda: one)
        health.report()


def test_status_shows_the_report_of_each_process(alice: User) -> None:
    default_limiter().store.execute(("SET", "rqtest:revision", default_limiter().stored_revision() - 60 * 10**6))
    revision = default_limiter().stored_revision()
    fast, slow = bisect_left(BOUNDS, 0.001), bisect_left(BOUNDS, 0.1)
    latency = [0] * (len(BOUNDS) + 1)
    latency[fast], latency[slow] = 90, 10
    report_as("web-2:8", revision=revision, latency=latency)
    latency[fast] = 0
    report_as(
        "web-1:7",
        revision=revision - 1,
        latency=latency,
        down={"10.0.0.7:6379": "timeout", "10.0.0.8:6379": "oom"},
        degraded={"timeout": 12, "oom": 3},
        idle=1.0,
    )
    # A revision newer than that in Redis was published before Redis lost its data.
    report_as("web-4:9", revision=revision + 1, written_until=time.time() - 4.4)
    report_as("web-5:9", revision=revision - 1, idle=300.0, written_until=time.time() - 41)
    report_as(
        "web-3:9",
        revision=0,
        errors={
            "wrongtype": "WRONGTYPE Operation against a key",
            "response": "none",
            "plans.find": "plans.find failed: KeyError",
        },
    )
    text = run("status")
    states = "2 at this version, 1 without a decision since, 1 behind, 1 without policies yet"
    assert f"workers      5: {states}, breaker closed in 4, errors in 1\n" in text
    ms = [f"{BOUNDS[place] * 1000:.2f} ms" for place in (fast, slow)]
    assert f"latency      110 decisions, p50 {ms[0]}, p99 {ms[1]} in the last minute\n" in text
    assert "ledger       late in 1 of 5 workers, see their logs\n" in text
    assert "             counters not written for 41 s\n" in text
    assert (
        f"""\
  web-1:7
             version {revision - 1}, 10 decisions, p50 {ms[1]}, p99 {ms[1]}
             breaker open to 10.0.0.7:6379 (timeout), open to 10.0.0.8:6379 (oom)
             decided without Redis: oom 3, timeout 12
  web-2:8
             version {revision}, 100 decisions, p50 {ms[0]}, p99 {ms[1]}
             breaker closed
             decided without Redis: none
  web-3:9
             version none yet, no decisions
             breaker closed
             error in the last minute: plans.find failed: KeyError
             error in the last minute: response: none
             error in the last minute: wrongtype: WRONGTYPE Operation against a key
             decided without Redis: none
"""
        in text
    )


def test_status_counts_processes_of_another_site(settings: Any) -> None:
    """Their reports go after a minute, and with them those from before a change of SECRET_KEY."""
    report_as("web-1:7", site=health.health().site)
    assert "site  " not in run("status")
    settings.SECRET_KEY = "another"
    assert "site         1 of 1 workers have another SECRET_KEY, so give each site its own PREFIX\n" in run("status")


def test_checkpoint_waits_until_every_process_has_written(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 1}
    assert run("checkpoint") == "No worker has reported in the last minute, so there are no counters to write\n"
    report_as("web-1:7")
    before = health.reports()
    report_as("web-1:7", written_until=time.time() + 60)
    replies = iter([before, before, health.reports()])
    monkeypatch.setattr(health, "reports", lambda: next(replies))
    assert run("checkpoint") == "All counters are in the database, from 1 worker\n"


@pytest.mark.slow
def test_checkpoint_names_the_processes_that_have_not_written(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 1}
    report_as("web-1:7", written_until=time.time() + 60)
    report_as("web-2:8")
    text = (
        r"1 of 2 workers have not written their counters within 1 s \(web-2:8 reported \d+ s ago\). Check their logs"
    )
    with pytest.raises(CommandError, match=text):
        run("checkpoint", "--timeout", "1")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"STATISTICS_SECONDS": 0}, "STATISTICS_SECONDS is 0, so workers do not report. Stop them"),
        ({"CHECKPOINT_SECONDS": 0}, "CHECKPOINT_SECONDS is 0, so no counters are kept"),
        ({"ENABLED": False}, "Redis has no counters: .*ENABLED"),
        ({"REDIS_URL": "memory://"}, "Redis has no counters: .*memory://"),
    ],
)
def test_checkpoint_says_why_there_can_be_none(settings: Any, changed: dict[str, Any], text: str) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 1, **changed}
    with pytest.raises(CommandError, match=text):
        run("checkpoint")


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", "3601"])
def test_checkpoint_waits_for_whole_seconds(value: str) -> None:
    with pytest.raises(CommandError, match="write a whole number from 1 to 3600"):
        run("checkpoint", "--timeout", value)


def test_status_of_a_server_that_hides_its_settings(settings: Any) -> None:
    body = b"# Server\r\nredis_version:7.2.4\r\n"
    with fake_redis(b"$%d\r\n%s\r\n" % (len(body), body)) as url:
        settings.RATEQUOTA = {"REDIS_URL": url, "TIMEOUT": 5}
        out = io.StringIO()
        with pytest.raises(CommandError, match=r"Redis did not answer \(response\)"):
            call_command("ratequota", "status", stdout=out)
    assert "store        redis 7.2.4 at 127.0.0.1:" in out.getvalue()
    assert "eviction     unknown, unknown keys evicted" in out.getvalue()


@pytest.mark.parametrize("verb", [["status"], ["publish"], ["reset", "--ip", "::1"]])
def test_an_unreachable_store_is_a_command_error(verb: list[str], settings: Any) -> None:
    settings.RATEQUOTA = DOWN
    if verb[0] == "reset":
        RatePolicy.objects.create(rates="5/min")
    with pytest.raises(CommandError, match=r"Redis did not answer \(connection\)"):
        run(*verb)


@pytest.fixture
def unmigrated() -> Iterator[None]:
    call_command("migrate", "django_ratequota", "zero", verbosity=0)
    yield
    call_command("migrate", verbosity=0)


@pytest.mark.usefixtures("unmigrated")
def test_a_database_without_tables_is_to_be_migrated(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("version: 1\npolicies: [{rates: 5/min}]")
    for verb in (["import", str(tmp_path / "file.yaml")], ["status"], ["explain", "--ip", "::1"], ["near"]):
        with pytest.raises(CommandError, match=r"not applied to 'default': 0001_initial.*\. Run manage\.py migrate"):
            run(*verb)


@pytest.mark.parametrize("verb", ["explain --ip ::1", "near", "reset --ip ::1", "give-back --ip ::1 --units 1"])
def test_a_process_that_counts_on_its_own_has_no_counters_of_others(verb: str, settings: Any) -> None:
    settings.RATEQUOTA = {"REDIS_URL": "memory://"}
    with pytest.raises(CommandError, match="memory://, so each worker counts on its own"):
        run(*verb.split())


def test_explain_works_while_the_store_is_down(alice: User, settings: Any) -> None:
    settings.RATEQUOTA = DOWN
    text = run("explain", "--user", "alice", "--endpoint", "search")
    assert "no live counter" in text
    assert "Redis was unavailable: connection" in text
