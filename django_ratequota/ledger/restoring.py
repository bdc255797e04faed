"""Restores counts that Redis has lost, before a request is counted: from the ledger, on demand.

A check that finds no key of a durable counter counts nothing. ``restore`` raises the counter to its row and to what
this process has not written yet, and the check is sent again. One thread reads for all that wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Generator, Sequence
from concurrent.futures import Future, wait
from math import inf
from typing import Any

from django.db import Error as DatabaseError

from ..changes.databases import policy_alias, read_from
from ..conf import settings
from ..engine.calendar_windows import CalendarWindow
from ..engine.decision import Decision, LimitRequest
from ..engine.keys import counter_name
from ..engine.limiter import Limiter
from ..engine.protocol import Raised
from ..engine.types import Bucket
from ..monitoring.workers import database_worker, is_kept
from ..runtime import default_limiter
from ..store.base import Call
from ..utils.problems import note_problem
from ..utils.sansio import Twins, drive
from ..utils.sansio import call as call_twin
from .book import ledger, window_of
from .rows import Row, Window, model_of, rows_of

_Found = dict[Window, Row]


def restore(buckets: Sequence[Bucket], at_us: int) -> Generator[Any, Any, None]:
    """Return the steps that raise durable counters to their rows, in the windows around ``at_us``.

    Where the database does not answer in time, Redis counts on without them.
    """
    limiter = default_limiter()
    zone, bounds = limiter.time_zone, dict[Window, CalendarWindow]()
    for bucket in buckets:
        if bucket.durable:
            around = window_of(bucket, at_us, zone)
            bounds[counter_name(bucket), around.first_day] = around
    why = "too slow"
    try:
        rows: _Found | None = yield Twins(_wait, _await, (_read(bounds),))
    except DatabaseError as error:
        rows, why = None, str(error)
    if rows is None:
        note_problem("restoring", f"what Redis has lost could not be read from the ledger: {why}")
        return
    # A counter without a row is written as 0, so that its next request need not look.
    raised: Raised = {window: rows.get(window, Row()).due(around.ends_us) for window, around in bounds.items()}
    yield from limiter.backend.raise_counters(raised)


def peek(limiter: Limiter, call: Call, buckets: Sequence[Bucket]) -> Decision:
    """Return the state of the buckets, with what is to be restored; raises as ``Limiter.peek`` does."""
    restored = restore if is_kept(limiter) else None
    steps = limiter.ask(LimitRequest(mode="peek", buckets=buckets, restore=restored))
    return drive(steps, lambda step: call_twin(step) if isinstance(step, Twins) else call.do(step))


def _wait(rows: Future[_Found]) -> _Found | None:
    """Return the rows, or None where they are not read in time: a ``TimeoutError`` may be a signal handler's."""
    return rows.result() if wait([rows], settings.timeout).done else None


async def _await(rows: Future[_Found]) -> _Found | None:
    future = asyncio.wrap_future(rows)
    done, _ = await asyncio.wait([future], timeout=settings.timeout)
    return future.result() if done or not future.cancel() else None


def _read(windows: Collection[Window]) -> Future[_Found]:
    """Return the totals of the windows, once they are read: of the rows, and what this process is to add to them."""
    future: Future[_Found] = Future()
    database_worker.keep()
    _restoring.soon((windows, future))
    return future


def _rows_and_own(windows: Collection[Window]) -> _Found:
    """Return the rows with what this process is to add to them.

    It is the thread that writes the rows, as a batch between the two would be in neither.
    """
    found = rows_of(windows)
    for window, own in ledger.unwritten(windows, default_limiter().time_zone).items():
        row = found.get(window, Row())
        found[window] = Row(row.charged + own.charged, row.refunded + own.refunded, row.held + own.held)
    return found


def _read_all() -> None:
    """Read the rows for all requests that wait."""
    waiting = [_restoring.given.popleft() for _ in range(len(_restoring.given))]
    # Without those whose task was cancelled.
    asked = {future: windows for windows, future in waiting if future.set_running_or_notify_cancel()}
    if not asked:
        return
    try:
        windows = set().union(*asked.values())
        # The thread's connection may have been idle for days.
        found = read_from(policy_alias(model_of("QuotaWindow")), lambda: _rows_and_own(windows))
    except DatabaseError as error:
        for future in asked:
            future.set_exception(error)
    else:
        for future in asked:
            future.set_result(found)


_restoring = database_worker.add("restore", lambda: inf, _read_all, last=_read_all)
