"""Calendar windows: the day, week or month, in a time zone, around an instant."""

from __future__ import annotations

from calendar import monthrange
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from functools import lru_cache
from typing import Literal, NamedTuple
from zoneinfo import ZoneInfo

from ..exceptions import InvalidBucket
from .rates import Rate, show

_SECOND = 10**6


class CalendarWindow(NamedTuple):
    """A day, week or month: the instants ``[starts_us, ends_us)`` (µs), and the date by which it is known."""

    starts_us: int
    ends_us: int
    #: In the time zone.
    first_day: date


def check_zone(zone: object) -> tzinfo:
    """Return the zone; raises ``InvalidBucket`` for other libraries', which mean another time or have no hash."""
    if isinstance(zone, ZoneInfo | timezone):
        return zone
    known = zone if isinstance(zone, str) else "Europe/Berlin"
    raise InvalidBucket(f"time_zone cannot be {show(zone)}; write zoneinfo.ZoneInfo({known!r})")


def calendar_window(
    unit: Literal["day", "week", "month"], now_us: int, zone: tzinfo, anchor: int = 1
) -> CalendarWindow:
    """Return the window around ``now_us``; weeks begin on Monday (ISO 8601).

    Months begin on day ``anchor`` (1 to 31), or on their last day where they are shorter; raises ``InvalidBucket``.
    A day lasts 23 to 25 hours where clocks change: each bound is the local midnight as an instant.
    """
    window, after = _bounds(unit, local_day(now_us, zone), zone, anchor)
    if now_us >= window.ends_us:
        # Clocks went back over midnight: the second pass of the old date's last hour belongs to the new date.
        window, _ = _bounds(unit, after, zone, anchor)
    return window


def local_day(at_us: int, zone: tzinfo) -> date:
    """Return the date in the zone at the instant."""
    return _day(at_us // _SECOND, zone)


@lru_cache(maxsize=256)
def _day(second: int, zone: tzinfo) -> date:
    return datetime.fromtimestamp(second, zone).date()


def window_end_us(rate: Rate, now_us: int, zone: tzinfo) -> int:
    """Return when the rate's window around ``now_us`` ends: by the calendar, or at a multiple of the period."""
    if rate.calendar:
        return calendar_window(rate.calendar, now_us, zone).ends_us
    return now_us - now_us % rate.period_us + rate.period_us


@lru_cache(maxsize=256)
def _bounds(unit: str, day: date, zone: tzinfo, anchor: int) -> tuple[CalendarWindow, date]:
    if unit == "day":
        first, after = day, day + timedelta(days=1)
    elif unit == "week":
        first = day - timedelta(days=day.weekday())
        after = first + timedelta(days=7)
    else:
        if not isinstance(anchor, int) or not 1 <= anchor <= 31:
            raise InvalidBucket(f"anchor is a day of the month, 1 to 31, not {show(anchor)}")
        month = day.replace(day=1)
        if _begin(month, anchor) > day:
            month = (month - timedelta(days=1)).replace(day=1)
        first, after = _begin(month, anchor), _begin((month + timedelta(days=32)).replace(day=1), anchor)
    return CalendarWindow(_midnight_us(first, zone), _midnight_us(after, zone), first), after


def _begin(month: date, anchor: int) -> date:
    return month.replace(day=min(anchor, monthrange(month.year, month.month)[1]))


def _midnight_us(day: date, zone: tzinfo) -> int:
    # fold=0 is the instant of the jump where midnight does not exist, and the first one where it occurs twice: so a
    # day's end is always the next day's start.
    return int(datetime.combine(day, time(), zone).timestamp()) * _SECOND
