"""The six algorithms as exact models: fractions instead of doubles, formulas instead of stored states.

Written from the algorithms' definitions, not from the Lua. A model answers by definition: ``retry_after`` is the
first instant at which the formula admits the cost, ``reset_after`` the first at which nothing is used, ``next_after``
the first at which more units are free. Where a formula is silent, the rules are:

* a clock that went back: token_bucket, leaky_bucket, gcra and sliding_window_log go on at the last time they stored,
  fixed_window and sliding_window_counter in the window they stored. From farther ahead than the period and a minute
  the usage moves to now, also for a request that is refused;
* a calendar window is a counter of its own, whatever the clock does, and so is a month with another first day;
* an edited rate: units used are kept. token_bucket, leaky_bucket and gcra hold the larger of both capacities at most,
  and drain by the faster limit until the next charge; a charge under the slower limit leaves its capacity at most.
  A queue's last slot stays where it is, and what has been saved up since then counts by the present rate;
* a refund of a known charge: takes of its units what has not expired. In a bucket they drain evenly, until the bucket
  would have been full again. No slot of a queue is given back behind which another one, still ahead, is booked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from math import ceil, floor
from typing import NamedTuple

from django_ratequota import BucketStatus, Rate


class Outcome(NamedTuple):
    """The state of one bucket; times in µs."""

    passed: bool
    remaining: int
    retry_after_us: int | None
    reset_after_us: int
    next_after_us: int | None

    @classmethod
    def of(cls, status: BucketStatus) -> Outcome:
        return cls(
            status.allowed, status.remaining, status.retry_after_us, status.reset_after_us, status.next_after_us
        )


def first_instant(holds: Callable[[int], bool], now: int, hint: int) -> int:
    """The first instant from ``now`` on at which ``holds`` turns true, and stays so; ``hint`` only saves time."""
    if holds(now):
        return now
    if hint > now and holds(hint) and not holds(hint - 1):
        return hint
    low, step = now, 1
    while not holds(low + step):
        low, step = low + step, step * 2
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


class Charged(NamedTuple):
    """When units were charged, how long after that their bucket would have been full again (µs), and how many."""

    at: int
    level: int
    units: int


class Model(ABC):
    """One counter. ``rate`` comes with every question, as limits may be edited while the counter lives."""

    #: What it was last charged under, where that matters; None = never, or it does not.
    rate: Rate | None = None

    @abstractmethod
    def used(self, rate: Rate, now: int) -> Fraction:
        """Units in use at ``now``."""

    def admits(self, rate: Rate, now: int, cost: int) -> bool:
        return self.used(rate, now) + cost <= rate.capacity

    def stored(self, rate: Rate) -> int:
        """The time that it goes on at; 0 = whatever it is now."""
        return 0

    def move(self, rate: Rate, now: int) -> None:
        """Make ``now`` that time, and keep the units used."""
        raise NotImplementedError

    @abstractmethod
    def add(self, rate: Rate, now: int, units: int) -> None:
        """Charge units, or give back, with a minus, at most what is used."""

    @abstractmethod
    def give_back(self, rate: Rate, now: int, units: int, charged: Charged) -> None:
        """Give back what of a charge is still counted."""

    def clear(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]

    def reset(self, rate: Rate, now: int) -> None:
        """Forget what counts at ``now``."""
        self.clear()

    def free(self, rate: Rate, now: int) -> int:
        """Whole units free at ``now``."""
        return max(0, floor(rate.capacity - self.used(rate, now)))

    def status(self, rate: Rate, now: int, *, claim: BucketStatus | None = None) -> tuple[int, int, int | None]:
        """(remaining, reset_after_us, next_after_us)."""
        remaining = self.free(rate, now)
        hint = now + claim.reset_after_us if claim else now
        reset = first_instant(lambda t: self.used(rate, t) == 0, now, hint) - now
        if not reset:
            return remaining, 0, None
        hint = now + (claim.next_after_us or 0) if claim else now
        return remaining, reset, first_instant(lambda t: self.free(rate, t) > remaining, now, hint) - now

    def wait(self, rate: Rate, now: int, cost: int, *, claim: BucketStatus | None = None) -> int | None:
        """µs until the cost is admitted; None when it never can be."""
        if cost > rate.capacity:
            return None
        hint = now + (claim.retry_after_us or 0) if claim else now
        return first_instant(lambda t: self.admits(rate, t, cost), now, hint) - now


def begins_month(day: date, anchor: int) -> bool:
    """Whether months that begin on day ``anchor``, or on the last day of shorter ones, begin on this day."""
    return day.day == anchor or (day.day < anchor and (day + timedelta(days=1)).day == 1)


@dataclass
class FixedWindow(Model):
    """count + c <= L."""

    start: int = 0
    count: int = 0

    def window(self, rate: Rate, now: int) -> int:
        """Where the window of ``now`` begins."""
        return now // rate.period_us * rate.period_us

    def used(self, rate: Rate, now: int) -> Fraction:
        return Fraction(self.count if self.window(rate, now) <= self.start else 0)

    def stored(self, rate: Rate) -> int:
        return self.start

    def move(self, rate: Rate, now: int) -> None:
        self.start = self.window(rate, now)

    def add(self, rate: Rate, now: int, units: int) -> None:
        used = int(self.used(rate, now))
        self.count = max(0, used + units)
        self.start = max(self.start if used else 0, self.window(rate, now))

    def give_back(self, rate: Rate, now: int, units: int, charged: Charged) -> None:
        if charged.at >= max(self.start, self.window(rate, now)):
            self.add(rate, now, -units)

    def clear(self) -> None:
        self.count = 0


class CalendarWindow(Model):
    """count + c <= L, in each window for itself."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        #: Day on which calendar months begin; the last day of shorter months.
        self.anchor = 1

    def window(self, rate: Rate, now: int) -> int:
        """Where the window of ``now`` begins."""
        unit = rate.calendar
        day = datetime.fromtimestamp(now // 10**6, UTC).replace(hour=0, minute=0, second=0)
        while unit != "day" and not (day.weekday() == 0 if unit == "week" else begins_month(day, self.anchor)):
            day -= timedelta(days=1)
        return round(day.timestamp()) * 10**6

    def used(self, rate: Rate, now: int) -> Fraction:
        return Fraction(self.counts.get(self.window(rate, now), 0))

    def add(self, rate: Rate, now: int, units: int) -> None:
        window = self.window(rate, now)
        self.counts[window] = max(0, self.counts.get(window, 0) + units)

    def give_back(self, rate: Rate, now: int, units: int, charged: Charged) -> None:
        self.add(rate, charged.at, -units)

    def reset(self, rate: Rate, now: int) -> None:
        self.counts.pop(self.window(rate, now), None)

    def end(self, rate: Rate, now: int) -> int:
        """When the window of ``now`` ends, whatever the next one holds already."""
        later = now
        while self.window(rate, later) == self.window(rate, now):
            later += 86_400 * 10**6
        return self.window(rate, later)

    def status(self, rate: Rate, now: int, *, claim: BucketStatus | None = None) -> tuple[int, int, int | None]:
        reset = self.end(rate, now) - now if self.used(rate, now) else 0
        return self.free(rate, now), reset, reset or None

    def wait(self, rate: Rate, now: int, cost: int, *, claim: BucketStatus | None = None) -> int | None:
        if cost > rate.capacity:
            return None
        return 0 if self.admits(rate, now, cost) else self.end(rate, now) - now


class SlidingWindowLog(Model):
    """(entries newer than now - P) + c <= L."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int]] = []

    def at(self, now: int) -> int:
        return max(now, self.entries[-1][0]) if self.entries else now

    def used(self, rate: Rate, now: int) -> Fraction:
        since = self.at(now) - rate.period_us
        return Fraction(sum(units for time, units in self.entries if time > since))

    def stored(self, rate: Rate) -> int:
        return self.at(0)

    def move(self, rate: Rate, now: int) -> None:
        self.entries = [(now, int(self.used(rate, now)))]

    def add(self, rate: Rate, now: int, units: int) -> None:
        at = self.at(now)
        if units:
            self.entries = [entry for entry in self.entries if entry[0] > at - rate.period_us]
        if units > 0:
            self.entries.append((at, units))
        while units < 0 and self.entries:  # the newest requests' units go back first
            time, held = self.entries.pop()
            if held > -units:
                self.entries.append((time, held + units))
            units = min(0, held + units)

    def give_back(self, rate: Rate, now: int, units: int, charged: Charged) -> None:
        kept = []
        for time, held in self.entries:
            taken = min(held, units) if time == charged.at > self.at(now) - rate.period_us else 0
            units -= taken
            if held > taken:
                kept.append((time, held - taken))
        self.entries = kept


@dataclass
class SlidingWindowCounter(Model):
    """previous * (1 - elapsed/P) + current + c <= L."""

    index: int = 0
    current: int = 0
    previous: int = 0

    def windows(self, rate: Rate, now: int) -> tuple[int, int, int]:
        """(index, current, previous) as they are at ``now``."""
        index = now // rate.period_us
        if index <= self.index:
            return self.index, self.current, self.previous
        return index, 0, self.current if index == self.index + 1 else 0

    def used(self, rate: Rate, now: int) -> Fraction:
        index, current, previous = self.windows(rate, now)
        elapsed = max(0, now - index * rate.period_us)
        return previous * (1 - Fraction(elapsed, rate.period_us)) + current

    def stored(self, rate: Rate) -> int:
        return self.index * rate.period_us

    def move(self, rate: Rate, now: int) -> None:
        self.index = now // rate.period_us

    def add(self, rate: Rate, now: int, units: int) -> None:
        self.index, current, previous = self.windows(rate, now)
        self.current = max(0, current + units)
        self.previous = max(0, previous + min(0, current + units))

    def give_back(self, rate: Rate, now: int, units: int, charged: Charged) -> None:
        self.index, self.current, self.previous = self.windows(rate, now)
        window = charged.at // rate.period_us
        if window == self.index:
            self.current = max(0, self.current - units)
        elif window == self.index - 1:
            self.previous = max(0, self.previous - units)


@dataclass
class Meter(Model):
    """Units that drain at L/P: the common core of the three bucket algorithms."""

    level: Fraction = Fraction(0)
    drained: int = 0
    rate: Rate | None = None

    def drain(self, rate: Rate) -> Fraction:
        """Units a µs."""
        return Fraction(max(rate.limit, self.rate.limit if self.rate else 0), rate.period_us)

    def used(self, rate: Rate, now: int) -> Fraction:
        level = self.level
        if self.rate and (self.rate.limit, self.rate.capacity) != (rate.limit, rate.capacity):
            level = min(level, Fraction(max(rate.capacity, self.rate.capacity)))
        return max(Fraction(0), level - max(0, now - self.drained) * self.drain(rate))

    def stored(self, rate: Rate) -> int:
        return self.drained

    def move(self, rate: Rate, now: int) -> None:
        self.drained = now

    def add(self, rate: Rate, now: int, units: int) -> None:
        if units < 0:
            self.take(rate, now, Fraction(-units))
            return
        used = self.used(rate, now)
        if self.rate and self.rate.limit > rate.limit:
            used = min(used, Fraction(rate.capacity))
        self.level, self.drained, self.rate = used + units, max(self.drained, now), rate

    def give_back(self, rate: Rate, now: int, units: int, charged: Charged) -> None:
        passed = max(self.drained, now) - charged.at
        # Its share of what drains, rounded up to whole units in a period.
        share = ceil(Fraction(charged.units * rate.period_us, charged.level))
        left = charged.units - passed * (Fraction(share - rate.limit, rate.period_us) + self.drain(rate))
        if self.rate and (self.rate.limit, self.rate.capacity) != (rate.limit, rate.capacity):
            slower = self.rate.limit < rate.limit
            left = min(left, Fraction(self.rate.capacity if slower else max(self.rate.capacity, rate.capacity)))
        self.take(rate, now, min(Fraction(units), left))

    def take(self, rate: Rate, now: int, units: Fraction) -> None:
        """By the rate it was written under."""
        used, at = self.used(self.rate or rate, now), max(self.drained, now)
        self.level, self.drained = max(Fraction(0), used - max(Fraction(0), units)), at
        if not self.level:
            self.clear()


class TokenBucket(Meter):
    """min(B, tokens + elapsed * L/P) >= c; held as tokens missing from B, which an edit keeps."""

    def admits(self, rate: Rate, now: int, cost: int) -> bool:
        return min(Fraction(rate.capacity), rate.capacity - self.used(rate, now)) >= cost


class LeakyBucket(Meter):
    """max(0, level - elapsed * L/P) + c <= B."""


class Gcra(Meter):
    """max(TAT, now) + c * P/L - now <= B * P/L."""

    def admits(self, rate: Rate, now: int, cost: int) -> bool:
        interval = Fraction(rate.period_us, rate.limit)
        arrival = now + self.used(rate, now) * interval
        return arrival + cost * interval - now <= rate.capacity * interval


class Queue(Model):
    """A slot is c intervals after the last one; as if that were B intervals ago at most, and now at the earliest."""

    def __init__(self) -> None:
        self.slot: int | None = None
        self.written = 0

    def interval(self, rate: Rate) -> int:
        return ceil(Fraction(rate.period_us, rate.limit))

    def last(self, rate: Rate, now: int) -> int:
        saved = max(now, self.written) - rate.capacity * self.interval(rate)
        return saved if self.slot is None else max(self.slot, saved)

    def used(self, rate: Rate, now: int) -> Fraction:
        saved = Fraction(max(now, self.written) - self.last(rate, now), self.interval(rate))
        return rate.capacity - saved

    def stored(self, rate: Rate) -> int:
        return self.written

    def move(self, rate: Rate, now: int) -> None:
        if self.slot is not None:
            self.slot += now - self.written
        self.written = now

    def add(self, rate: Rate, now: int, units: int) -> None:
        if units < 0:
            self.take(rate, now, -units, self.last(rate, now) + rate.capacity * self.interval(rate))
        elif units:
            self.write(rate, now, self.last(rate, now) + units * self.interval(rate))

    def give_back(self, rate: Rate, now: int, units: int, charged: Charged) -> None:
        self.take(rate, now, units, charged.at + charged.level)

    def take(self, rate: Rate, now: int, units: int, full_at: int) -> None:
        """Give back units of a booking after which the queue would have been at rest at ``full_at``."""
        at, last = max(now, self.written), self.last(rate, now)
        own_slot = full_at - rate.capacity * self.interval(rate)
        if last > at and last > own_slot:
            units = 0
        self.write(rate, now, last - max(0, min(units * self.interval(rate), full_at - at)))

    def write(self, rate: Rate, now: int, slot: int) -> None:
        self.slot, self.written, self.rate = slot, max(now, self.written), rate
        if not self.used(rate, now):
            self.clear()


MODELS: dict[str, type[Model]] = {
    "fixed_window": FixedWindow,
    "sliding_window_log": SlidingWindowLog,
    "sliding_window_counter": SlidingWindowCounter,
    "token_bucket": TokenBucket,
    "leaky_bucket": LeakyBucket,
    "gcra": Gcra,
}


def units_of(verb: str, rate: Rate, cost: int) -> int:
    """What a verb of ``cost`` units takes from the counter of one rate, or gives back to it."""
    if rate.counts == "requests":
        return 0 if verb in ("charge", "refund") else 1
    return cost


def judge(
    verb: str,
    models: list[Model],
    rates: list[Rate],
    now: int,
    cost: int,
    *,
    logged: frozenset[int] = frozenset(),
    patience_us: int = 0,
    claims: list[BucketStatus] | None = None,
) -> tuple[bool, list[Outcome]]:
    """What a verb decides over several counters at one instant, all charged or none.

    ``logged`` are the positions of buckets in log mode. ``claims`` (the engine's statuses) only save time.
    """
    hints: list[BucketStatus | None] = list(claims) if claims else [None] * len(models)
    costs = [units_of(verb, rate, cost) for rate in rates]
    models = [deepcopy(model) if verb == "peek" else model for model in models]
    for model, rate in zip(models, rates, strict=True):
        if model.stored(rate) - now > max(rate.period_us, 60 * 10**6):
            model.move(rate, now)
    waits = [
        model.wait(rate, now, units, claim=hint)
        for model, rate, units, hint in zip(models, rates, costs, hints, strict=True)
    ]
    if verb in ("charge", "refund"):
        waits = [0] * len(models)
    passed = [wait is not None and wait <= patience_us for wait in waits]
    allowed = all(ok or position in logged for position, ok in enumerate(passed))
    outcomes = []
    for model, rate, units, ok, wait, hint in zip(models, rates, costs, passed, waits, hints, strict=True):
        if allowed and ok and verb != "peek" and units:
            model.add(rate, now, -units if verb == "refund" else units)
        remaining, reset, more = model.status(rate, now, claim=hint)
        outcomes.append(Outcome(ok, remaining, wait, reset, more))
    return allowed, outcomes
