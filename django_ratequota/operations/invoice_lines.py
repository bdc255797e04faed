"""The usage of calendar windows by day, policy and rate, and the lines that it makes on an invoice.

Units above the limit are found by going through the days in order, so that they stay the same whatever changes later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from itertools import zip_longest
from typing import Any, NamedTuple

from django.utils.translation import gettext as _

from ..conf import settings
from ..engine.calendar_windows import local_day
from ..engine.rates import Rate
from ..models import Plan, PlanAssignment, PolicyChange, QuotaDay, QuotaWindow, RatePolicy
from ..policies.facts import Assignment, UserEntry, to_us
from ..policies.loading import assignments_of

_MONTH = timedelta(days=31)


class Day(NamedTuple):
    """The units of a window on one day under one policy and rate."""

    #: None = the days before the others, which are no longer kept. Of a day or a week, its first day.
    day: date | None
    #: 0 = none.
    policy: int
    rate: str
    charged: int
    refunded: int

    @property
    def used(self) -> int:
        """Return the charged units without those refunded."""
        return self.charged - self.refunded


class Source(NamedTuple):
    """What a line or a day has from its policy."""

    #: The plan's id; None = not for a plan.
    plan_id: int | None
    plan: str
    counted_per: str
    mode: str


class _Term(NamedTuple):
    """The days on which an assignment to the plan was in force, also for a part of the day."""

    plan_id: int
    first: date
    last: date
    assignment: Assignment


@dataclass(slots=True, kw_only=True)
class Line:
    """The usage of one counter under one policy and rate, and one assignment to its plan."""

    policy: int
    rate: str
    limit: int
    source: Source
    #: Its id; 0 = none.
    assignment: int
    windows: list[QuotaWindow]
    #: Those on which more was charged than refunded, in order.
    days: list[date | None] = field(default_factory=list)
    used: int = 0
    #: The part of ``used`` above the limit.
    over: int = 0
    #: The assignment's.
    reason: str = ""

    @property
    def first_day(self) -> date | None:
        """Return the first day with charges; None = it is no longer kept."""
        return self.days[0] if self.days else None

    @property
    def last_day(self) -> date | None:
        """Return the last day with charges; None = it is no longer kept."""
        return self.days[-1] if self.days else None


def lines_of(groups: Iterable[Sequence[QuotaWindow]]) -> list[list[Line]]:
    """Return the lines of each group of windows, which are a month, or days or weeks of one counter, added up."""
    groups = list(groups)
    windows = [window for group in groups for window in group]
    days = days_of(windows)
    sources = sources_of({day.policy for own in days.values() for day in own})
    terms = _terms({window.subject for window in windows})
    found: list[list[Line]] = []
    for group in groups:
        merged: dict[tuple[int, str, int], Line] = {}
        for window in group:
            for line in _fold(window, days[window.pk], sources, terms.get(window.subject, [])):
                total = merged.setdefault((line.policy, line.rate, line.assignment), line)
                if total is not line:
                    total.windows, total.days = total.windows + line.windows, total.days + line.days
                    total.used, total.over = total.used + line.used, total.over + line.over
        found.append(list(merged.values()))
    named = [line for lines in found for line in lines if line.assignment]
    rows = PlanAssignment.objects.filter(pk__in={line.assignment for line in named}).order_by()
    reasons = dict(rows.values_list("pk", "reason")) if named else {}
    for line in named:
        line.reason = reasons.get(line.assignment, "")
    return found


def days_of(windows: Sequence[QuotaWindow]) -> dict[int, list[Day]]:
    """Return the days of each window in order, by its id. What no day has comes first, under the row's own rate.

    Read the windows before, so that units that are written meanwhile do not look like those of earlier days.
    """
    found: dict[int, list[Day]] = {window.pk: [] for window in windows}
    months = {(one.counter, one.first_day): one.pk for one in windows if one.period == QuotaWindow.Period.MONTH}
    counters, first_days = ({name[at] for name in months} for at in (0, 1))
    rows = QuotaDay.objects.filter(counter__in=counters, first_day__in=first_days).order_by("day", "pk")
    columns = ("counter", "first_day", "day", "policy_id", "rate", "charged", "refunded")
    for counter, first_day, *own in rows.values_list(*columns) if months else ():
        if (counter, first_day) in months:
            found[months[counter, first_day]].append(Day(*own))
    for window in windows:
        days = found[window.pk]
        charged, refunded = (sum(figures) for figures in zip((0, 0), *(day[-2:] for day in days), strict=True))
        rest = max(0, window.charged - charged), max(0, window.refunded - refunded)
        if any(rest):
            day = None if window.period == QuotaWindow.Period.MONTH else window.first_day
            days.insert(0, Day(day, window.policy_id or 0, window.rate, *rest))
    return found


def _fold(
    window: QuotaWindow, days: Sequence[Day], sources: Mapping[int, Source], terms: Sequence[_Term]
) -> list[Line]:
    """Return the lines of one window with any usage, or its last line."""
    lines: dict[tuple[int, str, int], Line] = {}
    paid = 0  # units that plans have paid
    for day, following in zip_longest(days, days[1:]):
        source = sources[day.policy]
        until = day.day or (following and following.day) or window.first_day + _MONTH
        assignment = _assignment(terms, source.plan_id, day.day or window.first_day, until) if terms else 0
        key = day.policy, day.rate, assignment
        if key not in lines:
            named: dict[str, Any] = {"policy": day.policy, "rate": day.rate, "assignment": assignment}
            limit = Rate.parse(day.rate).capacity
            lines[key] = Line(**named, limit=limit, source=source, windows=[window])
        line = lines[key]
        units = day.used
        if units > 0:
            line.days.append(day.day)
        if units >= 0:
            before = min(units, max(0, -line.used))  # refunded before they were charged
            pays = before + max(0, min(units - before, line.limit - paid - before))
            line.used, line.over, paid = line.used + units, line.over + units - pays, paid + pays
            continue
        same = [one for one in lines.values() if (one.policy, one.rate) == (line.policy, line.rate)]
        paid -= _take([line, *reversed(same)], -units, line)
    found = list(lines.values())
    for line in found:  # whose units were refunded before they were charged, or under another policy
        if line.used < 0:
            units, line.used = -line.used, 0
            _take([one for one in reversed(found) if one.used > 0], units, line)
    return [line for line in found if line.used] or found[-1:]


def _take(lines: Iterable[Line], units: int, rest: Line) -> int:
    """Take units from the lines in turn, of each first what is over, and what they lack from ``rest``.

    Returns how many of them plans had paid.
    """
    paid = 0
    for line in lines:
        taken = max(0, min(units, line.used))
        of_over = min(taken, line.over)
        line.used, line.over = line.used - taken, line.over - of_over
        paid, units = paid + taken - of_over, units - taken
    rest.used -= units
    return paid + units


def _terms(subjects: Iterable[str]) -> dict[str, list[_Term]]:
    """Return the terms of each subject's assignments."""
    zone, found = settings.time_zone, dict[str, list[_Term]]()
    for subject, assignments in assignments_of(subjects).items():
        for one in assignments:
            last = date.max if one.ends_us is None else local_day(one.ends_us - 1, zone)
            found.setdefault(subject, []).append(_Term(one.plan_id, local_day(one.starts_us, zone), last, one))
    return found


def _assignment(terms: Iterable[_Term], plan_id: int | None, first: date, last: date) -> int:
    """Return the id of the first assignment to the plan that was in force within these days; 0 = none was."""
    found = [one.assignment for one in terms if one.plan_id == plan_id and one.first <= last and first <= one.last]
    if len(found) < 2:
        return found[0].id if found else 0
    begins_us = to_us(datetime(first.year, first.month, first.day, tzinfo=settings.time_zone))
    at_us = max(begins_us, min(one.starts_us for one in found))
    chosen = UserEntry(assignments=tuple(found)).assignment(at_us)
    return chosen.id if chosen else 0


def sources_of(ids: set[int]) -> dict[int, Source]:
    """Return what each policy tells of its lines; of deleted ones, what the history does."""
    rows = RatePolicy.objects.filter(pk__in=ids).order_by()
    found = {0: Source(None, "", "", "")}
    for pk, plan, name, counted_per, mode in rows.values_list("pk", "plan_id", "plan__name", "counted_per", "mode"):
        found[pk] = Source(plan, name or "", counted_per, mode)
    deleted = _deleted("ratepolicy", ids - found.keys())
    plans = {before["plan"] for before in deleted.values() if before.get("plan")}
    names = dict(Plan.objects.filter(pk__in=plans).values_list("pk", "name")) if plans else {}
    names |= {pk: before.get("name") for pk, before in _deleted("plan", plans - names.keys()).items()}
    for pk in ids - found.keys():
        before = deleted.get(pk, {})
        plan = before.get("plan")
        name = "" if before and not plan else names.get(plan) or _("policy %s (deleted)") % pk
        found[pk] = Source(plan, name, before.get("counted_per", ""), before.get("mode", ""))
    return found


def _deleted(model: str, ids: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return the fields that deleted objects had, by id, as far as the history tells."""
    texts = [str(pk) for pk in ids]
    changes = PolicyChange.objects.filter(model=model, object_id__in=texts, action=PolicyChange.Action.DELETE)
    rows: Iterable[Any] = changes.order_by("pk").values_list("object_id", "before") if texts else ()
    return {int(pk): before or {} for pk, before in rows}
