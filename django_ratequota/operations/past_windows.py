"""Past usage of calendar limits: windows, the days of a month with the refunds by operators, and lines of invoices.

An invoice is what a subject has used in a month, with a line for each plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date, datetime, timedelta
from itertools import groupby, islice, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from django.core.exceptions import ValidationError
from django.db.models import Exists, OuterRef, Q, QuerySet, Subquery, Sum
from django.utils import timezone
from django.utils.translation import gettext as _

from ..conf import settings
from ..engine.keys import window_name
from ..engine.rates import Rate
from ..ledger.rows import Totals, limited_by
from ..models import Endpoint, Plan, PolicyChange, QuotaDay, QuotaWindow, RatePolicy
from ..policies.facts import to_datetime, to_us
from ..policies.requests.caller import Caller, is_verified
from .subjects import names_of

#: Counters whose names, policies and days are read at once; rows of the ledger that are.
_BATCH, _CHUNK = 500, 2_000
#: Windows above which a page reads them in the order of their counters.
_FEW = 1_000


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
    values = {kind: caller.value(kind) for kind in ("user", *settings.identifiers) if is_verified(kind)}
    subjects = [f"{kind}:{value}" for kind, value in values.items() if value]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class InvoiceLine:
    """The usage of one counter by a subject under one plan: in a month, or in the days or weeks that began in it."""

    #: The user's name, or the one that SUBJECT_NAMES returns; "" = none.
    name: str
    subject: str
    #: Name of the plan; "" = a limit of the customer's own, or one for everyone.
    plan: str
    #: None = all endpoints; of a deleted one, its number.
    endpoint: str | None
    #: The value of the policy; "" = not known any more.
    counted_per: str
    #: ``units`` or ``requests``: what the rate counts.
    unit: str
    #: The last rate of the plan, and its limit.
    rate: str
    limit: int
    #: Charged minus refunded units, and the part of them above the limit.
    used: int
    over: int
    #: The policy's mode now; "" = it is deleted.
    mode: str
    #: The days in TIME_ZONE on which the first window began and the last one ends: 15 October and 15 November.
    begins: date
    ends: date
    #: Whether the last window has ended; else the line is what was used so far.
    complete: bool
    #: When one of its windows changed last, in TIME_ZONE: after an invoice was sent, perhaps.
    changed_at: datetime
    #: Number of the policy that limited it last; it may be deleted by now.
    policy: int | None

    @property
    def period(self) -> str:
        """``day``, ``week`` or ``month``; of several days or weeks, each has the limit."""
        return Rate.parse(self.rate).calendar


#: The columns of a file, and what returns those of a line.
HEADS = tuple(field.name for field in fields(InvoiceLine))
cells: Callable[[InvoiceLine], Sequence[Any]] = attrgetter(*HEADS)


@dataclass(slots=True)
class _Part:
    """The windows limited by one policy or by all policies of one plan."""

    windows: list[QuotaWindow]
    #: The last one; 0 = none.
    policy: int
    rate: str
    limit: int
    used: int
    over: int = 0


#: The parts of months by policy, by counter and first day of the month.
_Months = Mapping[tuple[str, date], dict[int, _Part]]


class _Source(NamedTuple):
    """The columns of a line that its policy provides."""

    #: Equal for the policies of one plan: its id; minus the policy's where there is none.
    key: int
    plan: str
    counted_per: str
    mode: str


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
        months = _mixed(windows)
        ids = {window.policy_id or 0 for window in windows}
        ids.update(pk for parts in months.values() for pk in parts)
        sources, visible = _sources(ids), ids
        if self.policies is not None:
            visible = set(self.policies.filter(pk__in=ids).values_list("pk", flat=True))
        names = names_of(window.subject for window in windows)
        wanted = {window.endpoint_id for window in windows if window.endpoint_id}
        endpoints = dict(Endpoint.objects.filter(pk__in=wanted).values_list("pk", "name"))
        now_us = to_us(timezone.now())
        for _key, group in groupby(windows, key=_counter_or_month):
            for part in _parts(list(group), months, sources):
                source, last, pk = sources[part.policy], part.windows[-1], part.windows[-1].endpoint_id
                if part.policy not in visible:
                    continue
                changed_us = max(to_us(window.written_at) for window in part.windows)
                yield InvoiceLine(
                    name=names.get(last.subject, ""),
                    subject=last.subject,
                    plan=source.plan,
                    endpoint=None if pk is None else endpoints.get(pk, f"#{pk}"),
                    counted_per=source.counted_per,
                    unit="requests" if " requests/" in part.rate else "units",
                    rate=part.rate,
                    limit=part.limit,
                    used=part.used,
                    over=part.over,
                    mode=source.mode,
                    begins=part.windows[0].first_day,
                    ends=local_date(last.ends_at),
                    complete=to_us(last.ends_at) <= now_us,
                    changed_at=datetime.fromtimestamp(changed_us // 10**6, settings.time_zone),
                    policy=part.policy or None,
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
    """Return what windows share whose parts are added up."""
    return window.counter, window.first_day if window.period == QuotaWindow.Period.MONTH else None


def _mixed(windows: Iterable[QuotaWindow]) -> _Months:
    """Return what each policy has limited of mixed months, in the order in which they last charged anything."""
    month = QuotaWindow.Period.MONTH
    mixed = {(one.counter, one.first_day): one for one in windows if one.mixed and one.period == month}
    return {
        key: {
            policy: _Part([mixed[key]], policy, str(rate), rate.capacity, used)
            for policy, (used, rate) in policies.items()
        }
        for key, policies in limited_by(mixed).items()
        if key in mixed
    }


def _parts(windows: list[QuotaWindow], months: _Months, sources: Mapping[int, _Source]) -> list[_Part]:
    """Return the parts of a month, or of all days or weeks of a counter, by plan; each where its plan was last."""
    parts = [_Part([one], one.policy_id or 0, one.rate, one.limit, one.used) for one in windows]
    if by_policy := months.get((windows[0].counter, windows[0].first_day)):
        # The last policy has what is older than the days, too; it may have charged nothing yet.
        last = by_policy.setdefault(parts[0].policy, parts[0])
        last.used += parts[0].used - sum(part.used for part in by_policy.values())
        parts = list(by_policy.values())
    plans: dict[int, _Part] = {}
    for part in parts:
        part.over = max(0, part.used - part.limit)
        before = plans.pop(sources[part.policy].key, None)
        if before is not None:
            part.windows = [*before.windows, *part.windows]
            part.used += before.used
            part.over += before.over
        plans[sources[part.policy].key] = part
    found = list(plans.values())
    return _of_month(found) if windows[0].period == QuotaWindow.Period.MONTH else found


def _of_month(parts: list[_Part]) -> list[_Part]:
    """Return the parts of one month in which anything was used, with what exceeded the limit of the time."""
    # A reset gives back what was used under other plans, too.
    for part, other in (*pairwise(reversed(parts)), *pairwise(parts)):
        if part.used < 0:
            other.used, part.used = other.used + part.used, 0
    so_far = 0
    for part in parts:
        so_far += part.used
        part.over = max(0, min(part.used, so_far - part.limit))
    return [part for part in parts if part.used] or parts[-1:]


def _sources(ids: set[int]) -> dict[int, _Source]:
    """Return what each policy tells of its lines; of deleted ones, what the history does."""
    rows = RatePolicy.objects.filter(pk__in=ids).order_by()
    found = {0: _Source(0, "", "", "")}
    for pk, plan, name, counted_per, mode in rows.values_list("pk", "plan_id", "plan__name", "counted_per", "mode"):
        found[pk] = _Source(plan or -pk, name or "", counted_per, mode)
    deleted = _deleted("ratepolicy", ids - found.keys())
    plans = {before["plan"] for before in deleted.values() if before.get("plan")}
    names = dict(Plan.objects.filter(pk__in=plans).values_list("pk", "name")) if plans else {}
    names |= {pk: before.get("name") for pk, before in _deleted("plan", plans - names.keys()).items()}
    for pk in ids - found.keys():
        before = deleted.get(pk, {})
        plan = before.get("plan")
        name = "" if before and not plan else names.get(plan) or _("policy %s (deleted)") % pk
        found[pk] = _Source(plan or -pk, name, before.get("counted_per", ""), "")
    return found


def _deleted(model: str, ids: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return the fields that deleted objects had, by id, as far as the history tells."""
    texts = [str(pk) for pk in ids]
    changes = PolicyChange.objects.filter(model=model, object_id__in=texts, action=PolicyChange.Action.DELETE)
    rows: Iterable[Any] = changes.order_by("pk").values_list("object_id", "before") if texts else ()
    return {int(pk): before or {} for pk, before in rows}
