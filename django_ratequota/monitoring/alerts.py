"""Sends the signal ``quota_threshold`` when a bucket reaches 80 % or 100 % of its limit: once per window and subject.

A process sends at most ``_MOST_SENT`` signals per second. Other crossings wait in a queue, or are only counted.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, NamedTuple

from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.dispatch import Signal
from django.utils.module_loading import import_string

from ..conf import settings
from ..engine.decision import Decision
from ..engine.keys import bucket_key, statistics_key
from ..engine.types import BucketStatus
from ..exceptions import StoreError
from ..runtime import default_limiter
from ..utils.bounded_cache import BoundedCache
from ..utils.locks import ForkSafeLock
from ..utils.problems import note_problem
from .background import Background

logger = logging.getLogger("django_ratequota")

#: Sent when a request left a bucket at 80 % or 100 % of its limit, or was refused by it: ``level`` (80 or 100),
#: ``status`` (the ``BucketStatus`` then), ``at`` (aware) and ``suppressed`` (crossings of the same limit that were
#: not sent since its last signal). Sent once per level, bucket and window, by the process that noticed first; about a
#: second later, on a thread, so that receivers delay no request.
quota_threshold = Signal()

_SECONDS = 1.0
#: Most signals that a process sends in ``_SECONDS``: a flood of subjects must not become a flood of mails.
_MOST_SENT = 10
#: Most crossings of one limit in the queue, most limits there, and most sent crossings remembered.
_MAX_OF_LIMIT, _MAX_LIMITS, _MAX_SENT = 100, 100, 10_000
#: A dropped crossing is queued again after this time, if the bucket is still at that level.
_RETRY_US = 60 * 10**6


class _Crossing(NamedTuple):
    level: int
    status: BucketStatus
    at_us: int


#: Crossings to send, by policy and name of its limit. Limits take turns, so that many subjects of one cannot hold up
#: those of another.
_queue: OrderedDict[tuple[int | None, str], deque[_Crossing]] = OrderedDict()
#: (counter, level) -> until when it counts as sent (µs, the store's clock).
_sent_until = BoundedCache[int](_MAX_SENT)
#: Crossings dropped since the limit's last signal, by the limit's name.
_suppressed: Counter[str] = Counter()
_lock = ForkSafeLock()


def observe(decision: Decision) -> None:
    """Queue signals for the buckets that a decision has left nearly used up, where receivers are connected."""
    if not quota_threshold.receivers or decision.degraded:
        return
    for status in decision.statuses:
        for level in levels_reached(status):
            _enqueue(_Crossing(level, status, decision.at_us))


def connect_receivers(*, setting: str = "RATEQUOTA", **_: object) -> None:
    """Connect what ``NOTIFY`` names, or nothing: without receivers no decision is looked at."""
    if setting != "RATEQUOTA":
        return
    raw = getattr(django_settings, "RATEQUOTA", None)  # our settings would import modules of the project at start
    wanted = isinstance(raw, Mapping) and raw.get("NOTIFY")
    (quota_threshold.connect if wanted else quota_threshold.disconnect)(_notify)


def _notify(**event: Any) -> None:
    for path in settings.notify:
        try:
            import_string(path)(**event)
        except Exception:
            logger.exception("%s, a receiver in RATEQUOTA['NOTIFY'], failed", path)


setting_changed.connect(connect_receivers, dispatch_uid="django_ratequota.alerts")


def levels_reached(status: BucketStatus) -> tuple[int, ...]:
    """Return the levels (%) that the bucket has reached."""
    # A cost above the capacity, which never fits, does not mean that the bucket is used up.
    if status.remaining == 0 or (not status.allowed and status.retry_after_us is not None):
        return (80, 100)
    return (80,) if status.remaining * 5 <= status.limit else ()


def _enqueue(crossing: _Crossing) -> None:
    level, status, at_us = crossing
    key, title = (*status.bucket.counter, level), status.bucket.title
    with _lock:
        if _sent_until.get(key, 0) > at_us:
            return
        sent_us = sent_for_us(status)
        limit = (status.bucket.policy_id, title)
        own = _queue.get(limit, deque())
        has_room = len(own) < _MAX_OF_LIMIT and (bool(own) or len(_queue) < _MAX_LIMITS)
        if has_room:
            own.append(crossing)
            _queue[limit] = own
        else:
            sent_us = min(sent_us, _RETRY_US)
            _suppressed[title] += 1
        _sent_until.put(key, at_us + sent_us)
    if not has_room:
        note_problem("quota_threshold", f"quota_threshold: crossings of {title} are not sent, too many at once")
    _background.keep()


def send() -> None:
    """Send the signal for at most ``_MOST_SENT`` queued crossings that no other process has sent."""
    for _ in range(_MOST_SENT):
        with _lock:
            if not _queue:
                return
            limit, own = _queue.popitem(last=False)
            crossing = own.popleft()
            if own:
                _queue[limit] = own
        if _claim(crossing):
            level, status, at_us = crossing
            with _lock:
                suppressed = _suppressed.pop(status.bucket.title, 0)
            at = datetime.fromtimestamp(at_us / 10**6, UTC)
            quota_threshold.send_robust(sender=None, level=level, status=status, at=at, suppressed=suppressed)


def _claim(crossing: _Crossing) -> bool:
    """Return whether no other process has sent it. True where Redis does not answer: twice is better than never."""
    try:
        limiter = default_limiter()
        name = blake2b(bucket_key(limiter.prefix, crossing.status.bucket).encode(), digest_size=12).hexdigest()
        key = statistics_key(limiter.prefix, f"alert:{name}:{crossing.level}")
        milliseconds = max(1, sent_for_us(crossing.status) // 1000)
        return bool(limiter.store.call().do(("SET", key, 1, "NX", "PX", milliseconds)))
    except StoreError:
        return True


def sent_for_us(status: BucketStatus) -> int:
    """Return how long a crossing counts as sent: to the end of a fixed window, else one period (µs)."""
    if status.bucket.rate.algorithm == "fixed_window":
        return status.reset_after_us
    return status.window_us


_background = Background("ratequota-alerts", lambda: _SECONDS, send)


def forget() -> None:
    """Drop what is queued and what was sent, as in a process that just started."""
    for crossings in (_queue, _sent_until, _suppressed):
        crossings.clear()


os.register_at_fork(after_in_child=forget)
