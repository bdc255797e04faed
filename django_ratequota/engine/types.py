"""What a check takes and returns about each bucket: plain values that know neither Django nor Redis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, overload

from ..exceptions import InvalidCost
from .rates import CONCURRENT, DEFAULT_ALGORITHM, MAX_UNITS, MONTH, Rate, as_integer, format_period

_SECOND = 10**6
#: Numbers of a ``Reply`` for each bucket, and which of them are the units left, µs until it is full, and until these
#: units grow.
EACH, LEFT, RESETS, GROWS = 5, 1, 3, 4
_new = object.__new__


@dataclass(slots=True)
class Bucket:
    """One rate applied to one subject: one counter, one Redis key. Read it only.

    The counter is named by ``subject``, ``scope``, and the rate's algorithm, period and what it counts. Buckets that
    agree in these share it, whatever their limits.
    """

    #: Whom the counter belongs to, as ``kind:value``: ``user:42``, ``ip:203.0.113.7``, ``everyone``.
    subject: str
    rate: Rate
    #: What is limited; for policies from the database, the endpoint's name, "" = all endpoints together.
    scope: str = field(default="", kw_only=True)
    #: The endpoint's primary key, which stays when it is renamed; None = the counter is named by ``scope``.
    endpoint_id: int | None = field(default=None, kw_only=True)
    #: What the policy counts per: caller | ip | plan | everyone | an identifier's name; "" = not from a policy.
    counted_per: str = field(default="", kw_only=True)
    #: What clients see in the RateLimit headers; "" = made from scope and rate.
    name: str = field(default="", kw_only=True)
    #: ``enforce`` refuses; ``log`` is checked and counted, and never refuses.
    mode: Literal["enforce", "log"] = field(default="enforce", kw_only=True)
    #: What happens while the store gives no decision: allow | deny | local; "" = the setting ON_ERROR.
    on_error: str = field(default="", kw_only=True)
    #: The RatePolicy it comes from; None outside the database.
    policy_id: int | None = field(default=None, kw_only=True)
    #: Whether what it counted outlives the store's data; for calendar windows.
    durable: bool = field(default=False, kw_only=True)
    #: Day of the month on which its calendar months begin, 1 to 31; the last day of months that are shorter.
    anchor: int = field(default=1, kw_only=True)
    #: Whether X-RateLimit-* describe it instead of the bucket with the least room.
    leads: bool = field(default=False, kw_only=True)
    #: Whether its counter is the queue of slots that ``Limiter.acquire`` books, which sets it.
    queued: bool = field(default=False, kw_only=True)
    #: Whether it is a log-only limit beside an enforced one: then it has a counter of its own.
    beside: bool = field(default=False, kw_only=True)
    # ``title`` once it is made, as every response shows it.
    _title: str = field(default="", init=False, repr=False, compare=False)

    def of(self, subject: str) -> Bucket:
        """Return a copy for another subject, in a third of the time that ``replace`` takes."""
        copy = _new(Bucket)
        copy.subject, copy.rate, copy.scope, copy.endpoint_id = subject, self.rate, self.scope, self.endpoint_id
        copy.counted_per, copy.name, copy.mode, copy.on_error = self.counted_per, self.name, self.mode, self.on_error
        copy.policy_id, copy.durable, copy.anchor = self.policy_id, self.durable, self.anchor
        copy.leads, copy.queued, copy.beside = self.leads, self.queued, self.beside
        copy._title = self.title
        return copy

    def __hash__(self) -> int:
        # Because every request hashes its buckets, only the fields that differ most.
        return hash((self.subject, self.scope, self.policy_id))

    @property
    def counter(self) -> tuple[object, ...]:
        """The counter's identity: equal for buckets that share it."""
        endpoint = self.scope if self.endpoint_id is None else self.endpoint_id
        rate = self.rate
        if self.queued:  # whatever the period: after an edit, slots follow the booked ones
            return (self.subject, endpoint, self.counted_per, "queue")
        return (self.subject, endpoint, self.counted_per, rate.algorithm, rate.period, rate.counts, self.beside)

    @property
    def title(self) -> str:
        """The name in headers and problem bodies: ``name``, or else such as ``search/min``."""
        if not self._title:
            self._title = self.name or self._made_title()
        return self._title

    def _made_title(self) -> str:
        shared = "" if self.counted_per in ("", "caller") else f" per {self.counted_per}"
        if self.rate.concurrent:
            return f"{self.scope or 'all'}/{CONCURRENT}{shared}"
        plain = self.rate.algorithm == DEFAULT_ALGORITHM or self.rate.period == MONTH
        algorithm = "" if plain else f" {self.rate.algorithm}"
        counts = " requests" if self.rate.counts == "requests" else ""
        return f"{self.scope or 'all'}/{format_period(self.rate.period)}{counts}{algorithm}{shared}"


class Patterns:
    """Buckets that are copied for many subjects. Compared by identity."""

    __slots__ = ("buckets",)

    def __init__(self, buckets: tuple[Bucket, ...]) -> None:
        self.buckets = buckets


class Copies(Sequence[Bucket]):
    """Copies of the same buckets, made when somebody looks at one: a check needs no more than their keys.

    A part of them is a plain tuple.
    """

    __slots__ = ("_made", "keys", "patterns", "subjects")

    def __init__(self, patterns: Patterns, subjects: tuple[str, ...]) -> None:
        """``subjects`` has the subject of each bucket."""
        self.patterns, self.subjects = patterns, subjects
        self._made: tuple[Bucket, ...] | None = None
        #: What is around the subjects in their keys, the keys, and these encoded; None = not made yet.
        self.keys: tuple[tuple[str, ...], tuple[str, ...], bytes] | None = None

    def __len__(self) -> int:
        return len(self.subjects)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.whole)

    @overload
    def __getitem__(self, at: int) -> Bucket: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Bucket, ...]: ...
    def __getitem__(self, at: int | slice) -> Bucket | tuple[Bucket, ...]:
        return self.whole[at]

    def __eq__(self, other: object) -> bool:
        return self is other or self.whole == (other.whole if isinstance(other, Copies) else other)

    def __hash__(self) -> int:
        return hash(self.whole)

    @property
    def whole(self) -> tuple[Bucket, ...]:
        """All of them."""
        if self._made is None:
            of = zip(self.patterns.buckets, self.subjects, strict=True)
            self._made = tuple([bucket.of(subject) for bucket, subject in of])
        return self._made


def alike(buckets: Sequence[Bucket]) -> Sequence[Bucket]:
    """Return buckets that differ from these in their subjects at most."""
    return buckets.patterns.buckets if type(buckets) is Copies else buckets


@dataclass(slots=True)
class BucketStatus:
    """One bucket at the instant of the decision, the request's own units included when it was admitted.

    Read it only. Not frozen, and made by position where every decision makes some: frozen ones take more than twice
    as long to make, and those made by keywords three times.
    """

    bucket: Bucket
    #: Whether this bucket has, or had, room for the cost.
    allowed: bool
    #: Whole units still free now; 7 after the third request of ``10/min``; never negative.
    remaining: int
    #: µs until this cost would be admitted; 0 when it was; None when it never can be (cost above capacity).
    retry_after_us: int | None
    #: µs until the bucket is back to full.
    reset_after_us: int
    #: µs that the bucket's window lasts: the calendar month's own length, else the rate's period.
    window_us: int
    #: µs until ``remaining`` next grows, without more requests: 1,000,000 for ``60/min``, to the window's end for a
    #: fixed window; None when the bucket is full, or when it is not known.
    next_after_us: int | None = None
    #: Whole units charged beyond the limit, as by ``charge``; 0 unless ``remaining`` is.
    debt: int = 0

    @property
    def limit(self) -> int:
        """The most units the bucket holds (its capacity): what ``remaining`` counts down from."""
        return self.bucket.rate.capacity

    @property
    def used(self) -> int:
        """Units taken of ``limit``, without ``debt``."""
        return self.limit - self.remaining

    @property
    def retry_after(self) -> float | None:
        """Seconds until this cost would be admitted; 0.0 when it was; None when it never can be."""
        return None if self.retry_after_us is None else self.retry_after_us / _SECOND

    @property
    def reset_after(self) -> float:
        """Seconds until the bucket is back to full."""
        return self.reset_after_us / _SECOND

    @property
    def next_after(self) -> float | None:
        """Seconds until ``remaining`` next grows; None when the bucket is full, or when it is not known."""
        return None if self.next_after_us is None else self.next_after_us / _SECOND

    @property
    def refused(self) -> bool:
        """Whether this bucket makes the decision a refusal: an enforced one without room."""
        return not self.allowed and self.bucket.mode == "enforce"


class Reply(NamedTuple):
    """What a decision found in its buckets, as numbers: few statuses that could be made of them are ever read."""

    buckets: Sequence[Bucket]
    #: µs that each bucket's window lasts.
    windows_us: tuple[int, ...]
    #: Of each bucket five: 1 if it has or had room; the units left, negative ones being debt; µs until the cost would
    #: be admitted, -1 = never; µs until it is full; µs until the units left grow, 0 = they do not, or nobody knows.
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, statuses: tuple[BucketStatus, ...]) -> Reply:
        """Return that of which ``statuses`` would be made."""
        numbers: list[int] = []
        for each in statuses:
            wait_us = -1 if each.retry_after_us is None else each.retry_after_us
            left = each.remaining or -each.debt
            numbers += (each.allowed, left, wait_us, each.reset_after_us, each.next_after_us or 0)
        windows_us = tuple([status.window_us for status in statuses])
        return cls(tuple([status.bucket for status in statuses]), windows_us, tuple(numbers))

    def statuses(self) -> tuple[BucketStatus, ...]:
        """Return the status of each bucket."""
        statuses, at = [], 0
        for bucket, window_us in zip(self.buckets, self.windows_us, strict=True):
            passed, left, wait_us, reset_us, next_us = self.numbers[at : at + EACH]
            free, debt = (left, 0) if left > 0 else (0, -left)
            wait = None if wait_us < 0 else wait_us
            statuses.append(BucketStatus(bucket, passed == 1, free, wait, reset_us, window_us, next_us or None, debt))
            at += EACH
        return tuple(statuses)


def check_cost(cost: object) -> int:
    """Return the cost as a plain ``int``; raises ``InvalidCost`` unless it is a whole number of units in range.

    Enums and NumPy's integers are whole numbers, True and False are not.
    """
    units = as_integer(cost)
    # 0 is a free request: it is checked, and charged nothing.
    if units is None or not 0 <= units <= MAX_UNITS:
        shown = f"of type {type(cost).__name__}" if units is None else "outside it"
        raise InvalidCost(f"a cost is a whole number from 0 to {MAX_UNITS}; this one is {shown}")
    return units
