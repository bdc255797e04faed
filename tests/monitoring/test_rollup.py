"""Counts that outlive Redis: hours and days in the database."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
import time_machine
from django.core.management import CommandError
from django.db import connection

from django_ratequota.models import UsageCount
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.packing import DAY, HOUR
from django_ratequota.monitoring.records import DecisionRecord
from django_ratequota.monitoring.rollup import RolledUp, roll_up
from django_ratequota.monitoring.timeline import timeline
from tests.changes.test_databases import Start, start  # noqa: F401 - a fixture
from tests.enforcement.test_propagation import migrated  # noqa: F401 - a fixture
from tests.support.commands import run

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("redis_client")]


@pytest.fixture
def now() -> int:
    """The middle of an hour in the middle of a UTC day."""
    return int(time.time() // DAY * DAY + 12 * HOUR + 1800)


@pytest.fixture
def count(now: int) -> Callable[..., None]:
    """Count a number of requests some hours ago."""

    def run(hours_ago: int, times: int, **more: Any) -> None:
        with time_machine.travel(now, tick=False):
            values = {"endpoint_ids": (), "policy_ids": (), "allowed": True, "against": (), **more}
            record = DecisionRecord(
                second=now - hours_ago * HOUR, caller="user:1", ip="", plan_id=None, cost=1, **values
            )
            collector.clear()
            collector.pending.extend([record] * times)
            collector.flush()

    return run


@pytest.fixture
def at(now: int) -> Callable[..., RolledUp]:
    """Roll up some hours later."""

    def run(hours: int = 0, **options: Any) -> RolledUp:
        with time_machine.travel(now + hours * HOUR, tick=False):
            return roll_up(**options)

    return run


def rows(length: str, place: str = "t") -> list[tuple[int, int, int]]:
    """Return (admitted, refused, would_refuse) of a place in order of time."""
    found = UsageCount.objects.filter(length=length, place=place).order_by("starts_at")
    return list(found.values_list("admitted", "refused", "would_refuse"))


def test_ended_hours_are_rolled_up_into_hours_and_days(
    count: Callable[..., None], at: Callable[..., RolledUp], now: int
) -> None:
    count(0, 100)
    count(1, 3, policy_ids=(7,), against=(7,))
    count(1, 2, allowed=False, policy_ids=(7,), against=(7,), endpoint_ids=(4,))
    count(2, 5)
    count(20, 1)
    assert at() == RolledUp(hours=8, days=6, deleted=0)
    assert rows("hour") == [(1, 0, 0), (5, 0, 0), (3, 2, 3)]
    assert rows("hour", "p7") == [(3, 2, 3)]
    assert rows("hour", "e4") == [(0, 2, 0)]
    assert rows("hour", "e0") == [(1, 0, 0), (5, 0, 0), (3, 0, 3)]
    assert rows("day") == [(1, 0, 0), (8, 2, 3)]
    newest = UsageCount.objects.filter(length="hour").first()
    assert newest is not None
    assert newest.starts_at == datetime.fromtimestamp(now // HOUR * HOUR - HOUR, UTC)


def test_a_second_rollup_changes_nothing(count: Callable[..., None], at: Callable[..., RolledUp]) -> None:
    count(3, 5)
    at()
    assert at() == RolledUp(0, 0, 0)
    assert rows("hour") == rows("day") == [(5, 0, 0)]


def test_late_counts_are_added_by_the_next_rollup(count: Callable[..., None], at: Callable[..., RolledUp]) -> None:
    count(3, 5)
    at()
    count(3, 2)
    at()
    assert rows("hour") == rows("day") == [(7, 0, 0)]


def test_counts_lost_by_redis_stay_in_the_database(
    count: Callable[..., None], at: Callable[..., RolledUp], redis_client: redis.Redis
) -> None:
    count(3, 5)
    at()
    for key in redis_client.scan_iter("rqtest:*"):
        redis_client.delete(key)
    count(3, 1)
    at()
    assert rows("hour") == rows("day") == [(5, 0, 0)]


def test_a_partly_expired_hour_is_not_rolled_up(count: Callable[..., None], at: Callable[..., RolledUp]) -> None:
    count(3, 5)
    # By then that hour began more than 48 hours ago: Redis may hold only a part of it.
    at(46)
    assert rows("hour") == []
    at(44)
    assert rows("hour") == [(5, 0, 0)]


@pytest.mark.slow
def test_another_process_that_writes_to_sqlite_waits_for_a_rollup(
    start: Start,  # noqa: F811
    count: Callable[..., None],
    tmp_path: Path,
) -> None:
    """A transaction that reads before it writes fails at once where another process has written between."""
    count(24, 5)
    (worker,) = start("default")
    worker.run(
        "import sqlite3; from contextlib import closing; from django.db import connection\n"
        "from django_ratequota.models import UsageCount; from django_ratequota.monitoring.rollup import roll_up\n"
        "def write_after(execute, sql, *more):\n"
        "    reply = execute(sql, *more)\n"
        "    if sql.startswith('SELECT'):\n"
        f"        with closing(sqlite3.connect({str(tmp_path / 'default.sqlite3')!r}, timeout=0)) as other:\n"
        "            try:\n"
        "                other.execute('PRAGMA user_version = 1')\n"
        "            except sqlite3.OperationalError as error:\n"
        "                waits.append(str(error))\n"
        "    return reply\n"
        "connection.cursor().execute('PRAGMA journal_mode = WAL')\n"
        "waits = []\n"
        "with connection.execute_wrapper(write_after): roll_up()\n"
    )
    rows = "UsageCount.objects.filter(place='t')"
    assert worker.run(f"answer = list({rows}.values_list('admitted', flat=True))") == [5, 5]
    assert set(worker.run("answer = waits")) == {"database is locked"}


def test_old_rows_are_deleted(count: Callable[..., None], at: Callable[..., RolledUp], now: int) -> None:
    then = datetime.fromtimestamp(now, UTC)
    for length, days in (("hour", 34), ("hour", 36), ("day", 399), ("day", 401)):
        counts = {"admitted": days, "refused": 0, "would_refuse": 0}
        UsageCount.objects.create(length=length, starts_at=then - timedelta(days=days), place="t", **counts)
    assert at() == RolledUp(0, 0, 2)
    assert (rows("hour"), rows("day")) == ([(34, 0, 0)], [(399, 0, 0)])
    assert at(keep_hours=1, keep_days=1) == RolledUp(0, 0, 2)


@pytest.mark.parametrize(("zone", "days"), [("UTC", [(6, 0, 0)]), ("Pacific/Auckland", [(4, 0, 0), (2, 0, 0)])])
def test_days_follow_the_time_zone_setting(
    count: Callable[..., None], at: Callable[..., RolledUp], settings: Any, zone: str, days: list[Any]
) -> None:
    """Midnight in Auckland is 11:00 or 12:00 UTC."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "TIME_ZONE": zone}
    count(4, 4)
    count(0, 2)
    at(1)
    assert rows("day") == days


def test_query_count_does_not_grow_with_policies(
    count: Callable[..., None], at: Callable[..., RolledUp], django_assert_num_queries: Any
) -> None:
    def spread(numbers: range) -> None:
        for number in numbers:
            count(3, 1, policy_ids=(number,))

    queries = 10 if connection.features.has_select_for_update else 11
    spread(range(3))
    with django_assert_num_queries(queries):
        at()
    spread(range(3, 30))
    with django_assert_num_queries(queries):
        at()


def test_the_week_includes_rolled_up_counts(
    count: Callable[..., None], at: Callable[..., RolledUp], now: int, redis_client: redis.Redis
) -> None:
    count(3, 5)
    at()
    with time_machine.travel(now, tick=False):
        before = timeline("week")
        for key in redis_client.scan_iter("rqtest:*"):
            redis_client.delete(key)
        assert timeline("week") == before
        assert sum(counts.admitted for counts in before.total) == 5


def test_the_rollup_command_prints_the_rows(count: Callable[..., None], now: int) -> None:
    count(3, 5)
    with time_machine.travel(now, tick=False):
        assert run("rollup") == "2 hourly and 2 daily rows written, 0 old rows deleted\n"
        assert (
            run("rollup", "--keep-hourly", "0", "--keep-days", "0")
            == "0 hourly and 0 daily rows written, 4 old rows deleted\n"
        )


def test_the_rollup_command_without_redis_is_an_error(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0"}
    with pytest.raises(CommandError, match="Redis did not answer"):
        run("rollup")


def test_the_rollup_task(count: Callable[..., None], now: int, settings: Any) -> None:
    """Django has tasks from 6.0 on; before, importing the module raises ``ImportError``."""
    import django

    if django.VERSION < (6, 0):
        with pytest.raises(ModuleNotFoundError, match=r"django\.tasks"):
            __import__("django_ratequota.tasks")
        return
    settings.TASKS = {"default": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend"}}
    from django_ratequota.tasks import rollup

    count(3, 5)
    with time_machine.travel(now, tick=False):
        result = rollup.enqueue()
    assert result.return_value == {"hours": 2, "days": 2, "deleted": 0}
    assert sys.modules["django_ratequota.tasks"].rollup is rollup
