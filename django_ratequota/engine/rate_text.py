"""Reads rate text such as ``100/min burst 20`` or ``10/s, 1000/15min, 1_000_000/month``. The one parser.

rates := rate ("," rate)* | "unlimited" | "blocked"
rate  := LIMIT ["requests" | "units"] "/" [N] unit ["burst" N] [algorithm]
unit  := s|sec|second, m|min|minute, h|hour, d|day, w|week, month   (plurals too)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from ..exceptions import InvalidRate
from .rates import (
    ALGORITHMS,
    BLOCKED,
    DEFAULT_ALGORITHM,
    MAX_TEXT,
    MAX_UNITS,
    MONTH,
    UNITS,
    UNLIMITED,
    Rate,
    gettext_noop,
    month_is_calendar,
    show,
)

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


class RateSpec(NamedTuple):
    """One rate as written; ``algorithm`` is None where the text names none."""

    limit: int
    counts: Literal["units", "requests"]
    period: float | Literal["month"]
    burst: int | None
    algorithm: str | None

    def rate(self, default: str) -> Rate:
        """Return the rate, by the ``default`` algorithm where it names none; raises ``InvalidRate``."""
        algorithm = self.algorithm
        if algorithm is None:
            algorithm = "fixed_window" if self.period == MONTH else default
        return Rate(limit=self.limit, counts=self.counts, period=self.period, burst=self.burst, algorithm=algorithm)


class _Text:
    """A cursor over rate text; its errors name the character where reading failed."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise InvalidRate(gettext_noop("a rate is text such as 100/min, not %(value)s"), value=show(text))
        if len(text) > MAX_TEXT:
            template = gettext_noop("rate text may have %(most)s characters, this has %(length)s")
            raise InvalidRate(template, most=MAX_TEXT, length=len(text))
        self.text, self.start, self.at = text, 0, 0

    def take(self, pattern: str) -> str | None:
        """Return the next token if it matches, and skip the blanks around it; else consume nothing."""
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


def read_rate(text: str) -> RateSpec:
    """Read one rate; raises ``InvalidRate``."""
    return _read_rate(_Text(text))


def read_rates(text: str) -> list[RateSpec] | Literal["unlimited", "blocked"]:
    """Read rates separated by commas, or one of the two words; raises ``InvalidRate``."""
    cursor = _Text(text)
    word = text.strip().lower()
    if word == UNLIMITED or word == BLOCKED:
        return word
    specs = [_read_rate(cursor, more=True)]
    while cursor.take(","):
        specs.append(_read_rate(cursor, more=True))
    return specs


def _read_rate(cursor: _Text, more: bool = False) -> RateSpec:
    limit = cursor.number(gettext_noop("a limit (a number)"))
    word = cursor.take(r"(?:requests?|units?)\b")
    counts: Literal["units", "requests"] = "requests" if word is not None and word[0] == "r" else "units"
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
            raise month_is_calendar(limit, algorithm)
        algorithm = None
    period: float | Literal["month"] = MONTH if unit == MONTH else count * (UNITS[unit] // 10**6)
    spec = RateSpec(limit, counts, period, burst, algorithm)
    # Because readers differ in their default, a bad period or burst is refused here, by the one that allows most.
    spec.rate(DEFAULT_ALGORITHM)
    return spec
