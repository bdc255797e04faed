"""Past usage of calendar limits: windows, the days of a month with the refunds by operators, and invoices.

An invoice is what a subject has used in a month, with a line for each plan, rate and assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date, datetime, timedelta
from itertools import groupby, islice
from operator import attrgetter
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import CharField, Exists, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Cast
from django.utils import timezone
from django.utils.translation import gettext as _

from ..conf import settings
from ..engine.keys import window_name
from ..engine.rates import Rate
from ..ledger.rows import Totals
from ..models import Endpoint, PolicyChange, QuotaWindow, RatePolicy
from ..policies.facts import to_datetime, to_us
from ..policies.requests.caller import Caller, is_verified
from .invoice_lines import Day, Line, days_of, lines_of
from .subjects import names_of

#: Counters whose names, policies and days are read at once; rows of the ledger that are.
_BATCH, _CHUNK = 500, 2_000
#: Windows above which a page reads them in the order of their counters.
_FEW = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Month:
    """The units that one counter charged and refunded in one month."""

    window: QuotaWindow
    #: Also after the window's end: refunds may come late.
    days: list[Day]

    @property
    def total(self) -> Totals:
        """Return the sum of the days."""
        return Totals(sum(day.charged for day in self.days), sum(day.refunded for day in self.days))


def windows_of(caller: Caller) -> QuerySet[QuotaWindow]:
    """Return the windows of what the caller counts as; each has its ``scope``.

    Not those of policies that are, or were when they were deleted, in log mode, nor those of its address, which may
    have been somebody else's.
    """
    values = {kind: caller.value(kind) for kind in ("user", *settings.identifiers) if is_verified(kind)}
    subjects = [f"{kind}:{value}" for kind, value in values.items() if value]
    logged = RatePolicy.objects.filter(pk=OuterRef("policy_id"), mode=RatePolicy.Mode.LOG)
    deleted = PolicyChange.objects.filter(
        model="ratepolicy",
        object_id=Cast(OuterRef("policy_id"), CharField()),
        action=PolicyChange.Action.DELETE,
        before__mode=RatePolicy.Mode.LOG.value,
    )
    scope = Endpoint.objects.filter(pk=OuterRef("endpoint_id")).values("name")
    shown = ~Exists(logged) & ~Exists(deleted)
    windows: QuerySet[QuotaWindow] = QuotaWindow.objects.filter(shown, subject__in=subjects)
    return windows.annotate(scope=Subquery(scope))


def by_day(
    windows: QuerySet[QuotaWindow], first_day: date, policies: QuerySet[RatePolicy] | None = None
) -> list[Month]:
    """Return those of the windows that are months and began on this day; those most used come first.

    Days under other policies than these are left out; None = all policies.
    """
    chosen = windows.filter(period=QuotaWindow.Period.MONTH, first_day=first_day).order_by("-used", "counter")
    found = list(chosen)
    days = days_of(found)
    if policies is not None:
        ids = {day.policy for own in days.values() for day in own}
        visible = set(policies.filter(pk__in=ids).values_list("pk", flat=True))
        days = {pk: [day for day in own if day.policy in visible] for pk, own in days.items()}
    return [Month(window=window, days=days[window.pk]) for window in found]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class InvoiceLine:
    """The usage of one counter by a subject under one rate: in a month, or in the days or weeks that began in it."""

    #: The user's name, or the one that SUBJECT_NAMES returns; "" = none.
    name: str
    subject: str
    #: Name of the plan; "" = a limit of the customer's own, or one for everyone.
    plan: str
    #: Of the assignment to the plan; "" = none.
    reason: str
    #: None = all endpoints; of a deleted one, its number.
    endpoint: str | None
    #: The value of the policy; "" = not known any more.
    counted_per: str
    #: ``units`` or ``requests``: what the rate counts.
    unit: str
    rate: str
    limit: int
    #: Charged minus refunded units, and the part of them above the limit that was in force on their day.
    used: int
    over: int
    #: The policy's mode now, or when it was deleted; "" = no longer known.
    mode: str
    #: The days in TIME_ZONE on which the first window began and the last one ends: 15 October and 15 November.
    begins: date
    ends: date
    #: The days of the first and the last charge under this line; None = they are no longer kept.
    first_day: date | None
    last_day: date | None
    #: Whether the last window and all of its requests have ended; else the line is what was used so far.
    complete: bool
    #: When one of its windows changed last, in TIME_ZONE: after an invoice was sent, perhaps.
    changed_at: datetime
    #: Number of the policy; it may be deleted by now.
    policy: int | None

    @property
    def period(self) -> str:
        """``day``, ``week`` or ``month``; of several days or weeks, each has the limit."""
        return Rate.parse(self.rate).calendar


#: The columns of a file, and what returns those of a line.
HEADS = tuple(field.name for field in fields(InvoiceLine))
cells: Callable[[InvoiceLine], Sequence[Any]] = attrgetter(*HEADS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Invoices:
    """The lines of a month, such as 2026-10, or some of them.

    A window belongs to the month in which it began. Each month of a customer whose months began on another day
    meanwhile has lines of its own, as each has its own limit.
    """

    month: str
    #: Only this one; "" = all.
    subject: str = ""
    #: Only those of these policies; None = all.
    policies: QuerySet[RatePolicy] | None = None

    def lines(self) -> Iterator[InvoiceLine]:
        """Yield all lines, by subject; raises ``ValidationError`` where the month is none."""
        rows = self._windows().order_by("subject", "counter", "first_day")
        counters = _by_counter(rows.iterator(chunk_size=_CHUNK))
        while batch := list(islice(counters, _BATCH)):
            yield from self._lines_of(batch)

    def page(self, start: str, most: int) -> tuple[list[InvoiceLine], str]:
        """Return the lines of up to ``most`` counters from ``start`` on ("" = the first), by subject.

        Also returns where the next page begins; "" = there is none.
        """
        rows = self._windows()
        # A few are found by the index that begins with the periods; in the order of counters they are far apart.
        first_day, end = month_of(self.month)
        months = ((day.year, day.month) for day in (first_day, end + timedelta(days=31)))
        begins, ends = (to_datetime(to_us(datetime(*month, 1, tzinfo=settings.time_zone))) for month in months)
        indexed = rows.filter(period__in=QuotaWindow.Period.values, ends_at__gt=begins, ends_at__lt=ends)
        if len(few := indexed.order_by().values_list("pk", flat=True)[: _FEW + 1]) <= _FEW:
            rows = QuotaWindow.objects.filter(pk__in=list(few))
        # At most 31 windows of a counter begin in a month.
        ordered = rows.filter(counter__gt=start).order_by("counter", "first_day")
        counters = list(_by_counter(ordered[: 31 * most + 1]))
        lines = sorted(self._lines_of(counters[:most]), key=attrgetter("subject"))
        return lines, counters[most - 1][0].counter if len(counters) > most else ""

    def _windows(self) -> QuerySet[QuotaWindow]:
        first_day, end = month_of(self.month)
        found: QuerySet[QuotaWindow] = QuotaWindow.objects.filter(first_day__gte=first_day, first_day__lt=end)
        if self.subject:
            found = found.filter(subject=self.subject)
        if self.policies is not None:
            # Any part of a mixed month may belong to one of them, which its lines show.
            found = found.filter(Q(policy_id__in=self.policies.order_by().values("pk")) | Q(mixed=True))
        return found

    def _lines_of(self, counters: list[list[QuotaWindow]]) -> Iterator[InvoiceLine]:
        windows = [window for own in counters for window in own]
        found = lines_of(list(group) for _key, group in groupby(windows, key=_counter_or_month))
        lines = [line for own in found for line in own]
        if self.policies is not None:
            ids = {line.policy for line in lines}
            visible = set(self.policies.filter(pk__in=ids).values_list("pk", flat=True))
            lines = [line for line in lines if line.policy in visible]
        names = names_of(window.subject for window in windows)
        wanted = {window.endpoint_id for window in windows if window.endpoint_id}
        endpoints = dict(Endpoint.objects.filter(pk__in=wanted).values_list("pk", "name"))
        return (_invoice_line(line, names, endpoints) for line in lines)


def _invoice_line(line: Line, names: Mapping[str, str], endpoints: Mapping[int, str]) -> InvoiceLine:
    source, last, pk = line.source, line.windows[-1], line.windows[-1].endpoint_id
    changed_us = max(to_us(window.written_at) for window in line.windows)
    return InvoiceLine(
        name=names.get(last.subject, ""),
        subject=last.subject,
        plan=source.plan,
        reason=line.reason,
        endpoint=None if pk is None else endpoints.get(pk, f"#{pk}"),
        counted_per=source.counted_per,
        unit="requests" if " requests/" in line.rate else "units",
        rate=line.rate,
        limit=line.limit,
        used=line.used,
        over=line.over,
        mode=source.mode,
        begins=line.windows[0].first_day,
        ends=local_date(last.ends_at),
        first_day=line.first_day,
        last_day=line.last_day,
        complete=to_us(last.ends_at) <= to_us(timezone.now()) and not any(window.held for window in line.windows),
        changed_at=datetime.fromtimestamp(changed_us // 10**6, settings.time_zone),
        policy=line.policy or None,
    )


def month_of(text: str) -> tuple[date, date]:
    """Return the first day of the month ``2026-10``, and of the next one; raises ``ValidationError``."""
    try:
        first = datetime.strptime(text, "%Y-%m").date()
        return first, (first + timedelta(days=31)).replace(day=1)
    except (OverflowError, ValueError) as error:
        raise ValidationError(_("Enter the month as in 2026-10, not %(text)r."), params={"text": text}) from error


def previous_month() -> str:
    """Return the month before this one in TIME_ZONE, as in 2026-10."""
    return f"{local_date(timezone.now()).replace(day=1) - timedelta(days=1):%Y-%m}"


def is_recorded(subject: str) -> bool:
    """Return whether the subject has a window, of any month."""
    return QuotaWindow.objects.filter(subject=subject).exists()


def _by_counter(rows: Iterable[QuotaWindow]) -> Iterator[list[QuotaWindow]]:
    return (list(group) for _counter, group in groupby(rows, key=attrgetter("counter")))


def _counter_or_month(window: QuotaWindow) -> tuple[object, ...]:
    """Return what windows share whose lines are added up."""
    return window.counter, window.first_day if window.period == QuotaWindow.Period.MONTH else None
