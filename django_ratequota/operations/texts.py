"""Times and numbers as operators read them, in their language and time zone."""

from __future__ import annotations

from datetime import date, datetime

from django.utils import timezone
from django.utils.formats import date_format, number_format, time_format
from django.utils.translation import get_language_bidi


def moment(at: datetime | None, *, seconds: bool = False) -> str:
    """Date, time and zone, to the minute or to the second; "" for None."""
    if at is None:
        return ""
    local = local_time(at)
    return f"{date_and_time(local, seconds=seconds)} {zone(local)}"


def local_time(at: datetime) -> datetime:
    """Return the time in the operator's zone; without time zones (USE_TZ = False) it is local time already."""
    return timezone.localtime(at) if timezone.is_aware(at) else at


def day_text(day: date) -> str:
    """Return the date."""
    # Without the Arabic marks of direction, which turn a date in a sentence of another language around.
    return date_format(day, "SHORT_DATE_FORMAT").replace("\u200f", "")


def date_and_time(local: datetime, *, seconds: bool = False) -> str:
    """Return date and time without the zone."""
    return f"{day_text(local)} {time_format(local, 'H:i:s' if seconds else 'H:i')}"


def zone(local: datetime) -> str:
    """Return the name of the time's zone."""
    return date_format(local, "T")


def number_text(value: float) -> str:
    """Return a number with two decimals at most."""
    number = round(value, 2)
    return number_format(int(number) if number == int(number) else number, use_l10n=True, force_grouping=True)


def isolated(text: str) -> str:
    """Return the text for a sentence. In right-to-left languages, marks keep a rate in it from being reversed."""
    return f"\u2066{text}\u2069" if get_language_bidi() else text
