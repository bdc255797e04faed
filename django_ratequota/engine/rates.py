"""Rates: how much is allowed, per how long. The one place where rate text is parsed and formatted.

    rates := rate ("," rate)* | "unlimited" | "blocked"
    rate  := LIMIT "/" [N] unit ["burst" N] [algorithm]
    unit  := s|sec|second, m|min|minute, h|hour, d|day, w|week, month   (plurals too)

``100/min burst 20`` or ``10/s, 1000/15min, 1_000_000/month``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from ..exceptions import InvalidRate

ALGORITHMS = (
    "fixed_window",
    "sliding_window_log",
    "sliding_window_counter",
    "token_bucket",
    "leaky_bucket",
    "gcra",
)
DEFAULT_ALGORITHM = "token_bucket"
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
#: The longest month, for whoever needs one number (the exact window comes from ``windows``).
MONTH_US = 31 * 86_400 * 10**6
#: Rate text longer than this is refused unread.
MAX_TEXT = 255

_SECOND = 10**6
#: Canonical unit -> µs, largest first, as ``format_period`` picks the largest that divides.
_UNITS = {
    "week": 604_800 * _SECOND,
    "day": 86_400 * _SECOND,
    "hour": 3_600 * _SECOND,
    "min": 60 * _SECOND,
    "s": _SECOND,
}
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
    """Marks a text to translate, for those who know Django; nothing here does."""
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How much is allowed: ``limit`` units per ``period``, with a capacity and an algorithm.

    Raises ``InvalidRate`` when the numbers make no sense together.

    >>> Rate.parse("100/min burst 20")
    Rate(limit=100, period=60, burst=20, algorithm='token_bucket')
    """

    #: Units admitted per period, a whole number from 1 to 10**12; 100 in ``100/min``.
    limit: int
    #: Seconds, 0.001 to ten years (60 in ``100/min``), or ``"month"`` for the calendar month.
    period: float | Literal["month"]
    #: Capacity B of token_bucket, leaky_bucket and gcra: the most units admitted at one instant; None = ``limit``.
    burst: int | None = None
    #: One of ``ALGORITHMS``; ``month`` is always ``fixed_window``.
    algorithm: str = DEFAULT_ALGORITHM

    def __post_init__(self) -> None:
        object.__setattr__(self, "limit", _check_units("limit", self.limit))
        if self.algorithm not in ALGORITHMS:
            text = gettext_noop("unknown algorithm %(name)s; write one of %(known)s")
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
            object.__setattr__(self, "burst", _check_units("burst", self.burst))
            if self.algorithm not in BURST_ALGORITHMS:
                text = gettext_noop(
                    "burst belongs to %(known)s, not to %(algorithm)s; "
                    "drop 'burst %(burst)s' or name one of those algorithms"
                )
                known = ", ".join(sorted(BURST_ALGORITHMS))
                raise InvalidRate(text, known=known, algorithm=self.algorithm, burst=self.burst)

    @property
    def period_us(self) -> int:
        """The period in µs; a month counts as 31 days (its exact window comes from the calendar)."""
        return MONTH_US if self.period == MONTH else round(self.period * _SECOND)

    @property
    def capacity(self) -> int:
        """B: the most units the bucket holds; 20 for ``100/min burst 20``, 100 for ``100/min``."""
        return self.limit if self.burst is None else self.burst

    @property
    def calendar(self) -> Literal["", "day", "week", "month"]:
        """The calendar unit this rate's windows are aligned to, or "" when they are not."""
        if self.algorithm != "fixed_window":
            return ""
        if self.period == MONTH:
            return "month"
        return {86_400 * _SECOND: "day", 604_800 * _SECOND: "week"}.get(self.period_us, "")  # type: ignore[return-value]

    @classmethod
    def parse(cls, text: str, algorithm: str = DEFAULT_ALGORITHM) -> Rate:
        """Read one rate, such as ``100/min burst 20 gcra``; ``algorithm`` is the default when it names none.

        Raises ``InvalidRate`` saying what was expected, at which character (counted from 1).
        """
        return _read_rate(_Text(text)).rate(algorithm)

    def __str__(self) -> str:
        named = None if self.algorithm == DEFAULT_ALGORITHM or self.period == MONTH else self.algorithm
        return _format(self.limit, self.period, self.burst, named)


@lru_cache(maxsize=1024)
def parse_rates(text: str, algorithm: str = DEFAULT_ALGORITHM) -> tuple[Rate, ...] | Literal["unlimited", "blocked"]:
    """Read a policy's rates: a tuple in the order written, or the words ``unlimited`` and ``blocked``.

    Raises ``InvalidRate`` also when two rates share algorithm and period: they would share one counter.
    """
    specs = _read_rates(text)
    if isinstance(specs, str):
        return specs
    rates = tuple(spec.rate(algorithm) for spec in specs)
    seen: dict[tuple[str, object], Rate] = {}
    for rate in rates:
        twin = seen.setdefault((rate.algorithm, rate.period), rate)
        if twin is not rate:
            text = gettext_noop("'%(one)s' and '%(other)s' have the same algorithm and period; keep the stricter one")
            raise InvalidRate(text, one=str(twin), other=str(rate))
    return rates


@lru_cache(maxsize=1024)
def normalize_rates(text: str) -> str:
    """The canonical text of a policy's rates: ``1000 / 60sec`` becomes ``1000/min``.

    An algorithm is kept where it was named and left out where it was not, so that such a rate goes on
    following its policy's default.
    """
    specs = _read_rates(text)
    if isinstance(specs, str):
        return specs
    canonical = ", ".join(_format(spec.limit, spec.period, spec.burst, spec.algorithm) for spec in specs)
    if len(canonical) > MAX_TEXT:
        text = gettext_noop("rates may have at most %(most)s characters in canonical form, these have %(length)s")
        raise InvalidRate(text, most=MAX_TEXT, length=len(canonical))
    return canonical


@lru_cache(maxsize=1024)
def format_period(period: float | Literal["month"]) -> str:
    """``60`` -> ``min``, ``900`` -> ``15min``, ``0.5`` -> ``0.5s``: the period as rate text writes it."""
    if period == MONTH:
        return MONTH
    period_us = round(period * _SECOND)
    for unit, size in _UNITS.items():
        count, rest = divmod(period_us, size)
        if count and not rest:
            return unit if count == 1 else f"{count}{unit}"
    return f"{period}s"


def _format(limit: int, period: float | Literal["month"], burst: int | None, algorithm: str | None) -> str:
    text = f"{limit}/{format_period(period)}"
    if burst is not None:
        text += f" burst {burst}"
    return f"{text} {algorithm}" if algorithm else text


def _month_is_calendar(limit: int, algorithm: str) -> InvalidRate:
    text = gettext_noop(
        "a month is counted in calendar windows, not by %(algorithm)s; "
        "drop the algorithm, or write %(limit)s/30day %(algorithm)s"
    )
    return InvalidRate(text, algorithm=algorithm, limit=limit)


def as_integer(value: object) -> int | None:
    """Return the plain ``int`` of a whole number of any type, such as an enum; None for bool and all else.

    The repr of an enum is what redis-py would send.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # what it refuses is no whole number
    except TypeError:
        return None


def _check_units(name: str, value: object) -> int:
    units = as_integer(value)
    if units is None or not 1 <= units <= MAX_UNITS:
        text = gettext_noop("%(name)s must be a whole number from 1 to %(most)s, not %(value)s")
        raise InvalidRate(text, name=name, most=MAX_UNITS, value=show(value))
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
    """The value as a message shows it: never longer than a line, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # an int of more than 4300 digits refuses to print
        return "a number that large"
    return text if len(text) <= 40 else text[:40] + "…"


class _Spec(NamedTuple):
    """One rate as written: ``algorithm`` is None where the text names none."""

    limit: int
    period: float | Literal["month"]
    burst: int | None
    algorithm: str | None

    def rate(self, default: str) -> Rate:
        algorithm = self.algorithm
        if algorithm is None:
            algorithm = "fixed_window" if self.period == MONTH else default
        return Rate(limit=self.limit, period=self.period, burst=self.burst, algorithm=algorithm)


class _Text:
    """A cursor over rate text that reports where reading failed."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise InvalidRate(gettext_noop("a rate is text such as 100/min, not %(value)s"), value=show(text))
        if len(text) > MAX_TEXT:
            template = gettext_noop("rate text may have %(most)s characters, this has %(length)s")
            raise InvalidRate(template, most=MAX_TEXT, length=len(text))
        self.text, self.start, self.at = text, 0, 0

    def take(self, pattern: str) -> str | None:
        """The next token when it matches, blanks around it passed over; else None, and nothing is consumed."""
        match = re.compile(rf"\s*({pattern})\s*", re.ASCII | re.IGNORECASE).match(self.text, self.at)
        if match is None:
            return None
        self.start, self.at = match.start(1), match.end()
        return match[1].lower()

    def number(self, what: str) -> int:
        digits = self.take(r"[0-9][0-9_]*")
        if digits is None:
            raise self.expected(what)
        plain = digits.replace("_", "").lstrip("0") or "0"
        if len(plain) > len(str(MAX_UNITS)) or not 1 <= int(plain) <= MAX_UNITS:
            text = gettext_noop("%(what)s must be from 1 to %(most)s, at character %(at)s")
            raise InvalidRate(text, what=what, most=MAX_UNITS, at=self.start + 1)
        return int(plain)

    def expected(self, what: str, known: Iterable[str] = ()) -> InvalidRate:
        rest = self.text[self.at :].strip()
        if rest:
            text = gettext_noop(
                "expected %(what)s%(known)s at character %(at)s, not %(rest)s; write for example 100/min"
            )
        else:
            text = gettext_noop(
                "expected %(what)s%(known)s at character %(at)s, but the text ends; write for example 100/min"
            )
        among = f" ({', '.join(known)})" if known else ""
        return InvalidRate(text, what=what, known=among, at=self.at + 1, rest=show(rest))


def _read_rates(text: str) -> list[_Spec] | Literal["unlimited", "blocked"]:
    cursor = _Text(text)
    word = text.strip().lower()
    if word == UNLIMITED or word == BLOCKED:
        return word
    specs = [_read_rate(cursor, more=True)]
    while cursor.take(","):
        specs.append(_read_rate(cursor, more=True))
    return specs


def _read_rate(cursor: _Text, more: bool = False) -> _Spec:
    limit = cursor.number(gettext_noop("a limit (a number)"))
    if not cursor.take("/"):
        raise cursor.expected(gettext_noop("'/'"))
    count = cursor.number(gettext_noop("a number of units")) if cursor.take("(?=[0-9])") is not None else 1
    start = cursor.at
    unit = _UNIT_NAMES.get(cursor.take("[a-z]+") or "")
    if unit is None:
        cursor.at = start
        raise cursor.expected(gettext_noop("a unit (s, min, hour, day, week or month)"))
    if unit == MONTH and count != 1:
        template = gettext_noop("months are counted one by one: write %(limit)s/month, or %(limit)s/%(days)sday")
        raise InvalidRate(template, limit=limit, days=30 * count)
    burst = cursor.number(gettext_noop("a burst (a number)")) if cursor.take(r"burst\b") else None
    start = cursor.at
    algorithm = cursor.take("[a-z_]+")
    if algorithm is not None and algorithm not in ALGORITHMS:
        cursor.at = start
        what = gettext_noop("an algorithm") if burst is not None else gettext_noop("'burst', an algorithm")
        raise cursor.expected(what, ALGORITHMS)
    if cursor.at < len(cursor.text) and not (more and cursor.text[cursor.at] == ","):
        raise cursor.expected(gettext_noop("',' or the end") if more else gettext_noop("the end"))
    if unit == MONTH and algorithm is not None:
        if algorithm != "fixed_window":
            raise _month_is_calendar(limit, algorithm)
        algorithm = None
    period: float | Literal["month"] = MONTH if unit == MONTH else count * (_UNITS[unit] // _SECOND)
    spec = _Spec(limit, period, burst, algorithm)
    # Judged here with a lenient default, so that a bad period or burst is refused wherever text is read.
    spec.rate(DEFAULT_ALGORITHM)
    return spec
