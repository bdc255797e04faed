"""Workers that are killed or suspended while they hold reservations, as real processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.enforcement.test_propagation import environment, migrated  # noqa: F401 - fixtures
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
