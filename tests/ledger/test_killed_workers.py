"""Workers that are killed or suspended while they hold reservations, as real processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.enforcement.test_propagation import environment, migrated  # noqa: F401 - fixtures
from tests.faults import poll
from tests.support.worker import Process

pytestmark = pytest.mark.slow

_SETUP = """
from datetime import timedelta
from django.db.models.functions import Now
from django_ratequota import check_caller, peek_caller
from django_ratequota.ledger import book
from django_ratequota.models import LedgerWriter, QuotaWindow
from tests.support import spending
user = User.objects.get()
"""
_HOLD = """
held = [check_caller(user=user, cost=1000).__enter__() for _ in range(10)]
check_caller(user=user, cost=7)
spending.flush_all()
"""
_DROP = """
LedgerWriter.objects.exclude(held="").update(written_at=Now() - timedelta(minutes=11))
book.drop()
book.raise_store()
"""
_STATE = """
row = QuotaWindow.objects.get()
[status] = peek_caller(user=user).statuses
answer = [row.used, row.held, status.used]
"""


@pytest.fixture
def workers(environment: dict[str, str]) -> Iterator[tuple[Process, Process]]:  # noqa: F811
    found = Process(environment), Process(environment)
    try:
        found[0].run("User.objects.create(username='alice'); RatePolicy.objects.create(rates='20000/month')")
        for one in found:
            one.run(_SETUP)
        found[0].run(_HOLD)
        yield found
    finally:
        for one in found:
            one.close()


def test_a_killed_worker_bills_no_reservations(workers: tuple[Process, Process]) -> None:
    first, second = workers
    assert second.run(_STATE) == [7, 10_000, 10_007]
    first.signal(signal.SIGKILL)
    assert second.run(f"book.drop()\n{_STATE}") == [7, 10_000, 10_007], "for ten minutes it may live"
    assert second.run(_DROP + _STATE) == [7, 0, 7]
    assert second.run("answer = check_caller(user=user, cost=19_993).allowed")


def test_a_worker_that_was_suspended_bills_what_it_settles(workers: tuple[Process, Process]) -> None:
    first, second = workers
    first.signal(signal.SIGSTOP)
    try:
        assert second.run(_DROP + _STATE) == [7, 0, 7]
    finally:
        first.signal(signal.SIGCONT)
    first.run("for decision in held[:9]: decision.settle(30)\nspending.flush_all()")
    assert second.run(_STATE) == [277, 1000, 1277]
    first.run("held[9].__exit__()\nspending.flush_all()")
    assert second.run(_STATE) == [1277, 0, 1277]


_HEAR = """
import os
from django_ratequota.signals import quota_threshold
def hear(status, level, **_):
    with open(os.environ["HEARD"], "a") as file:
        file.write(f"{status.bucket.subject} {level}\\n")
quota_threshold.connect(hear)
users = [User.objects.create(username=f"u{n}") for n in range(25)]
RatePolicy.objects.create(rates="1000/month")
"""


@pytest.mark.parametrize("earlier", [0, 1, 24])
def test_a_process_that_ends_sends_the_notices_of_its_last_second(
    environment: dict[str, str],  # noqa: F811
    tmp_path: Path,
    earlier: int,
) -> None:
    """Of 25 customers at 100 %, a command had told two: the others were claimed in their rows, and never told."""
    heard = tmp_path / "heard"
    heard.touch()
    process = Process({**environment, "HEARD": str(heard)})
    process.run(_SETUP.replace("user = User.objects.get()", "") + _HEAR)
    spend = "for user in users[{}:{}]: check_caller(user=user, cost=1000)"
    process.run(spend.format(0, earlier))
    poll(lambda: heard.read_text().count("\n") == earlier, 30, "these are told")
    process.run(spend.format(earlier, 25))
    process.end()
    assert heard.read_text().count("\n") == 25
    process.close()
