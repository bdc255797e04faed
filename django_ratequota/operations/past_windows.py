"""What callers have used of their quotas, window by window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

from django.db.models import Exists, OuterRef, QuerySet, Subquery

from ..conf import settings
from ..engine.calendar_windows import calendar_window
from ..models import Endpoint, QuotaWindow, RatePolicy
from ..monitoring.ledger_rows import stored_subject
from ..policies.facts import to_datetime, to_us
from ..policies.requests.caller import Caller
from .caller_limits import hidden_kinds


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The windows of one counter."""

    #: The last.
    window: QuotaWindow
    #: (first day, used, limit) of each window, the oldest first; without a limit where nothing was used.
    windows: list[tuple[date, int, int]]


def past_of(windows: QuerySet[QuotaWindow], most: int, today: date) -> list[Past]:
    """Return the last ``most`` windows of each counter until today; the counters used last, and most, first.

    ``windows`` have one subject and one period.
    """
    counters: dict[str, list[QuotaWindow]] = {}
    for window in windows.order_by("starts_at"):
        counters.setdefault(window.counter, []).append(window)
    order = sorted(counters.values(), key=lambda own: (own[-1].starts_at, own[-1].used), reverse=True)
    return [Past(window=own[-1], windows=list(_without_gaps(own, today))[-most:]) for own in order]


def _anchor_of(begins: date, ends: date) -> int:
    """Return the day on which months begin, from the bounds of one."""
    shorter = min(begins, ends, key=lambda day: day.day)
    # A month's last day may stand for a later one. Other days differ where the day was changed: the end's counts.
    is_last = (shorter + timedelta(days=1)).day == 1
    return max(begins.day, ends.day) if is_last else ends.day


def local_date(at: datetime) -> date:
    """Return the date in TIME_ZONE."""
    return datetime.fromtimestamp(to_us(at) / 10**6, settings.time_zone).date()


def _without_gaps(windows: list[QuotaWindow], today: date) -> Iterator[tuple[date, int, int]]:
    """Yield each window, and those between in which nothing was used, as (first day, used, limit)."""
    following = [*(local_date(one.starts_at) for one in windows[1:]), today + timedelta(days=1)]
    for window, until in zip(windows, following, strict=True):
        begins, ends = local_date(window.starts_at), local_date(window.ends_at)
        yield begins, window.used, window.limit
        anchor = _anchor_of(begins, ends)
        while ends < until:
            yield ends, 0, 0
            ends = _next(ends, window.period, anchor)


def _next(first: date, period: Any, anchor: int) -> date:
    """Return the first day of the window that follows."""
    noon = datetime(first.year, first.month, first.day, 12, tzinfo=settings.time_zone)
    end_us = calendar_window(period, to_us(noon), settings.time_zone, anchor)[1]
    return local_date(to_datetime(end_us))
