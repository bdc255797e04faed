"""Sends the signal ``quota_threshold`` when a bucket reaches 80 % or 100 % of its limit: once per window and subject.

A process sends at most ``_MOST_SENT`` signals per second. Other crossings wait in a queue, or are noticed later.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from hashlib import blake2b
from math import inf
from typing import Any, NamedTuple

from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.dispatch import Signal
from django.utils.module_loading import import_string

from ..conf import settings
from ..engine.decision import Decision
from ..engine.keys import statistics_key
from ..engine.types import BucketStatus
from ..exceptions import StoreError
from ..runtime import default_limiter, process
from ..store.base import Call
from ..utils import forks
from ..utils.bounded_cache import BoundedCache
from ..utils.problems import note_problem
from .workers import is_kept, receivers_worker, redis_worker

#: Sent when a request left a bucket at 80 % or 100 % of its limit: ``level`` (80 or 100), ``status`` (the
#: ``BucketStatus`` then), ``cost`` (what the request takes of the bucket, or was refused) and ``at`` (aware). Level
#: 100 with units that remain = from 80 % on, a request that costs more was refused. Sent once per level, limit,
#: bucket and window, by the process that noticed first; a second later, on a thread: receivers delay no request.
quota_threshold = Signal()

_SECONDS = 1.0
#: Most signals that a process sends in ``_SECONDS``: a flood of subjects must not become a flood of mails.
_MOST_SENT = 10
#: Most crossings of one limit in the queue, most limits there, and most sent crossings remembered.
_MAX_OF_LIMIT, _MAX_LIMITS, _MAX_SENT = 100, 100, 10_000
#: A dropped crossing is queued again after this time, if the bucket is still at that level.
_RETRY_US = 60 * 10**6


class Crossing(NamedTuple):
    """A level (%) that a request has brought a bucket to."""

    level: int
    status: BucketStatus
    #: What the request takes of the bucket, or was refused.
    cost: int
    at_us: int
    #: False = the request reached a higher level, too: this one only counts as sent.
    is_highest: bool = True

    @property
    def name(self) -> tuple[object, ...]:
        """What it is a crossing of, the same in every process; of a fixed window the end as well, to the minute."""
        status, bucket = self.status, self.status.bucket
        is_fixed = bucket.rate.algorithm == "fixed_window"
        ends = round((self.at_us + status.reset_after_us) / 60e6) if is_fixed else 0
        return (*bucket.counter, bucket.mode, status.limit, self.level, ends)

    @property
    def sent_for_us(self) -> int:
        """How long it counts as sent: to the end of a fixed window, else one period (µs)."""
        status = self.status
        return status.reset_after_us if status.bucket.rate.algorithm == "fixed_window" else status.window_us

    def send(self) -> None:
        """Send the signal."""
        level, status, cost, at_us, is_highest = self
        if is_highest:
            at = datetime.fromtimestamp(at_us / 10**6, UTC)
            quota_threshold.send_robust(sender=None, level=level, status=status, cost=cost, at=at)


#: Crossings to send, by policy and name of its limit. Limits take turns, so that many subjects of one cannot hold up
#: those of another.
_queue: OrderedDict[tuple[int | None, str], deque[Crossing]] = OrderedDict()
#: A crossing's name -> until when it counts as sent (µs, the store's clock).
_sent_until = BoundedCache[int](_MAX_SENT)
_lock = forks.lock()


def observe(decision: Decision, cost: int) -> None:
    """Queue signals for the buckets that a decision has left nearly used up, where receivers are connected."""
    if quota_threshold.receivers:
        for crossing in crossings(decision, cost):
            _enqueue(crossing)


def crossings(decision: Decision, cost: int) -> Iterator[Crossing]:
    """Yield the levels that the buckets of a decision have reached, for a request of ``cost`` units.

    Not those of limits that the database counts: they are judged there, without what is only reserved.
    """
    for status in () if decision.degraded else decision.statuses:
        levels = _levels_reached(status)
        if levels and status.bucket.durable and is_kept(process.limiter()):
            continue
        for level in levels:
            yield Crossing(level, status, status.bucket.rate.units(cost), decision.at_us, level == levels[-1])


def _levels_reached(status: BucketStatus) -> tuple[int, ...]:
    if status.remaining * 5 > status.limit or status.bucket.rate.concurrent:
        return ()
    if settings.notify_limits == "calendar" and not status.bucket.rate.calendar:
        return ()
    # A cost above the capacity, which never fits, does not mean that the bucket is used up.
    is_refused = not status.allowed and status.retry_after_us is not None
    return (80, 100) if is_refused or not status.remaining else (80,)


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
        except Exception as error:
            note_problem(path, f"{path}, a receiver in RATEQUOTA['NOTIFY'], failed", error)


setting_changed.connect(connect_receivers, dispatch_uid="django_ratequota.alerts")


def _enqueue(crossing: Crossing) -> None:
    name, title, at_us = crossing.name, crossing.status.bucket.title, crossing.at_us
    with _lock:
        if _sent_until.get(name, 0) > at_us:
            return
        sent_us = crossing.sent_for_us
        limit = (crossing.status.bucket.policy_id, title)
        own = _queue.get(limit, ())
        fits = len(own) < _MAX_OF_LIMIT and (bool(own) or len(_queue) < _MAX_LIMITS)
        if fits:
            _queue.setdefault(limit, deque()).append(crossing)
        else:
            sent_us = min(sent_us, _RETRY_US)
        _sent_until.put(name, at_us + sent_us)
    if not fits:
        note_problem("quota_threshold", f"quota_threshold: crossings of {title} are not sent, too many at once")
    _keep_workers()


def _keep_workers() -> None:
    redis_worker.keep()
    receivers_worker.keep()  # now, as a process that ends sends the rest on a thread that runs


def send_claimed(crossings: Iterable[Crossing]) -> None:
    """Queue crossings that nobody else sends."""
    for crossing in crossings:
        bucket = crossing.status.bucket
        with _lock:
            _queue.setdefault((bucket.policy_id, bucket.title), deque()).append(crossing)
    if _queue:
        _keep_workers()


def send() -> None:
    """Send the signal for at most ``_MOST_SENT`` queued crossings that no other process has sent."""
    claim()
    deliver()


def send_all() -> None:
    """Send the signal for all queued crossings, as the process ends."""
    deliver()
    while _queue:
        send()


def claim() -> None:
    """Have those delivered that no other process has claimed; none while receivers have not taken the last ones."""
    for _ in range(_MOST_SENT - len(delivering.given)):
        with _lock:
            if not _queue:
                return
            limit, own = _queue.popitem(last=False)
            crossing = own.popleft()
            if own:
                _queue[limit] = own
        if _claim(crossing):
            delivering.soon(crossing)


def deliver() -> None:
    """Send the signals that are claimed."""
    while delivering.given:
        delivering.given.popleft().send()


def _claim(crossing: Crossing) -> bool:
    """Return whether no other process has sent it. True where Redis does not answer: twice is better than never."""
    if crossing.status.bucket.durable and is_kept(process.limiter()):  # by its row
        return True
    try:
        limiter = default_limiter()
        key = statistics_key(limiter.prefix, f"alert:{digest(*crossing.name)}")
        milliseconds = max(1, crossing.sent_for_us // 1000)
        return bool(Call(limiter.store).do(("SET", key, 1, "NX", "PX", milliseconds)))
    except StoreError:
        return True


def digest(*name: object) -> str:
    """Return a short text of a name, the same in every process."""
    return blake2b(repr(name).encode(), digest_size=16).hexdigest()


@forks.after_fork
def forget() -> None:
    """Drop what is queued and what was sent, as in a process that just started."""
    _queue.clear()
    _sent_until.clear()


claiming = redis_worker.add("alerts", lambda: _SECONDS if _queue else 0.0, claim)
#: Receivers are the project's, and may wait for anything.
delivering = receivers_worker.add("receivers", lambda: inf, deliver, last=send_all)
