"""Checkpoints: what calendar windows have used, kept in the database for when Redis loses it.

Requests only note the newest figure of each counter. A thread writes them every CHECKPOINT_SECONDS. Newer figures
raise a row, and only a refund or a reset lowers it: so processes cannot lower each other's, nor can a Redis that has
lost its data. Such a Redis is noticed by figures that stay below their row's, and published as lost.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import tzinfo

from django.core import mail
from django.db import InterfaceError, OperationalError

from ..conf import settings
from ..engine.calendar_windows import calendar_window
from ..engine.decision import Decision
from ..engine.keys import bucket_key
from ..engine.limiter import Limiter
from ..engine.types import Bucket
from ..policies.facts import to_datetime
from ..runtime import default_limiter
from ..utils.locks import ForkSafeLock
from ..utils.problems import note_problem
from .background import Background
from .checkpoint_rows import Figure, Window, batches, write

logger = logging.getLogger("django_ratequota")

#: As ``lowered``: whatever was used.
ALL = float("inf")
_MINUTE_US = 60 * 10**6
#: Most counters with a figure that is not written yet. While the database is down, the oldest are forgotten.
_MOST = 100_000
#: Rows of a statement.
_BATCH = 500
#: Batches in a row that the database does not answer until the rest waits for the next checkpoint.
_FAILURES = 3
#: A bucket and the end of its window (minutes since the Unix epoch; 0 = nothing is used), and what it has used.
Noted = tuple[tuple[Bucket, int], Figure]
#: The newest figures.
_dirty: OrderedDict[tuple[Bucket, int], Figure] = OrderedDict()
#: Windows whose figure was below their row's -> since when (monotonic seconds).
_suspects: dict[Window, float] = {}
_lock = ForkSafeLock()
_write_lock = ForkSafeLock()
#: What was noted before this time (monotonic seconds) is in the database; None before the first checkpoint.
_written_at: float | None = None


def note(decision: Decision, *, lowered: float = 0) -> None:
    """Note what a decision's durable counters have used; ``lowered`` are the units that it gave back."""
    if not (decision.allowed or lowered) or decision.degraded or not settings.checkpoint_seconds or in_test_run():
        return
    at_us = decision.at_us
    for status in decision.statuses:
        if status.bucket.durable:
            # Two clocks of a Cluster name one end.
            end = (at_us + status.reset_after_us + _MINUTE_US // 2) // _MINUTE_US
            _keep((status.bucket, end if status.reset_after_us else 0), Figure(status, at_us, lowered))
    _background.keep()


def in_test_run() -> bool:
    """Whether Django's test environment is set up: then a thread would write past the test's transaction."""
    return hasattr(mail, "outbox")


def _keep(key: tuple[Bucket, int], figure: Figure) -> None:
    with _lock:
        known = _dirty.get(key)
        if known is not None and known.at_us > figure.at_us:
            figure = replace(known, lowered=known.lowered + figure.lowered)
        elif known is not None and known.lowered:
            figure = replace(figure, lowered=_lowered(known, figure))
        _dirty[key] = figure
        if len(_dirty) > _MOST:
            _dirty.popitem(last=False)


def _lowered(known: Figure, newer: Figure) -> float:
    """Return by how much both refunds together can have lowered the count below a row.

    Less than what they gave back, where units were charged in between: they made up for the first refund.
    """
    if ALL in (known.lowered, newer.lowered):
        return ALL
    charged = max(0, newer.used + newer.lowered - known.used)
    return max(0, known.lowered - charged) + newer.lowered


def flush() -> int:
    """Write the noted figures; returns how many rows changed. What cannot be written now is kept."""
    return _checkpoint()[0]


def flush_all() -> bool:
    """Write the noted figures, those that another thread is writing included; returns whether all are written."""
    with _write_lock:
        pass
    return _checkpoint()[1]


def age() -> float | None:
    """Return the seconds since the last checkpoint, 0 while no figure waits for the next; None before the first."""
    if _written_at is None:
        return None
    return time.monotonic() - _written_at if _dirty else 0.0


def _checkpoint() -> tuple[int, bool]:
    global _dirty, _written_at
    if not _dirty:
        return 0, True  # no limiter is made where nothing is counted, as in most commands
    began_at = time.monotonic()
    if _written_at is None:
        _written_at = began_at
    limiter = default_limiter()
    with _write_lock:
        with _lock:  # no copy, as requests wait for the lock
            noted, _dirty = _dirty, OrderedDict()
        written, complete = _flush(limiter, noted)
    if complete:
        _written_at = began_at
    return written, complete


def write_now(buckets: Iterable[Bucket]) -> None:
    """Write the figures at once, after operators lowered those of ``buckets``.

    Where processes may hold seeds of them, publish a revision: all read these again. Raises ``StoreError``.
    """
    if not settings.checkpoint_seconds or in_test_run():
        return
    flush()
    limiter = default_limiter()
    starts = (window_of(bucket, limiter.now_us, limiter.time_zone)[1] for bucket in buckets)
    if not limiter.born_us or any(start_us < limiter.born_us for start_us in starts):
        limiter.publish()


def _flush(limiter: Limiter, noted: Mapping[tuple[Bucket, int], Figure]) -> tuple[int, bool]:
    """Write the figures; returns how many rows changed, and whether all figures could be written."""
    latest: dict[Window, Noted] = {}
    for (bucket, end), figure in noted.items():
        inside_us = end * _MINUTE_US - figure.status.window_us // 2 if end else figure.at_us
        window = window_of(bucket, inside_us, limiter.time_zone)
        newest, known = ((bucket, end), figure), latest.get(window)
        if known is not None:  # several policies share the counter: the last one stays
            lowered = figure.lowered + known[1].lowered
            key, last = known if known[1].at_us > figure.at_us else newest
            newest = key, replace(last, lowered=lowered) if lowered else last
        latest[window] = newest
    waited = set(_suspects)

    def is_loss(window: Window, at_us: int) -> bool:
        # At first, another process's refund may not be written yet: its figure would undo what is lowered here.
        return window in waited or not limiter.born_us or at_us <= limiter.born_us

    written, complete, below, failed = 0, True, dict[Window, int](), 0
    for windows in batches(latest, _BATCH):
        batch = {window: latest[window][1] for window in windows}
        try:
            if failed < _FAILURES:
                written += write(batch, below, is_loss)
                failed = 0
                continue
        except Exception as error:
            # Each may take a timeout. Other errors, such as of one row, must not keep the rest from being written.
            failed += isinstance(error, OperationalError | InterfaceError)
            note_problem("checkpoints", f"checkpoints cannot be written, they are tried again: {error}")
        complete = False
        for window in batch:
            _keep(*latest[window])
    for window, at_us in below.items():
        if is_loss(window, at_us):
            latest[window] = latest[window][0], replace(latest[window][1], lowered=0)
    _look_for_losses(limiter, below, latest)
    return written, complete


def counter_name(bucket: Bucket) -> str:
    """Return the name of the bucket's counter in the database: its key without the prefix."""
    return bucket_key("", bucket)[1:]


def window_of(bucket: Bucket, at_us: int, zone: tzinfo) -> Window:
    """Return the bucket's calendar window around ``at_us``."""
    return counter_name(bucket), window_start(bucket, at_us, zone)


def window_start(bucket: Bucket, at_us: int, zone: tzinfo) -> int:
    """Return when the bucket's calendar window around ``at_us`` began (µs)."""
    return calendar_window(bucket.rate.calendar or "day", at_us, zone, bucket.anchor)[0]


def _look_for_losses(limiter: Limiter, below: Mapping[Window, int], noted: Mapping[Window, Noted]) -> None:
    """Tell all processes that Redis has lost counts, where a figure stays below its row's for CHECKPOINT_SECONDS.

    Until then another process's refund may not be written yet: the figure is kept, and compared again.
    """
    now, lost = time.monotonic(), []
    for window in noted.keys() & _suspects.keys() - below.keys():
        del _suspects[window]
    for window, at_us in below.items():
        if now - _suspects.setdefault(window, now) < settings.checkpoint_seconds:
            _keep(*noted[window])
            continue
        del _suspects[window]
        if limiter.born_us < at_us:
            lost.append(window)
    if lost:
        counter, start_us = lost[0]
        text = "Redis has lost counts, such as %s since %s: they are restored from their checkpoints"
        logger.error(text, counter, to_datetime(start_us))
        limiter.publish(lost=True)


def flush_at_exit() -> bool:
    """Write the last checkpoint; returns whether all of it is in the database."""
    try:
        return flush_all()
    except Exception:
        logger.exception("the last checkpoint failed")
        return False


def forget() -> None:
    """Drop the figures that are not written yet, as in a process that just started."""
    global _written_at
    _written_at = None
    _dirty.clear()
    _suspects.clear()


_background = Background("ratequota-checkpoints", lambda: settings.checkpoint_seconds, flush)
atexit.register(flush_at_exit)
os.register_at_fork(after_in_child=forget)
