"""Rates: how much is allowed, per how long; and rate text, such as ``10/s, 1000/15min burst 50``. The one parser.

rates := rate ("," rate)* | "unlimited" | "blocked"
rate  := LIMIT ["requests" | "units"] "/" [N] unit ["burst" N] [algorithm] | LIMIT "concurrent" ["requests"]
unit  := s|sec|second, m|min|minute, h|hour, d|day, w|week, month   (plurals too)
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from ..exceptions import InvalidRate

ALGORITHMS = ("fixed_window", "sliding_window_log", "sliding_window_counter", "token_bucket", "leaky_bucket", "gcra")
DEFAULT_ALGORITHM = "token_bucket"
#: The algorithm of ``20 concurrent``: how many requests run at once. It counts no requests over time, so it is no
#: choice where ``ALGORITHMS`` are, and no default.
CONCURRENT = "concurrent"
#: Most concurrent requests of one counter, as the server keeps 32 bytes of each and reads all of them in each check.
MAX_CONCURRENT = 1000
#: What a rate counts: the units that requests consume, or the requests themselves.
COUNTS = ("units", "requests")
#: Algorithms whose capacity (``burst``) may differ from the limit.
BURST_ALGORITHMS = frozenset({"token_bucket", "leaky_bucket", "gcra"})

UNLIMITED: Literal["unlimited"] = "unlimited"
BLOCKED: Literal["blocked"] = "blocked"

#: Largest limit, burst and cost. Far above any use, and every sum of a few stays exact in a double.
MAX_UNITS = 10**12
#: Ten years; longer periods are a typo.
MAX_PERIOD_US = 3653 * 86_400 * 10**6
MIN_PERIOD_US = 1_000
MONTH: Literal["month"] = "month"
#: The longest month, where one number is needed; ``calendar_windows`` returns the exact window.
MONTH_US = 31 * 86_400 * 10**6
#: Most characters of rate text.
MAX_TEXT = 255

_SECOND = 10**6
#: Canonical unit -> µs; the largest first, because ``format_period`` uses the first that divides a period.
UNITS = {
    "week": 604_800 * _SECOND,
    "day": 86_400 * _SECOND,
    "hour": 3_600 * _SECOND,
    "min": 60 * _SECOND,
    "s": _SECOND,
}
#: Periods (µs) whose fixed windows are aligned to the calendar.
_CALENDAR: dict[int, Literal["day", "week"]] = {UNITS["day"]: "day", UNITS["week"]: "week"}

_UNIT_NAMES = {
    name: unit
    for unit, names in {
        "s": "s sec secs second seconds",
        "min": "m min mins minute minutes",
        "hour": "h hr hrs hour hours",
        "day": "d day days",
        "week": "w week weeks",
        "month": "month months",
    }.items()
    for name in names.split()
}


def gettext_noop(text: str) -> str:
    """Mark a text for translation. Django is not imported here; makemessages finds the name."""
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How much is allowed: ``limit`` units (or requests) per ``period``, with a capacity and an algorithm.

    Raises ``InvalidRate`` for numbers out of range, and for combinations that no algorithm counts.

    >>> Rate.parse("100/min burst 20")
    Rate(limit=100, period=60, burst=20, algorithm='token_bucket', counts='units')
    """

    #: Units or requests admitted per period, a whole number from 1 to 10**12; 100 in ``100/min``.
    limit: int
    #: Seconds, 0.001 to ten years (60 in ``100/min``), or ``"month"`` for the calendar month.
    period: float | Literal["month"]
    #: Capacity B of token_bucket, leaky_bucket and gcra: the most units admitted at one instant; None = ``limit``.
    burst: int | None = None
    #: One of ``ALGORITHMS``, or ``CONCURRENT``; ``month`` is always ``fixed_window``.
    algorithm: str = DEFAULT_ALGORITHM
    #: ``units``: a request takes its cost. ``requests``: it takes 1 whatever its cost, 0 included, and units that are
    #: charged, refunded or settled afterwards leave the counter alone; ``60 requests/min``.
    counts: Literal["units", "requests"] = "units"
    #: The most units the bucket holds (B); 20 for ``100/min burst 20``, 100 for ``100/min``.
    capacity: int = field(init=False, repr=False, compare=False)
    #: The period in µs; a month counts as 31 days, as its exact window comes from the calendar.
    period_us: int = field(init=False, repr=False, compare=False)
    #: The calendar unit that the rate's windows are aligned to; "" = none.
    calendar: Literal["", "day", "week", "month"] = field(init=False, repr=False, compare=False)
    #: Whether it limits how many requests run at once; its period is a second, after which it is worth trying again.
    concurrent: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "limit", _check_units(gettext_noop("limit"), self.limit))
        if self.counts not in COUNTS:
            text = gettext_noop("a rate counts units or requests, not %(value)s")
            raise InvalidRate(text, value=show(self.counts))
        object.__setattr__(self, "concurrent", self.algorithm == CONCURRENT)
        if self.concurrent:
            self._check_concurrent()
        elif self.algorithm not in ALGORITHMS:
            text = gettext_noop("unknown algorithm %(name)s (known: %(known)s)")
            raise InvalidRate(text, name=repr(self.algorithm), known=", ".join(ALGORITHMS))
        if self.period == MONTH:
            if self.algorithm == DEFAULT_ALGORITHM:
                object.__setattr__(self, "algorithm", "fixed_window")
            if self.algorithm != "fixed_window":
                raise _month_is_calendar(self.limit, self.algorithm)
        else:
            _check_period(self.period)
            if isinstance(self.period, float) and self.period.is_integer():
                object.__setattr__(self, "period", int(self.period))
        if self.burst is not None:
            object.__setattr__(self, "burst", _check_units(gettext_noop("burst"), self.burst))
            if self.algorithm not in BURST_ALGORITHMS:
                text = gettext_noop("'burst %(burst)s' needs one of the algorithms %(known)s, not %(algorithm)s")
                known = ", ".join(sorted(BURST_ALGORITHMS))
                raise InvalidRate(text, known=known, algorithm=self.algorithm, burst=self.burst)
        object.__setattr__(self, "capacity", self.limit if self.burst is None else self.burst)
        period_us = MONTH_US if self.period == MONTH else round(self.period * _SECOND)
        calendar = MONTH if self.period == MONTH else _CALENDAR.get(period_us, "")
        object.__setattr__(self, "period_us", period_us)
        object.__setattr__(self, "calendar", calendar if self.algorithm == "fixed_window" else "")

    def _check_concurrent(self) -> None:
        if self.limit > MAX_CONCURRENT:
            text = gettext_noop("at most %(most)s requests may be concurrent, not %(limit)s")
            raise InvalidRate(text, most=MAX_CONCURRENT, limit=self.limit)
        object.__setattr__(self, "period", 1)
        object.__setattr__(self, "counts", "requests")

    def units(self, cost: int) -> int:
        """Return what a request of ``cost`` units takes from the bucket."""
        return 1 if self.counts == "requests" else cost

    @property
    def interval_us(self) -> int:
        """µs between the slots of a queue, rounded up: 5,000,000 for ``12/min``."""
        return -(-self.period_us // self.limit)

    @classmethod
    def parse(cls, text: str, algorithm: str = DEFAULT_ALGORITHM) -> Rate:
        """Read one rate, such as ``100/min burst 20 gcra``; ``algorithm`` is the default when it names none.

        Raises ``InvalidRate``: what was expected, at which character (counted from 1).
        """
        _check_text(text)
        return _read_rate(text)[0].by(algorithm)

    def __str__(self) -> str:
        return format_rate(self, named=self.algorithm != DEFAULT_ALGORITHM)


@lru_cache(maxsize=1024)
def parse_rates(text: str, algorithm: str = DEFAULT_ALGORITHM) -> tuple[Rate, ...] | Literal["unlimited", "blocked"]:
    """Read a policy's rates: a tuple in the order written, or the words ``unlimited`` and ``blocked``.

    Raises ``InvalidRate`` also when two rates share algorithm, period and what they count, as they would share one
    counter.
    """
    written = _read_rates(text)
    if isinstance(written, str):
        return written
    rates = tuple(one.by(algorithm) for one in written)
    seen: dict[tuple[object, ...], Rate] = {}
    for rate in rates:
        first = seen.setdefault((rate.algorithm, rate.period, rate.counts), rate)
        if first is not rate:
            text = gettext_noop(
                "'%(one)s' and '%(other)s' have the same algorithm and period, so keep only the stricter one"
            )
            raise InvalidRate(text, one=str(first), other=str(rate))
    return rates


@lru_cache(maxsize=1024)
def normalize_rates(text: str) -> str:
    """Return the canonical text of a policy's rates: ``1000 / 60sec`` becomes ``1000/min``.

    It names an algorithm only where the text does: else the rate keeps following its policy's default.
    """
    written = _read_rates(text)
    if isinstance(written, str):
        return written
    canonical = ", ".join(format_rate(rate, named=named) for rate, named in written)
    if len(canonical) > MAX_TEXT:
        text = gettext_noop("rates may have at most %(most)s characters in canonical form, not %(length)s")
        raise InvalidRate(text, most=MAX_TEXT, length=len(canonical))
    return canonical


@lru_cache(maxsize=1024)
def format_period(period: float | Literal["month"]) -> str:
    """Return the period as rate text: ``60`` -> ``min``, ``900`` -> ``15min``, ``0.5`` -> ``0.5s``."""
    if period == MONTH:
        return MONTH
    period_us = round(period * _SECOND)
    for unit, size in UNITS.items():
        count, rest = divmod(period_us, size)
        if count and not rest:
            return unit if count == 1 else f"{count}{unit}"
    return f"{period}s"


def format_rate(rate: Rate, *, named: bool) -> str:
    """Return the rate as text, with its algorithm where that is to be ``named``."""
    if rate.concurrent:
        return f"{rate.limit} {CONCURRENT}"
    text = f"{rate.limit}{' requests' if rate.counts == 'requests' else ''}/{format_period(rate.period)}"
    if rate.burst is not None:
        text += f" burst {rate.burst}"
    return f"{text} {rate.algorithm}" if named and rate.period != MONTH else text


def as_integer(value: object) -> int | None:
    """Return the plain ``int`` of a whole number of any type, such as an enum; None for bool and all else.

    redis-py would send the repr of an enum.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # TypeError: no whole number
    except TypeError:
        return None


def _check_units(what: str, value: object) -> int:
    units = as_integer(value)
    if units is None or not 1 <= units <= MAX_UNITS:
        text = gettext_noop("%(what)s must be a whole number from 1 to %(most)s, not %(value)s")
        raise InvalidRate(text, what=what, most=MAX_UNITS, value=show(value))
    return units


def _check_period(period: object) -> None:
    if (
        not isinstance(period, int | float)
        or isinstance(period, bool)
        or not MIN_PERIOD_US <= period * _SECOND <= MAX_PERIOD_US
    ):
        text = gettext_noop("period must be 0.001 to %(most)s seconds, or 'month', not %(value)s")
        raise InvalidRate(text, most=MAX_PERIOD_US // _SECOND, value=show(period))


def show(value: object) -> str:
    """Return the value's repr for a message, cut to 40 characters."""
    try:
        text = repr(value)
    except ValueError:  # an int of more than 4300 digits refuses to print
        return "a number that large"
    return text if len(text) <= 40 else text[:40] + "…"


class _Written(NamedTuple):
    """One rate of a text."""

    #: By ``DEFAULT_ALGORITHM`` where it names none.
    rate: Rate
    named: bool

    def by(self, default: str) -> Rate:
        """Return the rate, by the ``default`` algorithm where it names none; raises ``InvalidRate``."""
        return self.rate if self.named or self.rate.period == MONTH else replace(self.rate, algorithm=default)


_NUMBER = "[0-9][0-9_]*"
#: One rate, as far as it can be read: the match ends where something else is expected.
_RATE = re.compile(
    rf"\s*(?:(?P<limit>{_NUMBER})\s*(?:(?P<concurrent>{CONCURRENT})\b\s*(?:requests?\b\s*)?|"
    rf"(?:(?P<counts>requests?|units?)\b\s*)?"
    rf"(?:(?P<per>/)\s*(?:(?P<count>{_NUMBER})\s*)?(?:(?P<unit>{'|'.join(_UNIT_NAMES)})(?![a-z])\s*"
    rf"(?:burst\s+(?P<burst>{_NUMBER})\s*)?(?:(?P<algorithm>{'|'.join(ALGORITHMS)})(?![a-z_])\s*)?)?)?)?)?",
    re.ASCII | re.IGNORECASE,
)
#: What is expected where the match lacks a part.
_EXPECTED = {
    "limit": gettext_noop("a limit (a number)"),
    "per": gettext_noop("'/'"),
    "unit": gettext_noop("a unit (s, min, hour, day, week or month)"),
}


def _read_rates(text: str) -> list[_Written] | Literal["unlimited", "blocked"]:
    _check_text(text)
    words = [word.strip() for word in text.lower().split(",")]
    for word in (UNLIMITED, BLOCKED):
        if words == [word]:
            return word
        if word in words:
            raise InvalidRate(gettext_noop("%(word)s cannot be combined with other rates"), word=word)
    written, end = [], -1
    while end < len(text):
        one, end = _read_rate(text, end + 1, more=True)
        written.append(one)
    return written


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise InvalidRate(gettext_noop("a rate is text such as 100/min, not %(value)s"), value=show(text))
    if len(text) > MAX_TEXT:
        template = gettext_noop("rates may have at most %(most)s characters, not %(length)s")
        raise InvalidRate(template, most=MAX_TEXT, length=len(text))


def _read_rate(text: str, start: int = 0, *, more: bool = False) -> tuple[_Written, int]:
    """Return the rate that begins at ``start``, and where it ends: ``more`` = at a comma too."""
    found = next(_RATE.finditer(text, start))  # what it matches may be empty
    end = found.end()
    if not (found["unit"] or found["concurrent"]) or not (end == len(text) or (more and text[end] == ",")):
        raise _expected(found)
    part = {name: text.lower() for name, text in found.groupdict("").items()}
    limit, count, burst = (int(part[name].replace("_", "") or 1) for name in ("limit", "count", "burst"))
    if part["concurrent"]:
        return _Written(Rate(limit=limit, period=1, algorithm=CONCURRENT), named=True), end
    unit, algorithm = _UNIT_NAMES[part["unit"]], part["algorithm"]
    if unit == MONTH and count != 1:
        template = gettext_noop("months are counted one by one, so write %(limit)s/month or %(limit)s/%(days)sday")
        raise InvalidRate(template, limit=limit, days=30 * count)
    if unit == MONTH and algorithm not in ("", "fixed_window"):
        raise _month_is_calendar(limit, algorithm)
    rate = Rate(
        limit=limit,
        counts="requests" if part["counts"].startswith("r") else "units",
        period=MONTH if unit == MONTH else count * (UNITS[unit] // _SECOND),
        burst=burst if part["burst"] else None,
        # Because readers differ in their default, a bad period or burst is refused here, by the one that allows most.
        algorithm=algorithm or DEFAULT_ALGORITHM,
    )
    return _Written(rate, bool(algorithm)), end


def _expected(found: re.Match[str]) -> InvalidRate:
    """Return the error of a rate that could be read only as far as ``found``."""
    what, among = next((what for part, what in _EXPECTED.items() if not found[part]), ""), ""
    if found["concurrent"]:
        what = gettext_noop("the end")
    elif not what:
        what, among = gettext_noop("the end, 'burst' and a number, or an algorithm"), f" ({', '.join(ALGORITHMS)})"
    rest = found.string[found.end() :].strip()
    if rest:
        text = gettext_noop("expected %(what)s%(known)s at character %(at)s, not %(rest)s (example: %(rate)s)")
    else:
        text = gettext_noop("expected %(what)s%(known)s at character %(at)s, but the text ends (example: %(rate)s)")
    limit = int((found["limit"] or "0").replace("_", ""))
    limit = limit if 1 <= limit <= MAX_UNITS else 100
    rate = f"{limit} {CONCURRENT}" if found["concurrent"] else f"{limit}/min"
    return InvalidRate(text, what=what, known=among, at=found.end() + 1, rest=show(rest), rate=rate)


def _month_is_calendar(limit: int, algorithm: str) -> InvalidRate:
    text = gettext_noop(
        "a month is counted in calendar windows, not by %(algorithm)s, so drop the algorithm or write "
        "%(limit)s/30day %(algorithm)s"
    )
    return InvalidRate(text, algorithm=algorithm, limit=limit)
