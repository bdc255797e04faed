"""Subjects that have used half of a rate or more in the window that runs now, kept in Redis for the Quotas page.

Only rates without checkpoints, whose rows are listed instead (``QuotaWindow``), and windows of an hour or more:
shorter ones end before an operator has read the page. What is kept are candidates with the percentage at one of
their last requests; readers peek their counters. Everything is bounded: a process holds at most ``MAX_NOTED``
statuses that are not sent yet, and ``lua/near.lua`` bounds what Redis keeps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from typing import Literal, NamedTuple

from ..conf import settings
from ..engine.calendar_windows import window_end_us
from ..engine.keys import statistics_key
from ..engine.limiter import Limiter
from ..engine.rates import DEFAULT_ALGORITHM, MONTH, Rate, format_period
from ..engine.scripts import NEAR
from ..engine.types import Bucket, BucketStatus
from ..runtime import default_limiter
from ..store.base import reading, run_script
from ..utils.bounded_cache import BoundedCache
from ..utils.sansio import drive
from . import checkpoints
from .packing import HOUR, read

#: Percentages of a limit that operators choose from. Below the first, nothing is kept.
LEVELS = (50, 80, 100)
#: The shortest window (µs) of which subjects are kept.
MIN_WINDOW_US = HOUR * 10**6
#: Statuses noted and not sent yet.
MAX_NOTED = 10_000
#: Most subjects of a window in Redis; the least full are dropped. Most of one policy (see ``near.lua``): a flood of
#: addresses under one policy leaves room for the subjects of others.
MAX_KEPT, MAX_OF_POLICY = 100_000, 20_000
#: Subjects remembered as sent, so that they are sent again when their percentage changes, or a minute later.
_MAX_SENT = 20_000
#: Most subjects sent by one command, and best read by one: Redis serves nobody else meanwhile.
_SLICE, CHUNK = 500, 5_000


class Window(NamedTuple):
    """Where subjects of all rates with one algorithm and period are kept together."""

    algorithm: str
    period: float | Literal["month"]

    @classmethod
    def of(cls, rate: Rate) -> Window:
        """Return the window of a rate."""
        return cls(rate.algorithm, rate.period)

    @classmethod
    def named(cls, name: str) -> Window:
        """Return the window with this name; raises ``ValueError`` for any other text."""
        algorithm, _colon, period = name.partition(":")
        return cls.of(Rate(limit=1, period=MONTH if period == MONTH else float(period), algorithm=algorithm))

    @property
    def name(self) -> str:
        """Return the name in Redis and in addresses: ``fixed_window:month``."""
        return f"{self.algorithm}:{self.period}"

    @property
    def rate(self) -> Rate:
        """Return a rate with this window."""
        return Rate(limit=1, period=self.period, algorithm=self.algorithm)

    @property
    def title(self) -> str:
        """Return it as limits are named: ``month``, ``day``, ``day fixed_window``."""
        plain = self.algorithm == DEFAULT_ALGORITHM or self.period == MONTH
        return f"{format_period(self.period)}{'' if plain else f' {self.algorithm}'}"

    @property
    def order(self) -> tuple[object, ...]:
        """Return the key to sort by: calendar windows first, then the longest."""
        return not self.rate.calendar, -self.rate.period_us, self.algorithm


class Candidate(NamedTuple):
    """A counter that was half used or more when it was last sent, and the policy that limited it then."""

    policy_id: int
    endpoint_id: int | None
    counted_per: str
    counts: str
    subject: str
    anchor: int

    @classmethod
    def of(cls, bucket: Bucket) -> Candidate:
        """Return the candidate of a policy's bucket."""
        place = (bucket.policy_id or 0, bucket.endpoint_id, bucket.counted_per)
        return cls(*place, bucket.rate.counts, bucket.subject, bucket.anchor)

    @property
    def member(self) -> bytes:
        """Return it as Redis keeps it."""
        # surrogatepass: lone surrogates are text too.
        return json.dumps(self, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")

    def is_of(self, bucket: Bucket, window: Window) -> bool:
        """Return whether this is the bucket's counter."""
        place = (bucket.subject, bucket.endpoint_id, bucket.counted_per, bucket.rate.counts)
        return place == (self.subject, self.endpoint_id, self.counted_per, self.counts) and (
            Window.of(bucket.rate) == window
        )


class Noted:
    """The statuses that this process has noted and not sent yet."""

    def __init__(self) -> None:
        #: id of a bucket -> its last status, and when that was (µs). The status keeps the bucket, and so the id.
        self._statuses: dict[int, tuple[int, BucketStatus]] = {}
        #: (window's name, its end, member) -> (percent, minute) as last sent.
        self._sent: BoundedCache[tuple[int, int]] = BoundedCache(_MAX_SENT)

    def note(self, status: BucketStatus, at_us: int) -> None:
        """Note the status of a bucket that is half used or more; ``at_us`` 0 = the store was not reached."""
        bucket = status.bucket
        if bucket.durable and settings.checkpoint_seconds and not checkpoints.in_test_run():
            return
        if at_us and bucket.policy_id is not None and len(self._statuses) < MAX_NOTED:
            self._statuses[id(bucket)] = at_us, status

    def send(self, limiter: Limiter) -> None:
        """Send what has changed to Redis. Raises ``StoreError``; then that is lost."""
        kept: dict[tuple[Window, int], dict[bytes, tuple[int, int]]] = {}
        for _ in range(len(self._statuses)):
            at_us, status = self._statuses.popitem()[1]
            member, window = Candidate.of(status.bucket).member, Window.of(status.bucket.rate)
            sent = percent_used(status), at_us // (60 * 10**6)
            for end in _ends(status, at_us, limiter):
                if self._sent.get((window, end, member)) != sent:
                    kept.setdefault((window, end), {}).setdefault(member, sent)
        for (window, end), members in kept.items():
            keep(window, end, {member: percent for member, (percent, _minute) in members.items()}, limiter)
            for member, sent in members.items():
                self._sent.put((window, end, member), sent)

    def clear(self) -> None:
        """Drop everything that is not sent yet."""
        self._statuses.clear()


def percent_used(status: BucketStatus) -> int:
    """Return the whole percent of the limit that is used."""
    return 100 * status.used // status.limit


def window_end(window: Window, limiter: Limiter) -> int:
    """Return when the window that runs now ends, as Unix time (s)."""
    return window_end_us(window.rate, limiter.now_us, limiter.time_zone) // 10**6


def keep(window: Window, end: int, percents: Mapping[bytes, int], limiter: Limiter) -> dict[int, int]:
    """Store the members with their percentages, or remove those below 50; raises ``StoreError``.

    Returns level -> how many members have that or more, for each of ``LEVELS``.
    """
    names = ("near", f"near:{window.name}:{end}", f"near:{window.name}:{end}:policies")
    keys = [statistics_key(limiter.prefix, name) for name in names]
    head = (window.name, end, max(1, end - limiter.now_us // 10**6), MAX_KEPT, MAX_OF_POLICY)
    pairs = list(percents.items())
    for at in range(0, max(1, len(pairs)), _SLICE):
        args = (*head, *chain.from_iterable(pairs[at : at + _SLICE]))
        counts = drive(run_script(NEAR, keys, args), limiter.store.call().do)
    return dict(zip(LEVELS, counts, strict=True))


@reading()
def windows() -> list[Window]:
    """Return the windows with subjects: calendar windows first, then the longest; raises ``StoreError``."""
    names = read("ZRANGE", "near", default_limiter().now_us // 10**6, "+inf", "BYSCORE")
    return sorted((Window.named(name.decode()) for name in names), key=lambda window: window.order)


@reading()
def candidates(window: Window, level: int, start: int, most: int) -> list[Candidate]:
    """Return up to ``most`` candidates of the window that runs now at ``level`` percent or more.

    The fullest come first, without the ``start`` first ones. Raises ``StoreError``.
    """
    key = f"near:{window.name}:{window_end(window, default_limiter())}"
    members = read("ZRANGE", key, "+inf", level, "BYSCORE", "REV", "LIMIT", start, most)
    # Parsed as one text, in a fifth of the time.
    text = b",".join(members).decode(errors="surrogatepass")
    return [Candidate(*row) for row in json.loads(f"[{text}]")]


def _ends(status: BucketStatus, at_us: int, limiter: Limiter) -> tuple[int, ...]:
    """Return the ends of the windows in which the bucket is half used or more, if it is not used any further."""
    rate = status.bucket.rate
    end_us = window_end_us(rate, at_us, limiter.time_zone)
    if at_us + status.reset_after_us <= end_us:
        return (end_us // 10**6,)
    # Other algorithms, and months that begin on a customer's day, have no common window. Their subjects are kept
    # until the next multiple of the period or end of a month, and in the list that follows if they refill later.
    return end_us // 10**6, window_end_us(rate, end_us, limiter.time_zone) // 10**6
