"""Counts that outlive Redis: hours in the database, and how long these and the ledger are kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import django
import pytest
import redis
import time_machine
from django.core.management import CommandError
from django.db import connection
from django.utils import timezone

from django_ratequota.conf import settings as settings_in_force
from django_ratequota.models import LedgerWriter, Outage, QuotaDay, QuotaWindow, UsageCount
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.packing import DAY, HOUR
from django_ratequota.monitoring.rollup import RolledUp, forget_windows, roll_up
from tests.changes.test_databases import Start, start  # noqa: F401 - a fixture
from tests.enforcement.test_propagation import migrated  # noqa: F401 - a fixture
from tests.monitoring.support import record
from tests.support.commands import run
from tests.support.windows import counted

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("redis_client")]

#: Count a number of requests some hours ago; roll up some hours later.
Count, At = Callable[..., None], Callable[..., RolledUp]


@pytest.fixture
def now() -> int:
    """The middle of an hour in the middle of a UTC day."""
    return int(time.time() // DAY * DAY + 12 * HOUR + 1800)


@pytest.fixture
def count(now: int) -> Count:
    def count(hours_ago: int, times: int, **more: Any) -> None:
        with time_machine.travel(now, tick=False):
            collector.clear()
            collector.pending.extend([record(now - hours_ago * HOUR, **more)] * times)
            collector.flush()

    return count


@pytest.fixture
def at(now: int) -> At:
    def roll_up_at(hours: int = 0, **options: Any) -> RolledUp:
        with time_machine.travel(now + hours * HOUR, tick=False):
            return roll_up(**options)

    return roll_up_at


def rows(place: str = "t") -> list[tuple[int, int, int]]:
    """Return (admitted, refused, would_refuse) of a place in order of time."""
    found = UsageCount.objects.filter(place=place).order_by("starts_at")
    return list(found.values_list("admitted", "refused", "would_refuse"))


def test_ended_hours_are_rolled_up(count: Count, at: At, now: int) -> None:
    count(0, 100)
    count(1, 3, policy_ids=(7,), against=(7,))
    count(1, 2, allowed=False, policy_ids=(7,), against=(7,), endpoint_ids=(4,))
    count(2, 5)
    count(20, 1)
    assert at() == RolledUp(written=8, deleted=0)
    assert rows() == [(1, 0, 0), (5, 0, 0), (3, 2, 3)]
    assert (rows("p7"), rows("e4")) == ([(3, 2, 3)], [(0, 2, 0)])
    assert rows("e0") == [(1, 0, 0), (5, 0, 0), (3, 0, 3)]
    newest = UsageCount.objects.latest("starts_at")
    assert newest.starts_at == datetime.fromtimestamp(now // HOUR * HOUR - HOUR, UTC)
    assert at() == RolledUp(0, 0), "a second one changes nothing"


def test_a_later_rollup_raises_hours_and_lowers_none(count: Count, at: At, redis_client: redis.Redis) -> None:
    for times, kept in ((5, 5), (2, 7)):
        count(3, times)
        at()
        assert rows() == [(kept, 0, 0)]
    for key in redis_client.scan_iter("rqtest:*"):
        redis_client.delete(key)
    count(3, 1)
    at()
    assert rows() == [(7, 0, 0)]


def test_a_partly_expired_hour_is_not_rolled_up(count: Count, at: At) -> None:
    count(3, 5)
    # By then that hour began more than 48 hours ago: Redis may hold only a part of it.
    at(45)
    assert rows() == []
    at(44)
    assert rows() == [(5, 0, 0)]


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
    assert worker.run(f"answer = list({rows}.values_list('admitted', flat=True))") == [5]
    assert set(worker.run("answer = waits")) == {"database is locked"}


def test_old_rows_are_deleted(at: At, now: int, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "memory://"}  # there are no hours to write
    for days in (34, 36):
        starts_at = datetime.fromtimestamp(now, UTC) - timedelta(days=days)
        UsageCount.objects.create(starts_at=starts_at, place="t", admitted=days, refused=0, would_refuse=0)
        counts = {"allow": days, "deny": 0, "local": 0, "policies": {}}
        Outage.objects.create(id=uuid4(), worker="a:1", began_at=starts_at, ended_at=starts_at, **counts)
    assert (at(), rows()) == (RolledUp(0, 2), [(34, 0, 0)])
    assert Outage.objects.get().allow == 34
    LedgerWriter.objects.create(id=uuid4(), batches=1, written_at=timezone.now() - timedelta(days=60))
    assert at(keep_days=1) == RolledUp(0, 3)


def test_old_windows_and_days_of_the_ledger_are_deleted(settings: Any) -> None:
    now, today = timezone.now(), timezone.localdate(timezone=settings_in_force.time_zone)
    for days in (743, 745):
        ended_at = now - timedelta(days=days)
        counted(subject=f"user:{days}", starts_at=ended_at - timedelta(days=30), ends_at=ended_at, used=1, limit=9)
    for days in (61, 62, 63):
        day = today - timedelta(days=days)
        row = {"counter": "{user:1}:0:fwmonth", "first_day": day.replace(day=1), "day": day}
        row |= {"policy_id": 1, "rate": "9/month"}
        QuotaDay.objects.create(**row, charged=days, refunded=0)
    for months, kept, deleted in ((0, 0, 0), (24, 0, 1), (24, 62, 1)):
        settings.RATEQUOTA = {**settings.RATEQUOTA, "KEEP_QUOTA_MONTHS": months, "KEEP_QUOTA_DAYS": kept}
        assert forget_windows() == deleted
    assert QuotaWindow.objects.get().subject == "user:743"
    assert set(QuotaDay.objects.values_list("charged", flat=True)) == {61, 62}
    begins, ends = now - timedelta(days=20), now + timedelta(days=10)
    runs = counted(subject="user:now", starts_at=begins, ends_at=ends, used=9, limit=9)
    this, earlier = {"first_day": runs.first_day}, {"counter": runs.counter}
    for charged, own in ((9, this | earlier), (8, this), (7, earlier)):
        QuotaDay.objects.create(**row | own, charged=charged, refunded=0)
    settings.RATEQUOTA = {**settings.RATEQUOTA, "KEEP_QUOTA_DAYS": 1}
    assert forget_windows() == 4
    assert QuotaDay.objects.get().charged == 9, "its month has not ended"


def test_query_count_does_not_grow_with_policies(count: Count, at: At, django_assert_num_queries: Any) -> None:
    queries = 9 if connection.features.has_select_for_update else 10
    for numbers in (range(3), range(3, 30)):
        for number in numbers:
            count(3, 1, policy_ids=(number,))
        with django_assert_num_queries(queries):
            at()


def test_the_command_prints_the_rows(count: Count, now: int, settings: Any) -> None:
    count(3, 5)
    with time_machine.travel(now, tick=False):
        assert run("rollup") == "2 hourly rows written, 0 old rows deleted\n"
        assert run("rollup", "--keep-days", "0") == "0 hourly rows written, 2 old rows deleted\n"
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0"}
    with pytest.raises(CommandError, match="Redis did not answer"):
        run("rollup")


def test_the_rollup_task(count: Count, now: int, settings: Any) -> None:
    """Django has tasks from 6.0 on; before, importing the module raises ``ImportError``."""
    if django.VERSION < (6, 0):
        with pytest.raises(ModuleNotFoundError, match=r"django\.tasks"):
            __import__("django_ratequota.tasks")
        return
    settings.TASKS = {"default": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend"}}
    from django_ratequota.tasks import rollup

    count(3, 5)
    with time_machine.travel(now, tick=False):
        assert rollup.enqueue().return_value == {"written": 2, "deleted": 0}
