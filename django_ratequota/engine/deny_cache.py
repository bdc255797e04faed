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

from ..utils.locks import ForkSafeLock
from .types import Bucket, BucketStatus, Decision, Settler, make_decision, make_status

Steps = Generator[Any, Any, Decision]
#: How many changes there had been when Redis was asked, and when that was (µs, by the clock of ``Denials``).
Asking = tuple[int, int]
Ask = Callable[[str, tuple[Bucket, ...], int, tuple[int, ...]], Steps]

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

    def asking(self) -> Asking:
        """To be had before Redis is asked, for ``learn``."""
        return self._version, self._clock()

    def learn(
        self,
        mode: str,
        decision: Decision,
        buckets: tuple[Bucket, ...],
        cost: object,
        revision: int | None,
        asking: Asking,
    ) -> None:
        """Learn from the decision that Redis came to; ``cost`` is anything equal for equal costs."""
        if decision.allowed:
            if mode != "peek":
                self._spent(buckets)
        elif mode == "check":
            self._learn(decision, buckets, cost, revision, *asking)

    def refusal(
        self, buckets: tuple[Bucket, ...], cost: object, revision: int | None, settler: Settler
    ) -> Decision | None:
        """What Redis would say to a request that it refused before; None when it has to be asked."""
        denial = self._denials.get((buckets, cost, revision)) if self._denials else None
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

        def steps(mode: str, buckets: tuple[Bucket, ...], cost: int, times: tuple[int, ...]) -> Steps:
            try:
                return (yield from ask(mode, buckets, cost, times))
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
        cost: object,
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


def _repeated(denial: _Denial, passed_us: int, revision: int, settler: Settler) -> Decision:
    """The refusal some time later."""
    statuses = tuple([_later(status, passed_us) for status in denial.statuses])
    return make_decision(
        False, statuses, denial.at_us + passed_us, (), (), "", revision, "", settler, 0, None, None, None
    )


def _later(status: BucketStatus, passed_us: int) -> BucketStatus:
    """A bucket of a refusal some time later; the refusal took nothing, so what remains is a lower bound."""
    wait_us, reset_us = status.retry_after_us, status.reset_after_us
    if not wait_us and not reset_us:
        return status
    wait_us = wait_us and wait_us - passed_us
    reset_us = reset_us - passed_us if reset_us > passed_us else 0
    # Once units came back, only Redis knows when the next ones do.
    next_us = status.next_after_us
    next_us = next_us - passed_us if next_us is not None and next_us > passed_us else None
    return make_status(status.bucket, status.allowed, status.remaining, wait_us, reset_us, status.window_us, next_us)


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1000
