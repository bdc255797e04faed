"""A month of a subject by its days: what was charged and refunded on each, and what operators gave back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, NamedTuple

from django.db.models import DateField, Q, QuerySet, Sum, Value

from ..engine.keys import window_name
from ..models import PolicyChange, QuotaDay, QuotaWindow
from ..monitoring.ledger_rows import Totals
from ..policies.facts import to_datetime
from .ledger import time_us
from .past_windows import local_date

_DAY = timedelta(days=1)
_ADDED = ("charged", "refunded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Month:
    """What one counter charged and refunded in one month."""

    window: QuotaWindow
    #: Of each day on which there was anything, also after the window's end: refunds may come late. None = of the days
    #: that are no longer kept.
    days: dict[date | None, Totals]
    #: Their sum: the window's figures.
    total: Totals


class Return(NamedTuple):
    """Units that an operator gave back to one counter, in a reset or a grant."""

    change: PolicyChange
    window: QuotaWindow
    units: int


def by_day(windows: QuerySet[QuotaWindow], first_day: date) -> list[Month]:
    """Return those of the windows that are months and began on this day; those most used come first."""
    chosen = list(windows.filter(period=QuotaWindow.Period.MONTH, first_day=first_day).order_by("-used", "counter"))
    own = Q(counter__in=[window.counter for window in chosen], first_day=first_day)
    # Each day is named, because the index, which begins with the day, would search a range for all counters.
    until = local_date(to_datetime(time_us())) + _DAY
    named = [first_day + number * _DAY for number in range((until - first_day).days + 1)]
    days = QuotaDay.objects.filter(own, day__in=named).order_by().values_list("counter", "day")
    whole = QuotaWindow.objects.filter(own).order_by().values_list("counter", Value(None, DateField()), *_ADDED)
    # Read in one statement, so that the days add up to the window while processes write.
    rows: Any = whole.union(days.annotate(*map(Sum, _ADDED)), all=True).order_by()
    found: dict[str, dict[date | None, Totals]] = {}
    for counter, day, *sums in sorted(rows, key=lambda row: row[1] or date.min):
        found.setdefault(counter, {})[day] = Totals(*map(int, sums))
    return [_month(window, found[window.counter]) for window in chosen if window.counter in found]


def _month(window: QuotaWindow, days: dict[date | None, Totals]) -> Month:
    total = days.pop(None)
    rest = Totals(*(whole - sum(parts) for whole, *parts in zip(total, *days.values(), strict=True)))
    return Month(window=window, days={None: rest, **days} if any(rest) else days, total=total)


def given_back(months: Sequence[Month]) -> Iterator[Return]:
    """Yield what operators gave back to the months' windows, the newest first."""
    windows = {window_name(month.window.counter, month.window.first_day): month.window for month in months}
    subjects = {subject for subject, _name in windows}
    for change in PolicyChange.objects.filter(model="counter", object_id__in=subjects).select_related("actor"):
        for title, before in change.before.items():
            window = windows.get((change.object_id, before.get("window")))
            if window is not None:
                yield Return(change, window, before["used"] - change.after[title]["used"])
