"""The six algorithms as exact models: fractions instead of doubles, formulas instead of stored states.

Written from the algorithms' definitions, not from the Lua. A model answers by definition: ``retry_after`` is the
first instant at which the formula admits the cost, ``reset_after`` the first at which nothing is used. Where a
formula is silent, the rules are:

* a clock that went back: token_bucket, leaky_bucket and sliding_window_log go on at the last time they stored,
  fixed_window and sliding_window_counter in the window they stored; gcra's formula needs no rule;
* an edited limit: units used are kept. token_bucket and leaky_bucket drain by the limit of whoever asks, gcra by
  the limit that it was last written under.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from math import floor
from typing import NamedTuple

from django_ratequota import BucketStatus, Rate


class Outcome(NamedTuple):
    """What a status says of one bucket; in µs where it is a time."""

    passed: bool
    remaining: int
    retry_after_us: int | None
    reset_after_us: int

    @classmethod
    def of(cls, status: BucketStatus) -> Outcome:
        return cls(status.allowed, status.remaining, status.retry_after_us, status.reset_after_us)


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


class Model(ABC):
    """One counter. ``rate`` comes with every question, as limits may be edited while the counter lives."""

    @abstractmethod
    def used(self, rate: Rate, now: int) -> Fraction:
        """Units in use at ``now``."""

    def admits(self, rate: Rate, now: int, cost: int) -> bool:
        return self.used(rate, now) + cost <= rate.capacity

    @abstractmethod
    def add(self, rate: Rate, now: int, units: int) -> None:
        """Charge units, or give back, with a minus, at most what is used."""

    def clear(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]

    def status(self, rate: Rate, now: int, *, claim: BucketStatus | None = None) -> tuple[int, int]:
        """(remaining, reset_after_us)."""
        remaining = max(0, floor(rate.capacity - self.used(rate, now)))
        hint = now + claim.reset_after_us if claim else now
        return remaining, first_instant(lambda t: self.used(rate, t) == 0, now, hint) - now

    def wait(self, rate: Rate, now: int, cost: int, *, claim: BucketStatus | None = None) -> int | None:
        """µs until the cost is admitted; None when it never can be."""
        if cost > rate.capacity:
            return None
        hint = now + (claim.retry_after_us or 0) if claim else now
        return first_instant(lambda t: self.admits(rate, t, cost), now, hint) - now


@dataclass
class FixedWindow(Model):
    """count + c <= L."""

    start: int = 0
    count: int = 0

    def window(self, rate: Rate, now: int) -> int:
        """Where the window of ``now`` begins."""
        unit = rate.calendar
        if not unit:
            return now // rate.period_us * rate.period_us
        day = datetime.fromtimestamp(now // 10**6, UTC).replace(hour=0, minute=0, second=0)
        back = {"day": 0, "week": day.weekday(), "month": day.day - 1}[unit]
        return round((day - timedelta(days=back)).timestamp()) * 10**6

    def used(self, rate: Rate, now: int) -> Fraction:
        return Fraction(self.count if self.window(rate, now) <= self.start else 0)

    def add(self, rate: Rate, now: int, units: int) -> None:
        self.count = max(0, int(self.used(rate, now)) + units)
        self.start = max(self.start, self.window(rate, now))


class SlidingWindowLog(Model):
    """(entries newer than now - P) + c <= L."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int]] = []

    def at(self, now: int) -> int:
        return max(now, self.entries[-1][0]) if self.entries else now

    def used(self, rate: Rate, now: int) -> Fraction:
        since = self.at(now) - rate.period_us
        return Fraction(sum(units for time, units in self.entries if time > since))

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

    def add(self, rate: Rate, now: int, units: int) -> None:
        self.index, current, previous = self.windows(rate, now)
        self.current = max(0, current + units)
        self.previous = max(0, previous + min(0, current + units))


@dataclass
class TokenBucket(Model):
    """min(B, tokens + elapsed * L/P) >= c; held as tokens missing from B, which an edit keeps."""

    missing: Fraction = Fraction(0)
    refilled: int = 0

    def tokens(self, rate: Rate, now: int) -> Fraction:
        elapsed = max(0, now - self.refilled)
        tokens = rate.capacity - self.missing
        return min(Fraction(rate.capacity), tokens + elapsed * Fraction(rate.limit, rate.period_us))

    def used(self, rate: Rate, now: int) -> Fraction:
        return rate.capacity - self.tokens(rate, now)

    def admits(self, rate: Rate, now: int, cost: int) -> bool:
        return self.tokens(rate, now) >= cost

    def add(self, rate: Rate, now: int, units: int) -> None:
        self.missing = max(Fraction(0), self.used(rate, now) + units)
        self.refilled = max(self.refilled, now)


@dataclass
class LeakyBucket(Model):
    """max(0, level - elapsed * L/P) + c <= B."""

    level: Fraction = Fraction(0)
    drained: int = 0

    def used(self, rate: Rate, now: int) -> Fraction:
        elapsed = max(0, now - self.drained)
        return max(Fraction(0), self.level - elapsed * Fraction(rate.limit, rate.period_us))

    def add(self, rate: Rate, now: int, units: int) -> None:
        self.level = max(Fraction(0), self.used(rate, now) + units)
        self.drained = max(self.drained, now)


@dataclass
class Gcra(Model):
    """max(TAT, now) + c * P/L - now <= B * P/L."""

    tat: Fraction = Fraction(0)
    limit: int = 1

    def arrival(self, rate: Rate, now: int) -> Fraction:
        """max(TAT, now), with the units ahead of now re-timed when the limit was edited."""
        return now + max(Fraction(0), self.tat - now) * Fraction(self.limit, rate.limit)

    def used(self, rate: Rate, now: int) -> Fraction:
        return (self.arrival(rate, now) - now) * Fraction(rate.limit, rate.period_us)

    def admits(self, rate: Rate, now: int, cost: int) -> bool:
        interval = Fraction(rate.period_us, rate.limit)
        return self.arrival(rate, now) + cost * interval - now <= rate.capacity * interval

    def add(self, rate: Rate, now: int, units: int) -> None:
        tat = self.arrival(rate, now) + units * Fraction(rate.period_us, rate.limit)
        self.tat, self.limit = max(Fraction(now), tat), rate.limit


MODELS: dict[str, type[Model]] = {
    "fixed_window": FixedWindow,
    "sliding_window_log": SlidingWindowLog,
    "sliding_window_counter": SlidingWindowCounter,
    "token_bucket": TokenBucket,
    "leaky_bucket": LeakyBucket,
    "gcra": Gcra,
}


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
    waits = [model.wait(rate, now, cost, claim=hint) for model, rate, hint in zip(models, rates, hints, strict=True)]
    if verb in ("charge", "refund"):
        waits = [0] * len(models)
    passed = [wait is not None and wait <= patience_us for wait in waits]
    allowed = all(ok or position in logged for position, ok in enumerate(passed))
    outcomes = []
    for model, rate, ok, wait, hint in zip(models, rates, passed, waits, hints, strict=True):
        if allowed and ok and verb != "peek":
            model.add(rate, now, -cost if verb == "refund" else cost)
        remaining, reset = model.status(rate, now, claim=hint)
        outcomes.append(Outcome(ok, remaining, wait, reset))
    return allowed, outcomes
