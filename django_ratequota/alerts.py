"""Tells when a bucket is nearly, or quite, used up: the signal ``quota_threshold``, once a window and subject."""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from datetime import UTC, datetime
from hashlib import blake2b
from typing import NamedTuple

from django.dispatch import Signal

from .background import Background
from .exceptions import StoreError
from .keys import bucket_key, statistics_key
from .limiter import default_limiter
from .locks import ForkSafeLock
from .types import BucketStatus, Decision

#: Sent when a request left a bucket at 80 % or 100 % of its limit, or was refused by it: ``level`` (80 or 100),
#: ``status`` (the ``BucketStatus`` then) and ``at`` (aware). Once for each level, bucket and window, whichever
#: process noticed; about a second later, on a thread of that process, so that receivers delay no request.
quota_threshold = Signal()

_SECONDS = 1.0
#: Crossings that wait to be told; those beyond it are not. Crossings known to be told, the most recent.
_MAX_WAITING, _MAX_TOLD = 1_000, 10_000


class _Crossing(NamedTuple):
    level: int
    status: BucketStatus
    at_us: int


_waiting: deque[_Crossing] = deque()
#: (counter, level) -> until when it is told (µs, the store's clock).
_told: OrderedDict[tuple[object, ...], int] = OrderedDict()
_lock = ForkSafeLock()


def watch(decision: Decision) -> None:
    """Note the buckets that a decision has left nearly used up, where anybody listens."""
    if not quota_threshold.receivers or decision.degraded:
        return
    for status in decision.statuses:
        levels = crossed(status)
        if levels:
            _note(status, levels, decision.at_us)


def crossed(status: BucketStatus) -> tuple[int, ...]:
    """The levels (%) at which the bucket stands, or that it is above."""
    if _is_full(status):
        return (80, 100)
    return (80,) if status.remaining * 5 <= status.limit else ()


def _is_full(status: BucketStatus) -> bool:
    """Whether it has no room for this request; a cost above its capacity says nothing about what is used."""
    return status.remaining == 0 or (not status.allowed and status.retry_after_us is not None)


def _note(status: BucketStatus, levels: tuple[int, ...], at_us: int) -> None:
    for level in levels:
        key = (*status.bucket.counter, level)
        with _lock:
            if _told.get(key, 0) > at_us or len(_waiting) >= _MAX_WAITING:
                continue
            _told[key] = at_us + told_us(status)
            _told.move_to_end(key)
            if len(_told) > _MAX_TOLD:
                _told.popitem(last=False)
            _waiting.append(_Crossing(level, status, at_us))
    _background.keep()


def tell() -> None:
    """Send the signal for each crossing noted that no other process has told."""
    while _waiting:
        crossing = _waiting.popleft()
        if _first(crossing):
            at = datetime.fromtimestamp(crossing.at_us / 10**6, UTC)
            quota_threshold.send_robust(sender=None, level=crossing.level, status=crossing.status, at=at)


def _first(crossing: _Crossing) -> bool:
    """Whether this process is the first to tell; where Redis cannot say, twice is better than never."""
    try:
        limiter = default_limiter()
        name = blake2b(bucket_key(limiter.prefix, crossing.status.bucket).encode(), digest_size=12).hexdigest()
        key = statistics_key(limiter.prefix, f"told:{name}:{crossing.level}")
        milliseconds = max(1, told_us(crossing.status) // 1000)
        return bool(limiter.store.call().do(("SET", key, 1, "NX", "PX", milliseconds)))
    except StoreError:
        return True


def told_us(status: BucketStatus) -> int:
    """How long a crossing counts as told: to the end of the window where there is one, else a period."""
    if status.bucket.rate.algorithm == "fixed_window":
        return status.reset_after_us
    return status.window_us


_background = Background("ratequota-alerts", lambda: _SECONDS, tell)


def _forget() -> None:
    _waiting.clear()
    _told.clear()


os.register_at_fork(after_in_child=_forget)
