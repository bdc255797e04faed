"""Counting in this process instead of Redis: exact limits for one process, and for each of several its own.

``Memory`` decides what the script decides in Redis. Its limiter takes the same steps, of which none is a command.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import tzinfo
from fractions import Fraction
from math import ceil
from typing import Any

from ..exceptions import NewerRevision
from .calendar_windows import calendar_window
from .charges import Charges, Settler, charge_each
from .counters import WINDOWS, Counter, Counters
from .decision import Decision
from .protocol import CHARGING, bucket_keys
from .rates import Rate
from .types import Bucket, BucketStatus

#: Most counters of a process. The least recently used are forgotten, which resets their limits, except refusing ones.
SIZE = 100_000
_FIXED, _COUNTER, _LOG = "fixed_window", "sliding_window_counter", "sliding_window_log"


class Memory(Counters):
    """The counters of this process, each exact by its algorithm's definition: times are whole µs, units fractions."""

    _epsilon = 0
    _us = 1

    def __init__(self, zone: tzinfo, clock: Callable[[], int] | None = None) -> None:
        """``zone`` aligns calendar windows; ``clock`` returns µs since the Unix epoch (None = this machine's)."""
        self.clock = clock or _wall_us
        super().__init__(1, SIZE, lambda: self.clock())
        #: The newest revision that this process has published; 0 = none.
        self.revision = 0
        self._zone = zone

    def steps(
        self,
        mode: str,
        buckets: tuple[Bucket, ...],
        cost: int,
        times: tuple[int, ...] = (0,),
        revision: int | None = None,
        settler: Settler | None = None,
        share: float = 1.0,
    ) -> Generator[Any, Any, Decision]:
        """Return the steps of one atomic call; arguments and errors are those of a call to Redis."""
        bucket_keys("", buckets)
        if revision is not None and self.revision > revision:
            raise NewerRevision(self.revision)
        first, *each = times[: 1 + len(buckets)]  # no seeds: this process has lost nothing
        known = mode == "refund" and first  # a known charge, whose levels follow
        costs = [cost] * len(buckets) if known else each or [bucket.rate.units(cost) for bucket in buckets]
        longest = first if mode == "acquire" else 0
        now, statuses = self._apply(mode, buckets, costs, (first, *each) if known else (), longest)
        at_us = int(now)
        allowed = not any(status.refused for status in statuses)
        units = cost if allowed and mode in CHARGING else 0
        # A decision of no units does not list its charges itself.
        charges = charge_each(statuses, units, at_us, costs=costs) if allowed and mode in CHARGING else Charges()
        return Decision(
            allowed=allowed,
            statuses=statuses,
            at_us=at_us,
            revision=revision or 0,
            settler=settler,
            cost=units,
            _charges=charges,
        )
        yield

    def reset(self, buckets: Iterable[Bucket]) -> int:
        """Forget what was counted; returns how many of the buckets had counted anything."""
        with self._lock:
            found = [
                counters.pop(bucket.counter, None)
                for bucket in buckets
                for counters in (self._passing, self._refusing)
            ]
        return sum(counter is not None for counter in found)

    def publish(self) -> int:
        """Make this process reload its policies before its next decision; returns the new revision."""
        self.revision = max(self.revision + 1, self.clock())
        return self.revision

    def _scaled(self, rate: Rate) -> Any:
        return rate.limit, Fraction(rate.period_us)

    def _meter(self, rate: Rate) -> Any:
        return Fraction(rate.limit, rate.period_us), rate.capacity

    def _window(self, counter: Counter, rate: Rate, now: Any) -> tuple[Any, Any]:
        """Return the bounds of the window around ``now``: by the calendar, or at multiples of the period."""
        if rate.calendar:
            return calendar_window(rate.calendar, now, self._zone, counter.anchor)
        start = now - now % rate.period_us
        return start, start + rate.period_us

    def _time_of(self, counter: Counter, now: Any) -> Any:
        """Return the counter's own time, which does not go back when the clock is set back."""
        return max(now, counter.since)

    def _advance(self, counter: Counter, rate: Rate, now: float) -> None:
        if rate.algorithm == _LOG:
            while counter.log and counter.log[0][0] + rate.period_us <= now:
                counter.units -= counter.log.popleft()[1]
        elif rate.algorithm in (_FIXED, _COUNTER):
            start = self._window(counter, rate, now)[0]
            if start > counter.since or not (counter.units or counter.previous):
                follows = rate.algorithm == _COUNTER and start - counter.since == rate.period_us
                counter.previous = counter.units if follows else 0
                counter.units, counter.since = 0, start
        else:
            super()._advance(counter, rate, now)
            if counter.uncut is not None and not _level_of(counter.uncut, now):
                counter.uncut = None

    def _charge(self, counter: Counter, rate: Rate, cost: int, now: Any, slot: bool = False) -> None:
        if rate.algorithm == _LOG:
            counter.log = counter.log or deque()
            counter.log.append((now, cost))
            counter.since = now
        if rate.algorithm in WINDOWS:
            super()._charge(counter, rate, cost, now)
            return
        drain, room = self._meter(rate)
        uncut, counter.uncut = counter.uncut, None
        if uncut is not None and drain > counter.drain:  # nothing was cut off for this rate
            _replace_level(counter, uncut)
            uncut = None
        used = level = self._level(counter, rate, now)[0]
        over = used + cost - room
        if counter.drain > drain and slot and over > 0:
            # The slot begins at the instant in its caller's reply, and the next slot behind it.
            level += Fraction(ceil(over * rate.period_us * drain / counter.drain), rate.period_us) - over
        elif counter.drain > drain:
            level = min(level, room)
        if level < used and uncut is None:
            uncut = Counter(used, 0, now, counter.drain, counter.room)
        counter.booked = (slot or (counter.booked and used > room)) and level + cost > room
        counter.units, counter.since, counter.drain, counter.room = level + cost, now, drain, room
        if uncut is not None:
            held = _level_of(uncut, now)
            uncut.units, uncut.since = max(held, min(held + cost, uncut.room)), now
            counter.uncut = uncut if uncut.units > counter.units else None

    def _level(self, counter: Counter, rate: Rate, now: Any) -> tuple[Any, Any]:
        uncut = counter.uncut
        faster = uncut is not None and self._meter(rate)[0] > counter.drain
        return super()._level(uncut if uncut is not None and faster else counter, rate, now)

    def _put(self, name: Any, counter: Counter) -> None:
        super()._put(name, counter)
        if counter.uncut is not None and name[0] is not None and name not in self._refusing:
            self._passing[name] = counter

    def _give_back(self, counter: Counter, rate: Rate, cost: int, now: Any, charged: tuple[Any, Any] | None) -> None:
        if rate.algorithm == _FIXED:
            if charged is None or charged[0] >= counter.since:
                counter.units = max(0, counter.units - cost)
        elif rate.algorithm == _LOG:
            log: deque[tuple[int, int]] = counter.log or deque()
            newer: list[tuple[int, int]] = []
            while cost and log and (charged is None or log[-1][0] >= charged[0]):
                at_us, units = log.pop()
                taken = min(units, cost) if charged is None or at_us == charged[0] else 0
                cost, counter.units = cost - taken, counter.units - taken
                if units > taken:
                    newer.append((at_us, units - taken))
            log.extend(reversed(newer))
        elif rate.algorithm == _COUNTER:
            super()._give_back(counter, rate, cost, now, charged)
        else:
            self._give_back_level(counter, rate, cost, now, charged)

    def _give_back_level(
        self, counter: Counter, rate: Rate, cost: int, now: Any, charged: tuple[Any, Any] | None
    ) -> None:
        """Take units from a bucket, which stays under the rate that it was charged under, as in the script."""
        left, units, given = 0, cost, cost
        if charged:  # the oldest units drain first, so these are the last to drain
            own, room = self._meter(rate)
            left = charged[1] * own - (now - charged[0]) * max(own, counter.drain)
            given = min(cost, left)
            if (own, room) != (counter.drain, counter.room):  # an edit left no more of them
                left = min(left, counter.room if counter.drain < own else max(counter.room, room))
            units = min(cost, left)
        used = _level_of(counter, now)
        if counter.booked and used > counter.room and left < used:
            units = given = 0  # another slot may be booked behind it
        counter.units, counter.since = max(0, used - max(0, units)), now
        uncut, counter.uncut = counter.uncut, None
        if uncut is not None:
            uncut.units, uncut.since = _level_of(uncut, now) - max(0, given), now
            if not counter.units and uncut.units > 0:
                _replace_level(counter, uncut)
                counter.booked = False
            elif uncut.units > counter.units:
                counter.uncut = uncut

    def _exact_wait(self, counter: Counter, rate: Rate, cost: int, now: Any) -> Any:
        over = counter.units + cost - rate.limit
        if cost > rate.capacity or rate.algorithm not in (_FIXED, _LOG):
            return super()._exact_wait(counter, rate, cost, now)
        if over <= 0:
            return 0
        if rate.algorithm == _FIXED:
            return self._window(counter, rate, now)[1] - now
        for at_us, units in counter.log or ():
            over -= units
            if over <= 0:
                return at_us + rate.period_us - now
        return 0

    def _state(self, counter: Counter, rate: Rate, now: Any) -> tuple[Any, Any, Any, Any]:
        if rate.algorithm not in (_FIXED, _LOG):
            return super()._state(counter, rate, now)
        start, end = self._window(counter, rate, now)
        if counter.log:
            end = counter.log[-1][0] + rate.period_us
        window = end - start if rate.algorithm == _FIXED else rate.period_us
        return rate.limit, rate.limit - counter.units, end - now if counter.units else 0, window


class Unlimited(Memory):
    """Admits everything and counts nothing, for ``ENABLED = False``."""

    def _apply(self, mode: str, buckets: Sequence[Bucket], *_: Any) -> tuple[Any, tuple[BucketStatus, ...]]:
        return super()._apply("peek", buckets, [0] * len(buckets))


_memories: dict[tuple[str, tzinfo], Memory] = {}


def process_memory(prefix: str, zone: tzinfo, clock: Callable[[], int] | None) -> Memory:
    """Return the counters that all limiters of the prefix share in this process; an injected clock has its own."""
    return Memory(zone, clock) if clock else _memories.setdefault((prefix, zone), Memory(zone))


def _level_of(counter: Counter, now: Any) -> Any:
    """Return the units that are left of the counter's at its own rate."""
    return max(0, counter.units - (now - counter.since) * counter.drain)


def _replace_level(counter: Counter, other: Counter) -> None:
    counter.units, counter.since, counter.drain, counter.room = other.units, other.since, other.drain, other.room


def _wall_us() -> int:
    return time.time_ns() // 1000
