"""The backend in this process: exact limits for one process, and for each of several its own.

It decides for ``memory://`` what the script decides in Redis, and for ``on_error = local`` this process's share of
each limit: there each unit counts as many times as processes divide the limit.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable
from copy import deepcopy
from datetime import tzinfo
from fractions import Fraction
from typing import Any, NamedTuple

from ..exceptions import NewerRevision
from ..store.base import Store
from ..utils import forks
from .calendar_windows import calendar_window
from .decision import BY_HAND, CHARGING, Decision, LimitRequest, Steps
from .protocol import Raised, bucket_keys
from .rates import BURST_ALGORITHMS, CONCURRENT
from .slots import FAR_US, HeldSlot, Lease
from .types import Bucket, BucketStatus

#: Most counters of a process, and of ``on_error = local``. The least recently used are forgotten, which resets their
#: limits: a client that can make that many counters is held by none of them anyway.
SIZE, LOCAL_SIZE = 100_000, 10_000
#: Most requests in a log that a refund passes on its way to the request charged; as ``sliding_window_log.lua``.
MOST_BEHIND = 1000
#: After this time a request that has found no slot is worth trying again; as ``concurrent.lua``.
RETRY_US = 10**6
_Name = tuple[object, ...]


class _Counter(ABC):
    """What one counter holds, and the terms of the request in hand: units are whole, times are µs."""

    #: Its own time at the last charge, or the start of its window; a clock that is set back a little keeps it.
    since = 0
    #: Its name among the counters, and its time, which is ``since`` at the earliest.
    name: _Name
    now: int
    #: The rate as this process counts it, and the window around ``now``.
    limit: int
    period: int
    capacity: int
    window: tuple[int, int]
    #: The slot that the request takes: its id, and how long its lease is.
    slot: tuple[int, int] | None = None

    def advance(self) -> None:  # noqa: B027 - where units drain from charge to charge, nothing expires
        """Forget what has expired."""

    def rewind(self, now: int) -> None:
        """Count the units in use as of ``now``."""
        self.since = now - now % self.period

    @abstractmethod
    def used(self) -> Fraction | int:
        """Return the units in use."""

    def has_own(self) -> bool:
        """Return whether the request needs no room."""
        return False

    def holds(self) -> bool:
        """Return whether anything is in use by the terms of any request."""
        return bool(self.used())

    def fits_at(self, units: int, room: int) -> int:
        """Return when the units fit into ``room`` units, which they do not now: at last when nothing is in use."""
        return self.full_at()

    @abstractmethod
    def full_at(self) -> int:
        """Return when nothing is in use any more."""

    @abstractmethod
    def charge(self, units: int) -> None:
        """Add the units."""

    @abstractmethod
    def refund(self, units: int, took: _Took | None) -> None:
        """Take the units, of what is left of that charge; None = the newest."""


class _Took(NamedTuple):
    """One bucket's part of a charge that is refunded: when it was made, until when it was counted, and its units."""

    at: int
    until: int
    units: int


class _FixedWindow(_Counter):
    """Units in the window that began at ``since``."""

    count = 0

    def advance(self) -> None:
        if self.window[0] > self.since or not self.count:
            self.since, self.count = self.window[0], 0

    def used(self) -> int:
        return self.count

    def full_at(self) -> int:
        return self.window[1]

    def charge(self, units: int) -> None:
        self.count += units

    def refund(self, units: int, took: _Took | None) -> None:
        if took is None or took.at >= self.since:
            self.count = max(0, self.count - units)


class _SlidingLog(_Counter):
    """The charges of the last period, the oldest first."""

    def __init__(self) -> None:
        self.log: deque[tuple[int, int]] = deque()
        self.total = 0

    def advance(self) -> None:
        while self.log and self.log[0][0] + self.period <= self.now:
            self.total -= self.log.popleft()[1]

    def rewind(self, now: int) -> None:
        self.now = self.since
        self.advance()
        self.since, self.log = now, deque([(now, self.total)] if self.total else ())

    def used(self) -> int:
        return self.total

    def fits_at(self, units: int, room: int) -> int:
        over = self.total + units - room
        for at, charged in self.log:
            over -= charged
            if over <= 0:
                return at + self.period
        return self.now

    def full_at(self) -> int:
        return self.log[-1][0] + self.period

    def charge(self, units: int) -> None:
        self.log.append((self.now, units))
        self.since, self.total = self.now, self.total + units

    def refund(self, units: int, took: _Took | None) -> None:
        oldest, most = (took.until - self.period, MOST_BEHIND) if took else (0, len(self.log))
        kept: list[tuple[int, int]] = []
        while self.log and units and len(kept) < most and self.log[-1][0] >= oldest:
            at, charged = self.log.pop()
            taken = min(units, charged) if took is None or at == oldest else 0
            units, self.total = units - taken, self.total - taken
            kept.append((at, charged - taken))
        self.log.extend(entry for entry in reversed(kept) if entry[1])


class _SlidingCounter(_Counter):
    """Units in the window that began at ``since``, and in the one before, which counts less and less."""

    current = previous = 0

    def advance(self) -> None:
        start = self.window[0]
        if start > self.since or not (self.current or self.previous):
            self.previous = self.current if start - self.since == self.period else 0
            self.since, self.current = start, 0

    def used(self) -> Fraction:
        left = self.since + self.period - self.now
        return Fraction(self.previous * left, self.period) + self.current

    def fits_at(self, units: int, room: int) -> int:
        windows, free, weighted = 1, room - self.current - units, self.previous
        if free < 0:
            windows, free, weighted = 2, room - units, self.current
        return self.since + windows * self.period - free * self.period // weighted

    def full_at(self) -> int:
        return self.since + (2 if self.current else 1) * self.period

    def charge(self, units: int) -> None:
        self.current += units

    def refund(self, units: int, took: _Took | None) -> None:
        windows = (took.until - self.since) // self.period if took else 2
        rest = units if windows == 1 else 0
        if windows == 2:
            rest = 0 if took else max(0, units - self.current)
            self.current = max(0, self.current - units)
        self.previous = max(0, self.previous - rest)


class _Meter(_Counter):
    """Units that drain: token_bucket, leaky_bucket and gcra. As ``token_bucket.lua``, which tells the rules."""

    #: Units times period, at ``since``; the limit and the capacity that they were written under.
    level = written = size = 0

    @property
    def edited(self) -> bool:
        return (self.written, self.size) != (self.limit, self.capacity)

    def rewind(self, now: int) -> None:
        self.since = now

    def left(self) -> tuple[int, int]:
        """Return the level by the present terms, and the faster of both limits, by which it drains."""
        level, limit = self.level, self.limit
        if level and self.edited:
            level, limit = min(level, max(self.size, self.capacity) * self.period), max(self.written, limit)
        return max(0, level - (self.now - self.since) * limit), limit

    def used(self) -> Fraction:
        return Fraction(self.left()[0], self.period)

    def holds(self) -> bool:
        return self.level > (self.now - self.since) * self.written

    def fits_at(self, units: int, room: int) -> int:
        level, limit = self.left()
        return self.now - ((room - units) * self.period - level) // limit

    def full_at(self) -> int:
        return self.fits_at(0, 0)

    def charge(self, units: int) -> None:
        level, drain = self.left()
        if drain > self.limit:
            level = min(level, self.capacity * self.period)
        self.level, self.since = level + units * self.period, self.now
        self.written, self.size = self.limit, self.capacity

    def refund(self, units: int, took: _Took | None) -> None:
        level = held = max(0, self.level - (self.now - self.since) * self.written)
        if took:
            passed, lasts = max(0, self.now - took.at), took.until - took.at
            pace = -(-took.units * self.period // max(1, lasts)) + max(0, self.written - self.limit)
            held = took.units * self.period - passed * pace if passed < lasts else 0
            if self.edited:  # which left no more of them
                size = self.size if self.written < self.limit else max(self.size, self.capacity)
                held = min(held, size * self.period)
        self.level, self.since = level - max(0, min(units * self.period, held, level)), self.now


class _Queue(_Counter):
    """Booked slots: how much later than ``since`` the last one is (µs). As ``queue.lua``, which tells the rules."""

    later = 0

    @property
    def interval(self) -> int:
        return -(-self.period // self.limit)

    @property
    def last(self) -> int:
        return max(self.since + self.later, self.now - self.capacity * self.interval)

    def rewind(self, now: int) -> None:
        self.since = now

    def used(self) -> Fraction:
        return Fraction(self.full_at() - self.now, self.interval)

    def holds(self) -> bool:
        return self.since > 0

    def fits_at(self, units: int, room: int) -> int:
        return self.full_at() + (units - room) * self.interval

    def full_at(self) -> int:
        return self.last + self.capacity * self.interval

    def charge(self, units: int) -> None:
        self.write(self.last + units * self.interval)

    def refund(self, units: int, took: _Took | None) -> None:
        last, full_at = self.last, took.until if took else self.full_at()
        slot = full_at - self.capacity * self.interval
        if last == slot or max(last, slot) <= self.now:
            last -= max(0, min(units * self.interval, full_at - self.now))
        self.write(last)

    def write(self, last: int) -> None:
        self.since, self.later = self.now, last - self.now
        if self.full_at() <= self.now:
            self.since = 0  # nothing to hold


class _Running(_Counter):
    """The slots of concurrent requests, by their ids."""

    #: The processes that divide the limit.
    share = 1

    def __init__(self) -> None:
        self.held: dict[int, HeldSlot] = {}

    def advance(self) -> None:
        self.held = {name: slot for name, slot in self.held.items() if slot.counts(self.now)}

    def used(self) -> int:
        return len(self.held) * self.share

    def has_own(self) -> bool:
        """Return whether the request's slot is held: it takes no second one."""
        return self.slot is not None and self.slot[0] in self.held

    def full_at(self) -> int:
        return self.now + RETRY_US

    def charge(self, units: int) -> None:
        if self.slot:
            self.share = units
            self.hold(*self.slot)

    def refund(self, units: int, took: _Took | None) -> None:
        """Do nothing: a slot is no charge."""

    def hold(self, slot_id: int, lease_us: int) -> None:
        """Take the slot, or prolong its lease."""
        since = self.held[slot_id].since_us if slot_id in self.held else self.now
        self.held[slot_id] = HeldSlot(slot_id, since, self.now + lease_us, lease_us)

    def renew(self, lease: Lease) -> bool:
        """Prolong a lease, and take a slot that has lapsed where there is room; returns whether it is held."""
        room = self.used() + self.share <= self.capacity
        if lease.slot_id in self.held or room:
            self.hold(lease.slot_id, lease.length_us)
        return lease.slot_id in self.held

    def release(self, lease: Lease) -> bool:
        """Release the slot; returns whether it was held."""
        return self.held.pop(lease.slot_id, None) is not None


_COUNTERS: dict[str, type[_Counter]] = {
    "fixed_window": _FixedWindow,
    "sliding_window_log": _SlidingLog,
    "sliding_window_counter": _SlidingCounter,
    **dict.fromkeys(BURST_ALGORITHMS, _Meter),
    CONCURRENT: _Running,
}


class Memory:
    """The counters of this process; with a share above 1 each admits that part of a limit."""

    #: ``error`` of its decisions.
    error = ""

    def __init__(self, zone: tzinfo, clock: Callable[[], int] | None = None) -> None:
        """``zone`` aligns calendar windows; ``clock`` returns µs since the Unix epoch (None = this machine's)."""
        #: The newest revision that this process has published; 0 = none.
        self.revision = 0
        self._zone, self._clock = zone, clock or _wall_us
        #: The least recently used first.
        self._counters = OrderedDict[_Name, _Counter]()
        #: The number of processes that divide each limit, and the most counters.
        self._share, self._size = 1, SIZE
        self._lock = forks.lock()

    def __len__(self) -> int:
        return len(self._counters)

    @property
    def now_us(self) -> int:
        """Its clock (µs)."""
        return self._clock()

    def ask(self, request: LimitRequest) -> Steps:
        """``decide``, as steps of which none is a command; see ``ScriptBackend``."""
        return self.decide(request)
        yield

    def decide(self, request: LimitRequest) -> Decision:
        """Carry out a request; raises ``NewerRevision`` and ``InvalidBucket``.

        A share below one unit admits one unit in a period that is longer by that factor. Units that exceed the share
        of a limit, but not the limit, pass when the counter is empty.
        """
        mode, buckets = request.mode, request.buckets
        bucket_keys("", buckets)
        if request.revision is not None and self.revision > request.revision:
            raise NewerRevision(self.revision)
        costs, slot = request.units(), request.slot
        with self._lock:
            now = self._clock()
            at_us = request.charged.at_us if request.charged else now
            counters = [self._take(bucket, now, at_us, slot=slot, peek=mode == "peek") for bucket in buckets]
            waits = [
                0 if mode in BY_HAND or counter.has_own() else self._wait(counter, bucket, cost, now)
                for counter, bucket, cost in zip(counters, buckets, costs, strict=True)
            ]
            passed = [wait is not None and wait <= request.wait_us for wait in waits]
            allowed = all(ok or bucket.mode == "log" for bucket, ok in zip(buckets, passed, strict=True))
            statuses = []
            for at, (counter, bucket, wait) in enumerate(zip(counters, buckets, waits, strict=True)):
                if allowed and passed[at] and costs[at]:
                    self._settle(counter, request, at, costs[at])
                if mode != "peek":
                    self._keep(counter)
                statuses.append(self._status(counter, bucket, passed[at], wait, now))
        cost, units = (request.cost, costs) if allowed and mode in CHARGING else (0, ())
        decision = Decision(allowed, tuple(statuses), now, request.revision or 0, request.settler, cost, units)
        decision.error = self.error
        return decision

    def reset(self, buckets: Iterable[Bucket]) -> Generator[Any, Any, int]:
        """Forget what was counted; returns how many of the buckets had counted anything."""
        with self._lock:
            now = self._clock()
            return sum(self._counters.pop(self._name(bucket, now)[0], None) is not None for bucket in buckets)
        yield

    def renew(self, leases: Iterable[Lease]) -> Generator[Any, Any, list[Any]]:
        """Prolong the leases of slots; returns how many of these are held."""
        return [self._on_slots(leases, _Running.renew)]
        yield

    def release(self, leases: Iterable[Lease]) -> Generator[Any, Any, list[Any]]:
        """Release slots; returns how many of these were held."""
        return [self._on_slots(leases, _Running.release)]
        yield

    def _on_slots(self, leases: Iterable[Lease], do: Callable[[_Running, Lease], bool]) -> int:
        count = 0
        with self._lock:
            now = self._clock()
            for lease in leases:
                counter = self._take(lease.bucket, now, now)
                count += isinstance(counter, _Running) and do(counter, lease)
                self._keep(counter)
        return count

    def slots(self, bucket: Bucket) -> Generator[Any, Any, list[HeldSlot]]:
        """Return the slots that are held of a concurrent bucket."""
        with self._lock:
            now = self._clock()
            counter = self._take(bucket, now, now, peek=True)
            return list(counter.held.values()) if isinstance(counter, _Running) else []
        yield

    def raise_counters(
        self, totals: Raised, *, makes: bool = True
    ) -> Generator[Any, Any, list[tuple[int, int, int]]]:
        """Do nothing: what this process counts is lost with the process alone."""
        return [(charged, refunded, 0) for charged, refunded, _ends_us in totals.values()]
        yield

    def publish(self) -> Generator[Any, Any, int]:
        """Make this process reload its policies before its next decision; returns the new revision."""
        self.revision = max(self.revision + 1, self._clock())
        return self.revision
        yield

    def _name(self, bucket: Bucket, at_us: int) -> tuple[_Name, tuple[int, int] | None]:
        """Return the name of the bucket's counter; each calendar window is one of its own, and returned as well."""
        if not bucket.rate.calendar:
            return bucket.counter, None
        window = calendar_window(bucket.rate.calendar, at_us, self._zone, bucket.anchor)
        return (*bucket.counter, window.first_day), window[:2]

    def _take(
        self, bucket: Bucket, now: int, at_us: int, *, slot: tuple[int, int] | None = None, peek: bool = False
    ) -> _Counter:
        """Remove the bucket's counter around ``at_us`` and return it, told the terms; for a peek return a copy."""
        rate = bucket.rate
        # No window holds a part of a unit, but a bucket does, once it has drained so long.
        kind = _Queue if bucket.queued else _COUNTERS[rate.algorithm]
        if rate.limit < self._share and not rate.concurrent:
            kind = _Meter
        name, window = self._name(bucket, at_us)
        found = deepcopy(self._counters.get(name)) if peek else self._counters.pop(name, None)
        counter = found if isinstance(found, kind) else kind()  # after an edit to another kind, too
        counter.name, counter.slot = name, slot
        counter.limit, counter.period, counter.capacity = rate.limit, rate.period_us, max(rate.capacity, self._share)
        if not window and counter.since - now > max(counter.period, FAR_US):
            counter.rewind(now)
        counter.now = max(now, counter.since)
        start = counter.now - counter.now % counter.period
        counter.window = window or (start, start + counter.period)
        counter.advance()
        return counter

    def _keep(self, counter: _Counter) -> None:
        """Put a counter back that was taken."""
        if counter.holds():
            self._counters[counter.name] = counter
            if len(self._counters) > self._size:
                self._counters.popitem(last=False)

    def _wait(self, counter: _Counter, bucket: Bucket, cost: int, now: int) -> int | None:
        """Return the µs until ``cost`` fits; 0 when it does, None when it never can."""
        if cost > bucket.rate.capacity:
            return None
        units = cost * self._share
        room = max(counter.capacity, units)
        return 0 if counter.used() + units <= room else max(0, counter.fits_at(units, room) - now)

    def _settle(self, counter: _Counter, request: LimitRequest, at: int, cost: int) -> None:
        """Charge or refund the ``cost`` of the bucket in place ``at``."""
        units, took = cost * self._share, request.charged
        if request.mode == "refund":
            counter.refund(
                units, took and _Took(took.at_us, took.at_us + took.levels_us[at], took.units * self._share)
            )
        elif request.mode != "peek":
            counter.charge(units)

    def _status(self, counter: _Counter, bucket: Bucket, passed: bool, wait: int | None, now: int) -> BucketStatus:
        used = counter.used()
        free = (counter.capacity - used) // self._share
        remaining, next_us = max(0, free), None
        reset_us = max(0, counter.full_at() - now) if used else 0
        if reset_us and (remaining + 1) * self._share <= counter.capacity:  # a part of a unit is no quota
            next_us = max(1, self._wait(counter, bucket, remaining + 1, now) or 0)
        start, finish = counter.window
        return BucketStatus(bucket, passed, remaining, wait, reset_us, finish - start, next_us, debt=max(0, -free))


class Unlimited(Memory):
    """Admits everything and counts nothing, for ``ENABLED = False``."""

    def _wait(self, counter: _Counter, bucket: Bucket, cost: int, now: int) -> int:
        return 0

    def _settle(self, counter: _Counter, request: LimitRequest, at: int, cost: int) -> None:
        pass


class LocalLimiter(Memory):
    """Decides under ``on_error = local`` until Redis is back: it starts empty, and knows nothing of other processes.

    It settles its own decisions. Without an injected clock it counts by a clock that nobody sets.
    """

    error = "local"

    def __init__(
        self, share: int, zone: tzinfo, clock: Callable[[], int] | None = None, size: int = LOCAL_SIZE
    ) -> None:
        """``share`` is the number of processes that divide a limit."""
        super().__init__(zone, clock or _steady_us)
        self._share, self._size = share, size

    async def adecide(self, request: LimitRequest) -> Decision:
        """``decide``, for async callers; it does not wait."""
        return self.decide(request)

    def ask(self, request: LimitRequest) -> Steps:
        """``decide``, as steps; a check's slots note what they hold here."""
        if request.slots and request.mode == "check":
            return request.slots.take(self, request, super().ask)
        return super().ask(request)

    def renew_slots(self, leases: Iterable[Lease]) -> int:
        """Prolong the leases of slots; returns how many of these are held."""
        return self._on_slots(leases, _Running.renew)

    def release_slots(self, leases: Iterable[Lease]) -> int:
        """Release slots; returns how many of these were held."""
        return self._on_slots(leases, _Running.release)

    async def arelease_slots(self, leases: Iterable[Lease]) -> int:
        """``release_slots``, for async callers."""
        return self.release_slots(leases)


_memories: dict[tuple[str, tzinfo], Memory] = {}


def process_memory(_store: Store, prefix: str, zone: tzinfo, clock: Callable[[], int] | None) -> Memory:
    """Return the counters that all limiters of the prefix share in this process; an injected clock has its own."""
    return Memory(zone, clock) if clock else _memories.setdefault((prefix, zone), Memory(zone))


def _wall_us() -> int:
    return time.time_ns() // 1000


_STEADY_SINCE_US = (time.time_ns() - time.monotonic_ns()) // 1000


def _steady_us() -> int:
    return time.monotonic_ns() // 1000 + _STEADY_SINCE_US
