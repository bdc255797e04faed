"""What subjects have used window by window, and in a month day by day, with what operators gave back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any, NamedTuple

from django.db.models import DateField, Exists, OuterRef, Q, QuerySet, Subquery, Sum, Value

from ..conf import settings
from ..engine.keys import window_name
from ..models import Endpoint, PolicyChange, QuotaDay, QuotaWindow, RatePolicy
from ..monitoring.ledger_rows import Totals, stored_subject
from ..policies.facts import to_datetime, to_us
from ..policies.requests.caller import Caller
from .caller_limits import hidden_kinds
from .running_windows import time_us

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


def windows_of(caller: Caller) -> QuerySet[QuotaWindow]:
    """Return the windows of what the caller counts as, without those of policies in log mode; each has its ``scope``.

    Not those of its address, which may have been somebody else's.
    """
    values = {kind: caller.value(kind) for kind in {"user", *settings.identifiers} - hidden_kinds()}
    subjects = [stored_subject(f"{kind}:{value}") for kind, value in values.items() if value]
    logged = RatePolicy.objects.filter(pk=OuterRef("policy_id"), mode=RatePolicy.Mode.LOG)
    scope = Endpoint.objects.filter(pk=OuterRef("endpoint_id")).values("name")
    windows: QuerySet[QuotaWindow] = QuotaWindow.objects.filter(~Exists(logged), subject__in=subjects)
    return windows.annotate(scope=Subquery(scope))


def by_day(windows: QuerySet[QuotaWindow], first_day: date) -> list[Month]:
    """Return those of the windows that are months and began on this day; those most used come first."""
    chosen = list(windows.filter(period=QuotaWindow.Period.MONTH, first_day=first_day).order_by("-used", "counter"))
    if not chosen:
        return []
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


def local_date(at: datetime) -> date:
    """Return the date in TIME_ZONE."""
    return datetime.fromtimestamp(to_us(at) / 10**6, settings.time_zone).date()
