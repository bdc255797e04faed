"""The usage of subjects by window, and by day in a month, with the refunds by operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime

from django.db.models import Exists, OuterRef, QuerySet, Subquery, Sum

from ..conf import settings
from ..engine.keys import window_name
from ..models import Endpoint, PolicyChange, QuotaDay, QuotaWindow, RatePolicy
from ..monitoring.ledger_rows import Totals, stored_subject
from ..policies.facts import to_us
from ..policies.requests.caller import Caller
from .caller_limits import hidden_kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Month:
    """The units that one counter charged and refunded in one month."""

    window: QuotaWindow
    #: Of each day on which there was anything, also after the window's end: refunds may come late. None = of the days
    #: that are no longer kept.
    days: dict[date | None, Totals]
    #: Their sum.
    total: Totals


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
    # Read before the days, so that no units that processes write meanwhile look like those of earlier days.
    chosen = list(windows.filter(period=QuotaWindow.Period.MONTH, first_day=first_day).order_by("-used", "counter"))
    days = QuotaDay.objects.filter(counter__in=[window.counter for window in chosen], first_day=first_day)
    found: dict[str, dict[date | None, Totals]] = {}
    sums = days.order_by("day").values_list("counter", "day").annotate(Sum("charged"), Sum("refunded"))
    for counter, day, charged, refunded in sums:
        found.setdefault(counter, {})[day] = Totals(int(charged), int(refunded))
    return [_month(window, found.get(window.counter, {})) for window in chosen]


def _month(window: QuotaWindow, days: dict[date | None, Totals]) -> Month:
    charged, refunded = (sum(figures) for figures in zip((0, 0), *days.values(), strict=True))
    total = Totals(max(window.charged, charged), max(window.refunded, refunded))
    earlier = Totals(total.charged - charged, total.refunded - refunded)
    return Month(window=window, days={None: earlier, **days} if any(earlier) else days, total=total)


def given_back(months: Sequence[Month]) -> Iterator[tuple[PolicyChange, QuotaWindow, int]]:
    """Yield the resets and grants in which operators gave units back to the months' windows, the newest first.

    Each has the window and the units.
    """
    windows = {window_name(month.window.counter, month.window.first_day): month.window for month in months}
    subjects = {subject for subject, _name in windows}
    for change in PolicyChange.objects.filter(model="counter", object_id__in=subjects).select_related("actor"):
        for title, before in change.before.items():
            window = windows.get((change.object_id, before.get("window")))
            if window is not None:
                yield change, window, before["used"] - change.after[title]["used"]


def local_date(at: datetime) -> date:
    """Return the date in TIME_ZONE."""
    return datetime.fromtimestamp(to_us(at) / 10**6, settings.time_zone).date()
