"""Text, times and numbers as the admin's pages write them, in the operator's language and time zone."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from django.contrib import admin
from django.utils import timezone
from django.utils.formats import number_format, time_format
from django.utils.text import Truncator
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..changes.publication import published_at
from ..changes.validators import visible
from ..operations.texts import date_and_time, local_time, zone
from ..operations.texts import day_text as day_text
from ..operations.texts import isolated as isolated
from ..operations.texts import moment as moment
from ..operations.texts import number_text as number_text
from ..policies.requests.caller import failed_kind

#: Characters of a free text that a cell shows; the whole is a click away.
_SHOWN_CHARACTERS = 200
#: Waits that are shown to the second.
_EXACT_US = 120 * 10**6


def shown(text: Any) -> str:
    """Cut text of unknown origin to a cell's length, and disarm characters that would reverse the text around it."""
    harmless = visible(text)
    # Django's truncation is slow, and most texts are short.
    return harmless if len(harmless) <= _SHOWN_CHARACTERS else Truncator(harmless).chars(_SHOWN_CHARACTERS)


def shown_subject(subject: str) -> str:
    """``shown``, with words for the subject of callers with a failed identifier."""
    kind = failed_kind(subject)
    return gettext("%(kind)s unknown (its function failed)") % {"kind": shown(kind)} if kind else shown(subject)


@admin.display(description=_("description"), ordering="description")
def about(row: Any) -> str:
    """The list column with the beginning of a row's description."""
    return shown(row.description)


@admin.display(description=_("reason"), ordering="reason")
def reason_text(row: Any) -> str:
    """The list column with a row's reason."""
    return shown(row.reason)


def clock(at: float, *, seconds: bool = True) -> str:
    """Local time and zone of a Unix time in seconds, with the date unless it is today's."""
    local = timezone.localtime(datetime.fromtimestamp(at, tz=UTC))
    if local.date() == timezone.localtime(datetime.now(UTC)).date():
        return f"{time_format(local, 'H:i:s' if seconds else 'H:i')} {zone(local)}"
    return moment(local, seconds=seconds)


def revision_text(revision: int) -> str:
    """A revision as the time of its publication; the number itself where that is no time."""
    return moment(published_at(revision), seconds=True) or str(revision)


def clock_and_wait(at_us: int, wait_us: int) -> str:
    """``14:05:12 UTC (in 42 s)``: the time ``wait_us`` after the Unix time ``at_us``, both in microseconds.

    To the minute where it is as far away as ``duration`` counts minutes: a month ends at 00:00.
    """
    # Rounded up, as in the sentence for the customer, because a second earlier there may be no room yet.
    at, exact = -(-(at_us + wait_us) // 10**6), wait_us < _EXACT_US
    # To minutes but for the second or two by which the two times may be apart.
    at = at if exact else 60 * math.ceil((at - 2) / 60)
    return gettext("%(time)s (in %(span)s)") % {"time": clock(at, seconds=exact), "span": duration(wait_us / 10**6)}


@admin.display(description=_("when"), ordering="ends_at")
def when(row: Any) -> str:
    """A row's ``starts_at`` and ``ends_at`` in a few words; "always" without any. Also a column of lists."""
    words = {"start": moment(row.starts_at), "end": moment(row.ends_at)}
    if row.starts_at and row.ends_at:
        start, end = local_time(row.starts_at), local_time(row.ends_at)
        if zone(start) == zone(end):  # not where summer time begins or ends in between
            words["start"] = date_and_time(start)
        return gettext("%(start)s to %(end)s") % words
    if row.starts_at:
        return gettext("from %(start)s") % words
    return gettext("until %(end)s") % words if row.ends_at else gettext("always")


def time_column(name: str, text: Any, *, seconds: bool = False) -> Any:
    """Return a list column or read-only field that shows the date field ``name`` as ``moment`` does."""

    @admin.display(description=text, ordering=name)
    def column(row: Any) -> str | None:
        return moment(getattr(row, name), seconds=seconds) or None

    column.__name__ = name
    return column


def duration(seconds: float) -> str:
    """A length of time, rounded up to whole seconds, minutes, hours or days."""
    for size, most, text in ((1, 120, gettext("%d s")), (60, 120, gettext("%d min")), (3600, 48, gettext("%d h"))):
        count = math.ceil(seconds / size)
        if count < most:
            return text % count
    days = math.ceil(seconds / 86_400)
    return ngettext("%d day", "%d days", days) % days


def bar_percent(used: int, limit: int) -> int:
    """Return how much of a counter's bar is filled: whole percent, and at least 1 once anything is used."""
    return max(1 if used > 0 else 0, min(100, 100 * used // limit))


def percent(part: int, whole: int) -> str:
    """``12.3 %``; "" where ``whole`` is 0."""
    if not whole:
        return ""
    return gettext("%(share)s %%") % {"share": number_format(100 * part / whole, decimal_pos=1)}
