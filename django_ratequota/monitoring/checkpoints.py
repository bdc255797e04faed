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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import tzinfo
from typing import Any

from django.apps import apps
from django.core import mail
from django.db import transaction

from ..conf import settings
from ..engine.calendar_windows import calendar_window
from ..engine.decision import Decision
from ..engine.keys import bucket_key, short
from ..engine.limiter import Limiter
from ..engine.types import Bucket, BucketStatus
from ..policies.facts import to_datetime, to_us
from ..recording.databases import policy_alias
from ..runtime import default_limiter
from ..utils.locks import ForkSafeLock
from ..utils.problems import note_problem
from .background import Background
from .months import end_months

logger = logging.getLogger("django_ratequota")

#: As ``lowered``: whatever was used.
ALL = float("inf")
_MINUTE_US = 60 * 10**6
#: Most counters with a figure that is not written yet. While the database is down, the oldest are forgotten.
_MOST = 100_000
#: Rows of a statement.
_BATCH = 500
#: A counter's name in the database, and the start of its window (µs).
Window = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Figure:
    """What a counter has used."""

    status: BucketStatus
    #: Redis' time then (µs).
    at_us: int
    #: Units given back since the last checkpoint; ``ALL`` after a reset.
    lowered: float

    @property
    def used(self) -> int:
        """Units used, debts included."""
        return self.status.used + self.status.debt


#: A bucket and the end of its window (minutes since the Unix epoch; 0 = nothing is used), and what it has used.
Noted = tuple[tuple[Bucket, int], Figure]
#: The newest figures.
_dirty: OrderedDict[tuple[Bucket, int], Figure] = OrderedDict()
#: Windows whose figure was below their row's -> since when (monotonic seconds).
_suspects: dict[Window, float] = {}
_lock = ForkSafeLock()
_write_lock = ForkSafeLock()


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
            figure = replace(figure, lowered=known.lowered + figure.lowered)
        _dirty[key] = figure
        if len(_dirty) > _MOST:
            _dirty.popitem(last=False)


def flush() -> int:
    """Write the noted figures; returns how many rows changed. What cannot be written now is kept."""
    if not _dirty:
        return 0  # no limiter is made where nothing is counted, as in most commands
    limiter = default_limiter()
    with _write_lock:
        with _lock:
            noted = dict(_dirty)
            _dirty.clear()
        return _flush(limiter, noted)


def write_now(buckets: Iterable[Bucket]) -> None:
    """Write the figures at once, after operators lowered those of ``buckets``.

    Where processes may hold seeds of them, make all read these again. Raises ``StoreError``.
    """
    if not settings.checkpoint_seconds or in_test_run():
        return
    flush()
    limiter = default_limiter()
    starts = (window_of(bucket, limiter.now_us, limiter.time_zone)[1] for bucket in buckets)
    if not limiter.born_us or any(start_us < limiter.born_us for start_us in starts):
        limiter.publish(lost=True)


def _flush(limiter: Limiter, noted: Mapping[tuple[Bucket, int], Figure]) -> int:
    latest: dict[Window, Noted] = {}
    # By time, so that of several policies that share a counter the last one stays.
    for (bucket, end), figure in sorted(noted.items(), key=lambda item: item[1].at_us):
        inside_us = end * _MINUTE_US - figure.status.window_us // 2 if end else figure.at_us
        window = window_of(bucket, inside_us, limiter.time_zone)
        lowered = figure.lowered + (latest[window][1].lowered if window in latest else 0)
        latest[window] = (bucket, end), replace(figure, lowered=lowered)
    written, below = 0, dict[Window, int]()
    windows = sorted(latest)  # in one order, so that processes wait for each other's rows instead of deadlocking
    for at in range(0, len(windows), _BATCH):
        batch = {window: latest[window][1] for window in windows[at : at + _BATCH]}
        lower: dict[Window, int] = {}
        try:
            with transaction.atomic(using=policy_alias(_model())):
                written += _write(batch, lower)
        except Exception as error:
            for window in batch:
                _keep(*latest[window])
            note_problem("checkpoints", f"checkpoints cannot be written, they are tried again: {error}")
        else:
            below |= lower
    _look_for_losses(limiter, below, latest)
    return written


def _write(figures: Mapping[Window, Figure], below: dict[Window, int]) -> int:
    """Write a batch of figures; add to ``below`` those that are lower than their row's, with the row's time."""
    written, missing, named = 0, figures, dict[Window, Window]()
    for _ in range(2):  # another process may insert the same rows
        found = set()
        changed = []
        for row in _rows(missing).order_by("pk").select_for_update():
            window = row.counter, to_us(row.starts_at)
            figure = missing.get(window)
            if figure is None or figure.at_us >= to_us(row.ends_at):
                continue
            found.add(window)
            if figure.at_us <= row.at_us:
                continue
            if figure.used < row.used - figure.lowered:
                below[named.get(window, window)] = row.at_us
                if figure.lowered:  # of a counter that Redis may have lost, only that is known
                    row.used -= int(figure.lowered)
                    row.percent = row.used * 100 // row.limit
                    changed.append(row)
                continue
            for name, value in _values(figure).items():
                setattr(row, name, value)
            changed.append(row)
        _model().objects.bulk_update(changed, ["used", "limit", "percent", "at_us", "policy_id", "rate"])
        missing = {window: figure for window, figure in missing.items() if window not in found}
        written += len(changed)
        if not missing:
            break
        instead = end_months(_model().objects, missing)
        rows = [_row(*item) for item in missing.items() if item[0] not in instead]
        _model().objects.bulk_create(rows, ignore_conflicts=True)
        written += len(rows)
        missing = {instead.get(window, window): figure for window, figure in missing.items()}
        named = {new: window for window, new in instead.items()}
    return written


def _model() -> Any:
    # Not imported above, because check_request can be imported before Django is set up.
    return apps.get_model("django_ratequota", "QuotaWindow")


def _rows(windows: Iterable[Window]) -> Any:
    starts = {to_datetime(start_us) for _, start_us in windows}
    return _model().objects.filter(counter__in=[counter for counter, _ in windows], starts_at__in=starts)


def used_in(windows: Sequence[Window]) -> dict[Window, int]:
    """Return what the windows have used by their checkpoints; those without one are left out.

    Of a month that began on another day than it would now, its row is the newest one that began in the window.
    """
    counters = [counter for counter, _ in windows]
    since = to_datetime(min(start_us for _, start_us in windows))
    rows = _model().objects.filter(counter__in=counters, starts_at__gte=since).order_by("starts_at")
    newest = {counter: row for counter, *row in rows.values_list("counter", "starts_at", "used")}
    found = ((window, newest.get(window[0])) for window in windows)
    return {window: row[1] for window, row in found if row and to_us(row[0]) >= window[1]}


def _row(window: Window, figure: Figure) -> Any:
    status = figure.status
    bucket = status.bucket
    return _model()(
        counter=window[0],
        starts_at=to_datetime(window[1]),
        ends_at=to_datetime(window[1] + status.window_us),
        period=bucket.rate.calendar,
        subject=short(_storable(bucket.subject)),
        endpoint_id=bucket.endpoint_id,
        **_values(figure),
    )


def _storable(text: str) -> str:
    """Return the text without what databases refuse: lone surrogates and NUL."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def _values(figure: Figure) -> dict[str, Any]:
    bucket = figure.status.bucket
    return {
        "used": figure.used,
        "limit": figure.status.limit,
        "percent": figure.used * 100 // figure.status.limit,
        "at_us": figure.at_us,
        "policy_id": bucket.policy_id,
        "rate": str(bucket.rate),
    }


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
            key, figure = noted[window]
            _keep(key, replace(figure, lowered=0))
            continue
        del _suspects[window]
        if limiter.born_us < at_us:
            lost.append(window)
    if lost:
        counter, start_us = lost[0]
        text = "Redis has lost counts, such as %s since %s: they are restored from their checkpoints"
        logger.error(text, counter, to_datetime(start_us))
        limiter.publish(lost=True)


def _flush_at_exit() -> None:
    try:
        flush()
    except Exception:
        logger.exception("the last checkpoint failed")


def _forget() -> None:
    _dirty.clear()
    _suspects.clear()


_background = Background("ratequota-checkpoints", lambda: settings.checkpoint_seconds, flush)
atexit.register(_flush_at_exit)
os.register_at_fork(after_in_child=_forget)
