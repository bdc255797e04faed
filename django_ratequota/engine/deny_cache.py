"""Remembers recent refusals, so that repeating one costs no round trip.

A refused request changes nothing, and until its ``retry_after`` only a refund, a reset or an edit could admit it. So
this process repeats the refusal, with its times counted down, for a bounded while. The cache never admits anything.

Times are in µs by one clock: the injected one, or this process's monotonic clock. A cached refusal expires
``retry_after`` after the request was *sent* to Redis, so it is never kept too long. Retry-After is counted from when
the reply *arrived*, so repeated refusals all name the same moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..exceptions import NewerRevision
from ..utils import forks
from .decision import Decision, LimitRequest, Link, Steps
from .types import Bucket, BucketStatus

#: Most refusals kept, 1 to 2 KiB each, and most places with changes; then all are forgotten.
SIZE = 10_000


class _Denial(NamedTuple):
    """A refusal by Redis."""

    statuses: tuple[BucketStatus, ...]
    #: The store's clock at the refusal.
    at_us: int
    received_us: int
    #: When it expires: ``seconds`` after it was sent, or before that when one of its buckets has room again.
    until_us: int
    #: The number of changes when it was sent.
    version: int
    #: The ``_place`` of each bucket without room.
    places: set[object]


class DenyCache:
    """A link of a limiter's chain: repeats this process's refusals, by buckets and rates, cost and revision."""

    def __init__(self, below: Link, seconds: float, clock: Callable[[], int] | None = None, size: int = SIZE) -> None:
        """``seconds`` is how long a refusal is repeated at most; 0 = not at all."""
        self._below = below
        self.enabled = seconds > 0
        self._lifetime_us = int(seconds * 10**6)
        self._clock = clock or _monotonic_us
        self._size = size
        self._denials: dict[object, _Denial] = {}
        # Place -> the last change there, for places with refusals or refunds. A refusal that was sent before that
        # change is ignored.
        self._changes: dict[object, int] = {}
        self._version = 0
        # Refusals that were sent before this change are ignored at all places.
        self._cleared = 0
        self._lock = forks.lock()

    def __len__(self) -> int:
        return len(self._denials)

    def ask(self, request: LimitRequest) -> Steps:
        known = self._repeated(request) if request.buckets and request.mode == "check" else None
        if known is not None:
            return known
        version, sent_us = self._version, self._clock()
        try:
            decision = yield from self._below.ask(request)
        except NewerRevision:
            self.clear()
            raise
        finally:
            if request.mode == "refund":  # failed or not, as a lost reply does not tell
                self.freed(request.buckets)
        if request.buckets:
            self._learn(request, decision, version, sent_us)
        return decision

    def _learn(self, request: LimitRequest, decision: Decision, version: int, sent_us: int) -> None:
        """Keep a refusal by Redis; ``version`` is the number of changes when the request was sent."""
        if decision.allowed:
            if self._changes and request.mode != "peek":
                charged = [bucket for bucket in request.buckets if _place(bucket) in self._changes]
                if charged:  # the waits of the refusals by these have grown
                    self.freed(charged)
            return
        if request.mode != "check" or len(decision.statuses) != len(request.buckets):
            return  # fewer statuses: on a Cluster, where a server failed after the refusal
        # Those in log mode too: once one has room again, the reply is another.
        full = [status for status in decision.statuses if not status.allowed]
        if any(status.bucket.rate.concurrent for status in full):
            return  # a slot may be released at any moment
        waits = [status.retry_after_us for status in full if status.retry_after_us is not None]
        until_us = sent_us + min([self._lifetime_us, *waits])
        places = {_place(status.bucket) for status in full}
        denial = _Denial(decision.statuses, decision.at_us, self._clock(), until_us, version, places)
        with self._lock:
            if version < self._cleared:
                return
            self._denials[_key(request)] = denial
            for place in places:  # a change since it was sent stays newer: then this refusal is never repeated
                self._changes.setdefault(place, 0)
            self._bound()

    def _repeated(self, request: LimitRequest) -> Decision | None:
        """Return the refusal that Redis would repeat now; None without one."""
        denial = self._denials.get(_key(request)) if self._denials else None
        if denial is None or not denial.received_us <= (now_us := self._clock()) < denial.until_us:
            return None
        version = denial.version
        for place in denial.places:
            if self._changes.get(place, version + 1) > version:  # what is not known any more has changed
                return None
        passed_us = now_us - denial.received_us
        statuses = tuple([_later(status, passed_us) for status in denial.statuses])
        return Decision(False, statuses, denial.at_us + passed_us, request.revision or 0, request.settler)

    def freed(self, buckets: Iterable[Bucket]) -> None:
        """Forget the refusals by these buckets, those on their way too, as units came back."""
        if not self.enabled:
            return
        with self._lock:
            self._version += 1
            for bucket in buckets:
                self._changes[_place(bucket)] = self._version
            self._bound()

    def clear(self) -> None:
        """Forget all refusals, those on their way too, as the policies changed."""
        with self._lock:
            self._clear()

    def _bound(self) -> None:
        if max(len(self._denials), len(self._changes)) > self._size:
            self._clear()

    def _clear(self) -> None:
        self._version += 1
        self._cleared = self._version
        self._denials.clear()
        self._changes.clear()


def _key(request: LimitRequest) -> object:
    """Return a key that is equal for requests that Redis refuses alike."""
    return request.buckets, request.cost, request.costs, request.revision


def _place(bucket: Bucket) -> object:
    """Return a key that is equal for buckets of one subject and endpoint, whatever their rates."""
    return bucket.subject, bucket.scope if bucket.endpoint_id is None else bucket.endpoint_id


def _later(status: BucketStatus, passed_us: int) -> BucketStatus:
    """Return the status ``passed_us`` later; a refusal charges nothing, so ``remaining`` is a lower bound."""
    wait_us, reset_us, next_us = status.retry_after_us, status.reset_after_us, status.next_after_us
    wait_us, reset_us = wait_us and wait_us - passed_us, reset_us - passed_us if reset_us > passed_us else 0
    # Once units came back, only Redis knows when the next ones do.
    next_us = next_us - passed_us if next_us is not None and next_us > passed_us else None
    bucket, allowed, remaining, window_us = status.bucket, status.allowed, status.remaining, status.window_us
    # Not ``replace``, which takes three times as long.
    return BucketStatus(bucket, allowed, remaining, wait_us, reset_us, window_us, next_us, status.debt)


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1000
