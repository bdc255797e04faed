"""The deny cache: what this process was just refused, so that asking again costs neither Redis nor the client's wait.

A refused request changes nothing, and until its ``retry_after`` nothing but a refund, a reset or an edit could admit
it. So a refusal is repeated in process, with its times counted down, for a bounded while. It never admits anything.

Times are those of one clock: the injected one, or this process's monotonic clock in µs. A refusal ends a wait after
the question was *sent*, which is before Redis judged it: never too late. Its Retry-After counts from when the answer
was *heard*: it goes on naming the instant that it named at first.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

from .exceptions import NewerRevision
from .locks import ForkSafeLock
from .types import Bucket, BucketStatus, Decision, Settler

Steps = Generator[Any, Any, Decision]
Ask = Callable[[str, tuple[Bucket, ...], int, int], Steps]

#: Refusals held at most, 1 to 2 KiB each; those learned longest ago go first.
SIZE = 10_000


class _Denial(NamedTuple):
    """A refusal that Redis gave."""

    statuses: tuple[BucketStatus, ...]
    #: The store's clock when it gave it.
    at_us: int
    heard_us: int
    #: When it ends: the setting's seconds after it was asked for, or before that when a bucket in it has room again.
    until_us: int
    #: How many changes this process had made when it asked.
    version: int
    #: Where the buckets without room are counted.
    places: tuple[object, ...]


class Denials:
    """The refusals of one process, by all that was asked: the buckets with their rates, the cost, the revision."""

    def __init__(self, seconds: float, clock: Callable[[], int] | None = None, size: int = SIZE) -> None:
        """``seconds`` is the longest that a refusal is repeated without asking again; 0 = none is."""
        #: Whether any is kept.
        self.kept = seconds > 0
        self._lasts_us = int(seconds * 10**6)
        self._clock = clock or _monotonic_us
        self._size = size
        self._denials: OrderedDict[object, _Denial] = OrderedDict()
        # Place -> the change that touched it last, for places that somebody was refused at or got units back at. What
        # was asked before that change is not believed; nor is anything once its place has fallen out.
        self._changes: OrderedDict[object, int] = OrderedDict()
        self._version = 0
        # What was asked before this change is not believed wherever it was counted.
        self._floor = 0
        self._lock = ForkSafeLock()

    def __len__(self) -> int:
        return len(self._denials)

    def learning(self, ask: Steps, mode: str, buckets: tuple[Bucket, ...], cost: int, revision: int | None) -> Steps:
        """``ask``, the steps of a verb; learns from what becomes of them."""
        version, sent_us = self._version, self._clock()
        try:
            decision = yield from ask
        except NewerRevision:
            self.clear()
            raise
        finally:
            if mode == "refund":  # done or not: an answer that failed to come does not tell
                self.freed(buckets)
        if decision.allowed:
            if mode != "peek":
                self._spent(buckets)
        elif mode == "check":
            self._learn(decision, buckets, cost, revision, version, sent_us)
        return decision

    def refusal(
        self, buckets: tuple[Bucket, ...], cost: int, revision: int | None, settler: Settler
    ) -> Decision | None:
        """What Redis would say to a request that it refused before; None when it has to be asked."""
        denial = self._denials.get((buckets, cost, revision))
        if denial is None or denial.version < self._floor:
            return None
        now_us = self._clock()
        if not denial.heard_us <= now_us < denial.until_us:
            return None
        for place in denial.places:
            if self._changes.get(place, denial.version + 1) > denial.version:
                return None
        passed_us = now_us - denial.heard_us
        return _repeated(denial, passed_us, revision or 0, settler)

    def noticing(self, ask: Ask) -> Ask:
        """``ask``, for a Cluster's calls: what a refused check gives back there is units that came back."""

        def steps(mode: str, buckets: tuple[Bucket, ...], cost: int, patience_us: int) -> Steps:
            try:
                return (yield from ask(mode, buckets, cost, patience_us))
            finally:
                if mode == "refund":
                    self.freed(buckets)

        return steps

    def freed(self, buckets: Iterable[Bucket]) -> None:
        """Units came back: what these buckets refused, and answers still on their way, are not repeated."""
        if not self.kept:
            return
        with self._lock:
            self._version += 1
            for bucket in buckets:
                self._touch(_place(bucket), self._version)

    def clear(self) -> None:
        """The policies changed: no refusal asked for before now is repeated."""
        with self._lock:
            self._version += 1
            self._floor = self._version
            self._denials.clear()

    def _spent(self, buckets: tuple[Bucket, ...]) -> None:
        """Units went: waits at these buckets are longer than remembered."""
        changes = self._changes
        if not changes:
            return
        for bucket in buckets:
            place = _place(bucket)
            if place in changes:
                with self._lock:
                    self._version += 1
                    self._touch(place, self._version)

    def _learn(
        self,
        decision: Decision,
        buckets: tuple[Bucket, ...],
        cost: int,
        revision: int | None,
        version: int,
        sent_us: int,
    ) -> None:
        if len(decision.statuses) != len(buckets):
            return  # a Cluster that did not tell how all of them stand
        # Those in log mode too: where one has room again, the answer is another.
        full = [status for status in decision.statuses if not status.allowed]
        waits = [status.retry_after_us for status in full if status.retry_after_us is not None]
        until_us = sent_us + min([self._lasts_us, *waits])
        places = tuple({_place(status.bucket): None for status in full})
        with self._lock:
            for place in places:  # a change since it was asked stands: then it is never repeated
                self._touch(place, self._changes.get(place, 0))
            key = (buckets, cost, revision)
            self._denials[key] = _Denial(decision.statuses, decision.at_us, self._clock(), until_us, version, places)
            self._denials.move_to_end(key)
            if len(self._denials) > self._size:
                self._denials.popitem(last=False)

    def _touch(self, place: object, version: int) -> None:
        self._changes[place] = version
        self._changes.move_to_end(place)
        if len(self._changes) > self._size:
            self._floor = max(self._floor, self._changes.popitem(last=False)[1])


def _place(bucket: Bucket) -> object:
    """Where a bucket is counted: equal for buckets that share a counter, whatever their limits."""
    return bucket.subject, bucket.scope if bucket.endpoint_id is None else bucket.endpoint_id


def _slots(kind: type, *names: str) -> list[Callable[[object, object], None]]:
    """What sets these fields. A frozen dataclass's own ``__init__`` looks each of them up by name: twice the time."""
    return [getattr(kind, name).__set__ for name in names]


_bucket, _room, _remaining, _retry_after, _reset_after, _window = _slots(
    BucketStatus, "bucket", "allowed", "remaining", "retry_after_us", "reset_after_us", "window_us"
)
_allowed, _statuses, _at, _blocked_by, _denied_by, _error, _revision, _refusal_id, _settler = _slots(
    Decision,
    *("allowed", "statuses", "at_us", "blocked_by", "denied_by", "error", "revision", "refusal_id", "settler"),
)
_new: Callable[[type], Any] = object.__new__


def _repeated(denial: _Denial, passed_us: int, revision: int, settler: Settler) -> Decision:
    """The refusal some time later."""
    decision: Decision = _new(Decision)
    _allowed(decision, False)
    _statuses(decision, tuple([_later(status, passed_us) for status in denial.statuses]))
    _at(decision, denial.at_us + passed_us)
    _blocked_by(decision, ())
    _denied_by(decision, ())
    _error(decision, "")
    _revision(decision, revision)
    _refusal_id(decision, "")
    _settler(decision, settler)
    return decision


def _later(status: BucketStatus, passed_us: int) -> BucketStatus:
    """A bucket of a refusal some time later; the refusal took nothing, so what remains is a lower bound."""
    wait_us, reset_us = status.retry_after_us, status.reset_after_us
    if not wait_us and not reset_us:
        return status
    later: BucketStatus = _new(BucketStatus)
    _bucket(later, status.bucket)
    _room(later, status.allowed)
    _remaining(later, status.remaining)
    _retry_after(later, wait_us and wait_us - passed_us)
    _reset_after(later, reset_us - passed_us if reset_us > passed_us else 0)
    _window(later, status.window_us)
    return later


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1000
