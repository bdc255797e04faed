"""Counters in this process, for the limiters that count without Redis.

They count in seconds or in µs, as ``_us`` says. All window algorithms are sliding windows, and all bucket algorithms
are leaky buckets; ``Memory`` overrides what is exact by algorithm.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor

from ..utils.locks import ForkSafeLock
from .rates import Rate
from .types import Bucket, BucketStatus

#: Refusing counters that are searched for an expired one before new callers share one.
_MAX_SEARCHED = 16
WINDOWS = frozenset({"fixed_window", "sliding_window_log", "sliding_window_counter"})
_NEVER = float("inf")
_Name = tuple[object, ...]


@dataclass(slots=True)
class Counter:
    #: Units counted in this window, or the bucket's level; then those of the window before (0 for buckets).
    units: float
    previous: float
    #: Start of the window, or when the level was last drained (seconds).
    since: float
    #: The bucket's rate when it was last charged: units per second, and its capacity.
    drain: float = 0.0
    room: float = 0.0
    #: When the last refusal ends (seconds).
    refused_until: float = 0.0
    #: Whether the units above the capacity are the booked slots of a queue (``Memory``).
    booked: bool = False
    #: The charges that are counted, with their times (µs), the oldest first (``Memory``).
    log: deque[tuple[int, int]] | None = None
    #: The usage that a charge under a slower rate cut off: it keeps counting for faster rates (``Memory``).
    uncut: Counter | None = None
    #: Day of the month on which its calendar months begin, by the bucket that was asked last (``Memory``).
    anchor: int = 1


class Counters:
    """A bounded number of counters, of which a refusing one is never forgotten."""

    #: Waits shorter than this are rounding errors and count as none (in the clock's unit).
    _epsilon = 1e-6
    #: µs of one unit of the clock: a second.
    _us = 10**6

    def __init__(self, share: int, size: int, clock: Callable[[], float]) -> None:
        """``share`` is the number of processes that divide a limit, ``size`` bounds the counters."""
        self._share = share
        self._size = size
        self._clock = clock
        self._lock = ForkSafeLock()
        # Least recently used first. Refusing counters are apart, as a flood of new callers must not free a client.
        self._passing: OrderedDict[_Name, Counter] = OrderedDict()
        self._refusing: OrderedDict[_Name, Counter] = OrderedDict()
        # By policy, without a subject; apart, as each new caller would evict a shared counter.
        self._shared: dict[_Name, Counter] = {}

    def __len__(self) -> int:
        return len(self._passing) + len(self._refusing) + len(self._shared)

    def _apply(
        self,
        mode: str,
        buckets: Sequence[Bucket],
        each: Sequence[int],
        charged: Sequence[int] = (),
        longest: float = 0,
    ) -> tuple[float, tuple[BucketStatus, ...]]:
        """Carry out check, peek, charge, refund or acquire; returns when (seconds), and each bucket's status.

        ``each`` are the buckets' own costs, ``longest`` is the wait (seconds) that acquire may book.
        """
        times = charged if self._us == 1 else [us / self._us for us in charged]
        known = [(times[0], level) for level in times[1:]] or (None,) * len(buckets)
        with self._lock:
            now = self._clock()
            taken = [self._take(bucket, now, mode == "peek") for bucket in buckets]
            waits = [
                0 if mode in ("charge", "refund") else self._wait(counter, bucket.rate, units, at)
                for bucket, (_, counter, at), units in zip(buckets, taken, each, strict=True)
            ]
            passed = [wait <= longest for wait in waits]
            allowed = all(ok or bucket.mode == "log" for bucket, ok in zip(buckets, passed, strict=True))
            statuses = []
            for bucket, (name, counter, at), units, wait, ok, of in zip(
                buckets, taken, each, waits, passed, known, strict=True
            ):
                if allowed and ok and units and mode == "refund":
                    self._give_back(counter, bucket.rate, units, at, of)
                elif allowed and ok and units and mode != "peek":
                    self._charge(counter, bucket.rate, units, at, mode == "acquire")
                # A cost that never fits neither adds a counter to the refusing ones nor removes it.
                if mode == "check" and wait < _NEVER:
                    counter.refused_until = at + wait if wait else 0
                self._put(name, counter)
                statuses.append(self._status(bucket, counter, ok, wait, at))
            return now, tuple(statuses)

    def _charge(self, counter: Counter, rate: Rate, cost: int, now: float, slot: bool = False) -> None:
        """``slot``: the units are one of a queue."""
        if rate.algorithm not in WINDOWS:
            drain, room = self._meter(rate)
            level, drained_by = self._level(counter, rate, now)
            counter.booked = counter.booked and level > room
            counter.units = min(level, room) if drained_by > drain and not counter.booked else level
            counter.since, counter.drain, counter.room = now, drain, room
            counter.booked = counter.booked or slot
        counter.units += cost

    def _give_back(
        self, counter: Counter, rate: Rate, cost: int, now: float, charged: tuple[float, float] | None
    ) -> None:
        """``charged`` is when the units were charged, and how long after that the bucket was full again (seconds)."""
        at, full_after = charged or (0, 0)
        if rate.algorithm in WINDOWS:
            # The window that was charged: 2 = the current one, 1 = the one before.
            window = round((at + full_after - counter.since) / self._scaled(rate)[1]) if charged else 2
            if window == 2:
                rest = 0 if charged else max(0, cost - counter.units)
                counter.units = max(0, counter.units - cost)
                counter.previous = max(0, counter.previous - rest)
            elif window == 1:
                counter.previous = max(0, counter.previous - cost)
            return
        level, drain = self._level(counter, rate, now)
        left = level
        if charged:  # the oldest units drain first, so these are the last to drain
            own, room = self._meter(rate)
            left = max(0, (full_after + self._epsilon) * own - (now - at) * drain)
            if counter.drain < own:  # an edit left no more of them
                left = min(left, counter.room)
            elif (own, room) != (counter.drain, counter.room):
                left = min(left, max(room, counter.room))
        if counter.booked and level > self._meter(rate)[1] and not (charged and left >= level):
            left = 0  # another slot may be booked behind it
        counter.units, counter.since = level - min(cost, level, left), now

    def _take(self, bucket: Bucket, now: float, peek: bool = False) -> tuple[_Name, Counter, float]:
        """Remove and return the bucket's counter, advanced to ``now``, and its time; ``_put`` stores it again."""
        name = bucket.counter
        if name not in self._passing and name not in self._refusing and not self._has_room(now, peek):
            # All counters are refusing: the new callers of a policy share one.
            name = (None, *name[1:])
        homes = (self._passing, self._refusing, self._shared)
        counter = next((counters.pop(name) for counters in homes if name in counters), None)
        if counter is None:
            counter = Counter(0, 0, now)
        counter.anchor = bucket.anchor
        at = self._time_of(counter, now)
        self._advance(counter, bucket.rate, at)
        return name, counter, at

    def _time_of(self, counter: Counter, now: float) -> float:
        return now  # a monotonic clock

    def _advance(self, counter: Counter, rate: Rate, now: float) -> None:
        """Bring the counter to ``now``, where what has expired is no longer counted."""
        if rate.algorithm in WINDOWS:
            _limit, period = self._scaled(rate)
            windows = (now - counter.since) // period
            if windows:
                counter.previous = counter.units if windows == 1 else 0
                counter.units, counter.since = 0, counter.since + windows * period
        elif counter.units <= (now - counter.since) * counter.drain:
            counter.units = 0

    def _put(self, name: _Name, counter: Counter) -> None:
        if name[0] is None:
            self._shared[name] = counter
        elif counter.refused_until:
            self._refusing[name] = counter
        elif counter.units or counter.previous:
            self._passing[name] = counter

    def _has_room(self, now: float, peek: bool) -> bool:
        if len(self._passing) + len(self._refusing) < self._size:
            return True
        if peek:
            return bool(self._passing)
        for _ in range(min(_MAX_SEARCHED, len(self._refusing))):
            name, counter = self._refusing.popitem(last=False)
            if counter.refused_until <= now:
                return True
            self._refusing[name] = counter
        if self._passing:
            self._passing.popitem(last=False)
            return True
        return False

    def _scaled(self, rate: Rate) -> tuple[float, float]:
        """Return this process's share of the rate: units, and their period in seconds."""
        limit, period = rate.limit / self._share, rate.period_us / self._us
        return (limit, period) if limit >= 1 else (1.0, period / limit)

    def _meter(self, rate: Rate) -> tuple[float, float]:
        """Return this process's share of a bucket: units that drain per second, and its capacity."""
        limit, period = self._scaled(rate)
        return limit / period, max(rate.capacity / self._share, 1)

    def _level(self, counter: Counter, rate: Rate, now: float) -> tuple[float, float]:
        """Return the units in a bucket, and how many drain per second.

        Units that were charged under another rate drain by the faster rate, and fill the larger bucket at most.
        """
        units, (drain, room) = counter.units, self._meter(rate)
        if units and (drain, room) != (counter.drain, counter.room):
            units, drain = min(units, max(room, counter.room)), max(drain, counter.drain)
        return max(0, units - (now - counter.since) * drain), drain

    def _wait(self, counter: Counter, rate: Rate, cost: int, now: float) -> float:
        """Return the seconds until ``cost`` units fit; 0 when they do, infinite when they never can."""
        wait = self._exact_wait(counter, rate, cost, now)
        return wait if wait > self._epsilon else 0

    def _exact_wait(self, counter: Counter, rate: Rate, cost: int, now: float) -> float:
        if cost > rate.capacity:
            return _NEVER
        if rate.algorithm not in WINDOWS:
            level, drain = self._level(counter, rate, now)
            return max(0, level + cost - max(self._meter(rate)[1], cost)) / drain
        limit, period = self._scaled(rate)
        limit = max(limit, cost)
        passed = now - counter.since
        weighted = counter.previous * max(0, 1 - passed / period)
        if weighted + counter.units + cost <= limit:
            return 0
        if counter.units + cost <= limit:
            return period - period * (limit - cost - counter.units) / counter.previous - passed
        # In the next window, the units of this one weigh less and less.
        return 2 * period - period * (limit - cost) / counter.units - passed

    def _state(self, counter: Counter, rate: Rate, now: float) -> tuple[float, float, float, float]:
        """Return the most units that the counter takes, those free, and seconds: until all are free, of a window."""
        most, period = self._scaled(rate)
        if rate.algorithm in WINDOWS:
            passed = now - counter.since
            room = most - counter.units - counter.previous * max(0, 1 - passed / period)
            reset = (2 if counter.units else 1) * period - passed if counter.units or counter.previous else 0
        else:
            level, drain = self._level(counter, rate, now)
            most = self._meter(rate)[1]
            room, reset = most - level, level / drain
        return most, room, reset, period

    def _status(self, bucket: Bucket, counter: Counter, allowed: bool, wait: float, now: float) -> BucketStatus:
        most, room, reset, window = self._state(counter, bucket.rate, now)
        remaining = max(0, int(room))
        next_us = None
        if remaining + 1 <= most:  # units beyond the share fit into an empty counter only, so they are no quota
            next_us = max(1, ceil(self._exact_wait(counter, bucket.rate, remaining + 1, now) * self._us))
        return BucketStatus(
            bucket=bucket,
            allowed=allowed,
            remaining=remaining,
            retry_after_us=None if wait == _NEVER else ceil(wait * self._us),
            reset_after_us=ceil(reset * self._us),
            window_us=round(window * self._us),
            next_after_us=next_us,
            debt=max(0, -floor(room)),
        )
