"""What callers have used of their quotas: by calendar month, for invoices, and window by window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from itertools import groupby
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Exists, OuterRef, QuerySet, Subquery
from django.utils.translation import gettext as _

from ..conf import settings
from ..engine.calendar_windows import calendar_window
from ..models import Endpoint, QuotaWindow, RatePolicy
from ..monitoring.ledger_rows import stored_subject
from ..policies.facts import to_datetime, to_us
from ..policies.requests.caller import Caller
from .caller_limits import hidden_kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What one subject has used of one counter: in one month, or in all days or weeks that began in a month."""

    subject: str
    #: None = all endpoints; of a deleted one, its number.
    endpoint: str | None
    rate: str
    #: Number of the windows: 1 for a rate by the month, up to 31 for one by the day.
    windows: int
    #: Units, or requests where the rate counts requests.
    used: int
    #: The limit of the last window.
    limit: int
    #: The days in TIME_ZONE on which the first window began and the last one ends: 15 October and 15 November.
    begins: date
    ends: date
    #: Number of the policy that limited it last; it may be deleted by now.
    policy: int | None


def month_of(text: str) -> tuple[Any, Any]:
    """Return when the month ``2026-10`` begins and ends in TIME_ZONE; raises ``ValidationError``."""
    try:
        first = datetime.strptime(text, "%Y-%m").replace(day=15, tzinfo=settings.time_zone)
        start_us, end_us = calendar_window("month", int(first.timestamp()) * 10**6, settings.time_zone)[:2]
        return to_datetime(start_us), to_datetime(end_us)
    except (OverflowError, ValueError) as error:  # years 1 and 9999 as well, whose months have no bounds in UTC
        raise ValidationError(_("Write the month as in 2026-10, not %(text)r."), params={"text": text}) from error


def previous_month(today: date) -> str:
    """Return the month before that of ``today``, as in 2026-10."""
    return f"{today.replace(day=1) - timedelta(days=1):%Y-%m}"


def used_in_month(month: str, subject: str = "") -> Iterator[Used]:
    """Yield what each subject has used, or one only, by subject; raises ``ValidationError``.

    A window belongs to the month in which it began. Windows of another length have rows of their own, and so has each
    month of a customer whose months began on another day meanwhile, as each has its own limit.
    """
    start, end = month_of(month)
    rows = QuotaWindow.objects.filter(starts_at__gte=start, starts_at__lt=end)
    if subject:
        rows = rows.filter(subject=stored_subject(subject))
    names = dict(Endpoint.objects.values_list("pk", "name"))
    in_order = rows.order_by("subject", "counter", "starts_at").iterator(chunk_size=2000)
    for _counter, group in groupby(in_order, key=_counter_or_month):
        windows = list(group)
        last, pk = windows[-1], windows[-1].endpoint_id
        yield Used(
            subject=last.subject,
            endpoint=None if pk is None else names.get(pk, f"#{pk}"),
            rate=last.rate,
            windows=len(windows),
            used=sum(window.used for window in windows),
            limit=last.limit,
            begins=local_date(windows[0].starts_at),
            ends=local_date(last.ends_at),
            policy=last.policy_id,
        )


def _counter_or_month(window: QuotaWindow) -> tuple[object, ...]:
    """Return what the windows of one ``Used`` share."""
    return window.counter, window.starts_at if window.period == QuotaWindow.Period.MONTH else None


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
