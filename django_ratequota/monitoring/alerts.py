"""Sends the signal ``quota_threshold`` when a bucket is nearly, or quite, used up: once per window and subject.

At most ``_MOST_SENT`` signals per second and process. Other crossings wait, or are only counted.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, OrderedDict, deque
from datetime import UTC, datetime
from hashlib import blake2b
from typing import NamedTuple

from django.dispatch import Signal

from ..engine.keys import bucket_key, statistics_key
from ..engine.types import BucketStatus, Decision
from ..exceptions import StoreError
from ..runtime import default_limiter, process
from ..utils.locks import ForkSafeLock
from .background import Background

logger = logging.getLogger("django_ratequota")

#: Sent when a request left a bucket at 80 % or 100 % of its limit, or was refused by it: ``level`` (80 or 100),
#: ``status`` (the ``BucketStatus`` then), ``at`` (aware) and ``suppressed`` (crossings of the same limit that were
#: not sent since its last signal). Once for each level, bucket and window, whichever process noticed; about a second
#: later, on a thread of that process, so that receivers delay no request.
quota_threshold = Signal()

_SECONDS = 1.0
#: Most signals that a process sends in ``_SECONDS``: a flood of subjects must not become a flood of mails.
_MOST_SENT = 10
#: Most crossings of one limit that wait, most that wait in all, and most sent crossings remembered (the oldest go).
_MAX_OF_ONE, _MAX_WAITING, _MAX_TOLD = 100, 1_000, 10_000
#: A crossing that was left out is noted again after this time, if it is still there.
_AGAIN_US = 60 * 10**6
_LOG_SECONDS = 60.0


class _Crossing(NamedTuple):
    level: int
    status: BucketStatus
    at_us: int


#: A policy and the name of its limit.
_Limit = tuple[int | None, str]

#: Crossings to send, by limit; limits take turns, so that subjects of one limit cannot hide those of another.
_waiting: OrderedDict[_Limit, deque[_Crossing]] = OrderedDict()
#: (counter, level) -> until when it counts as sent (µs, the store's clock).
_told: OrderedDict[tuple[object, ...], int] = OrderedDict()
#: Crossings left out since the limit's last signal, and since the last line in the log, by the limit's name.
_suppressed: Counter[str] = Counter()
_unlogged: Counter[str] = Counter()
_log_at = 0.0
_lock = ForkSafeLock()


def watch(decision: Decision) -> None:
    """Note the buckets that a decision has left nearly used up, where anybody listens."""
    if not quota_threshold.receivers or decision.degraded:
        return
    for status in decision.statuses:
        levels = crossed(status)
        if levels:
            _note(status, levels, decision.at_us)


process.observe = watch


def crossed(status: BucketStatus) -> tuple[int, ...]:
    """The levels (%) at which the bucket stands, or that it is above."""
    if _is_full(status):
        return (80, 100)
    return (80,) if status.remaining * 5 <= status.limit else ()


def _is_full(status: BucketStatus) -> bool:
    """Whether it has no room for this request; a cost above its capacity says nothing about what is used."""
    return status.remaining == 0 or (not status.allowed and status.retry_after_us is not None)


def _note(status: BucketStatus, levels: tuple[int, ...], at_us: int) -> None:
    limit = (status.bucket.policy_id, status.bucket.title)
    for level in levels:
        key = (*status.bucket.counter, level)
        with _lock:
            if _told.get(key, 0) > at_us:
                continue
            lasts = told_us(status)
            if _has_room(limit):
                _waiting.setdefault(limit, deque()).append(_Crossing(level, status, at_us))
            else:
                lasts = min(lasts, _AGAIN_US)
                _leave_out(status.bucket.title)
            _told[key] = at_us + lasts
            _told.move_to_end(key)
            if len(_told) > _MAX_TOLD:
                _told.popitem(last=False)
    _background.keep()


def _has_room(limit: _Limit) -> bool:
    """Whether one more crossing of the limit may wait: a limit without any has room where busy ones have none."""
    own = len(_waiting.get(limit, ()))
    return own < _MAX_OF_ONE and sum(map(len, _waiting.values())) < (_MAX_WAITING if own else 2 * _MAX_WAITING)


def _leave_out(title: str) -> None:
    for counts in (_suppressed, _unlogged):
        if title in counts or len(counts) < _MAX_WAITING:
            counts[title] += 1


def tell() -> None:
    """Send the signal for noted crossings that no other process has sent, ``_MOST_SENT`` at most."""
    for _ in range(_MOST_SENT):
        crossing = _next()
        if crossing is None:
            break
        if _first(crossing):
            at = datetime.fromtimestamp(crossing.at_us / 10**6, UTC)
            with _lock:
                suppressed = _suppressed.pop(crossing.status.bucket.title, 0)
            quota_threshold.send_robust(
                sender=None, level=crossing.level, status=crossing.status, at=at, suppressed=suppressed
            )
    _log_left_out()


def _next() -> _Crossing | None:
    """Take the oldest crossing of the limit whose turn it is."""
    with _lock:
        if not _waiting:
            return None
        limit, own = _waiting.popitem(last=False)
        crossing = own.popleft()
        if own:
            _waiting[limit] = own
        return crossing


def _log_left_out() -> None:
    """Log once a minute how many crossings were left out, and of which limits most."""
    global _log_at
    with _lock:
        if not _unlogged or time.monotonic() < _log_at:
            return
        _log_at = time.monotonic() + _LOG_SECONDS
        left_out, most = _unlogged.total(), _unlogged.most_common(3)
        _unlogged.clear()
    limits = ", ".join(f"{title}: {count}" for title, count in most)
    logger.warning("quota_threshold: %d crossings were not sent, too many at once (%s)", left_out, limits)


def _first(crossing: _Crossing) -> bool:
    """Whether no other process has sent it. True where Redis does not answer: twice is better than never."""
    try:
        limiter = default_limiter()
        name = blake2b(bucket_key(limiter.prefix, crossing.status.bucket).encode(), digest_size=12).hexdigest()
        key = statistics_key(limiter.prefix, f"told:{name}:{crossing.level}")
        milliseconds = max(1, told_us(crossing.status) // 1000)
        return bool(limiter.store.call().do(("SET", key, 1, "NX", "PX", milliseconds)))
    except StoreError:
        return True


def told_us(status: BucketStatus) -> int:
    """How long a crossing counts as sent: to the end of the window where there is one, else a period."""
    if status.bucket.rate.algorithm == "fixed_window":
        return status.reset_after_us
    return status.window_us


_background = Background("ratequota-alerts", lambda: _SECONDS, tell)


def _forget() -> None:
    global _log_at
    for noted in (_waiting, _told, _suppressed, _unlogged):
        noted.clear()
    _log_at = 0.0


os.register_at_fork(after_in_child=_forget)
