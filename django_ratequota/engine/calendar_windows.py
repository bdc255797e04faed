"""Calendar windows: the day, week or month, in a time zone, that an instant lies in."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from ..exceptions import InvalidBucket
from .rates import show

_SECOND = 10**6


def check_zone(zone: object) -> tzinfo:
    """Return the zone as calendar windows need it; raises ``InvalidBucket`` for what they cannot use.

    A zone of pytz becomes the ``ZoneInfo`` of its name: as the tzinfo of a datetime it stands for the city's local
    mean time. Zones of dateutil cannot be hashed, and their names cannot be read.
    """
    name = getattr(zone, "zone", None) if hasattr(zone, "localize") else None
    try:
        checked = ZoneInfo(name) if isinstance(name, str) else zone
        hash(checked)
        if isinstance(checked, tzinfo):
            return checked
    except (TypeError, ZoneInfoNotFoundError):
        pass
    known = zone if isinstance(zone, str) else "Europe/Berlin"
    raise InvalidBucket(f"time_zone cannot be {show(zone)}; write zoneinfo.ZoneInfo({known!r})")


def calendar_window(unit: Literal["day", "week", "month"], now_us: int, zone: tzinfo) -> tuple[int, int]:
    """The window ``[start_us, end_us)`` around ``now_us``; weeks begin on Monday (ISO 8601).

    A day lasts 23 to 25 hours where clocks change: each bound is the local midnight as an instant.
    """
    start, finish, after = _bounds(unit, datetime.fromtimestamp(now_us // _SECOND, zone).date(), zone)
    if now_us >= finish:
        # Clocks went back over midnight: the hour that the old date has twice belongs to the new one.
        start, finish, _ = _bounds(unit, after, zone)
    return start, finish


@lru_cache(maxsize=256)
def _bounds(unit: str, day: date, zone: tzinfo) -> tuple[int, int, date]:
    if unit == "day":
        first, after = day, day + timedelta(days=1)
    elif unit == "week":
        first = day - timedelta(days=day.weekday())
        after = first + timedelta(days=7)
    else:
        first = day.replace(day=1)
        after = (first + timedelta(days=32)).replace(day=1)
    return _midnight_us(first, zone), _midnight_us(after, zone), after


def _midnight_us(day: date, zone: tzinfo) -> int:
    # Where midnight does not exist (a jump at 00:00), fold=0 names the instant of the jump itself; where it
    # occurs twice, the first. So a day's end is always the next day's start.
    return int(datetime.combine(day, time(), zone).timestamp()) * _SECOND
