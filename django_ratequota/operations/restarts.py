"""Which counts of running months start again, because an edit of a plan assignment moves the day of the month."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from typing import Literal, NamedTuple

from ..conf import settings
from ..engine.calendar_windows import calendar_window
from ..models import PlanAssignment, QuotaWindow
from ..monitoring.ledger_rows import stored_subject
from ..policies.facts import SubjectKey, UserEntry, assignment_facts, subject_key, to_us
from ..policies.loading import load_entries
from .running_windows import Chosen, rows, time_us


class Restart(NamedTuple):
    """A running month, replaced by another one before its end."""

    window: QuotaWindow
    #: The day in TIME_ZONE on which that happens.
    on: date


def restarts(edited: PlanAssignment, *, deleted: bool = False) -> Iterator[Restart]:
    """Yield the customer's own months in the ledger that end early if the assignment is saved, or deleted.

    Whose plan depends on a subject is not known, so the months of its users are missing. Raises ``django.db.Error``.
    """
    stored = PlanAssignment.objects.filter(pk=edited.pk).first() or edited
    owners = set() if settings.plan_resolver else {_owner(stored), _owner(edited)}
    for owner, before in load_entries(owners).items():
        after = [one for one in before.assignments if one.id != edited.pk]
        if owner == _owner(edited) and not deleted:
            after.append(assignment_facts(edited))
        yield from _restarts_of(owner, before, replace(before, assignments=tuple(after)))


def _restarts_of(owner: str | SubjectKey, before: UserEntry, after: UserEntry) -> Iterator[Restart]:
    subject = stored_subject(f"user:{owner}" if isinstance(owner, str) else ":".join(owner))
    now_us, dated = time_us(), (*before.assignments, *after.assignments)
    times = {max(now_us, at_us) for one in dated for at_us in (one.starts_us, one.ends_us or 0)}
    for row in rows(QuotaWindow.Period.MONTH, Chosen(subjects=frozenset({subject}))):
        for at_us in sorted(times):
            was, will = before.anchor(at_us), after.anchor(at_us)
            first_day = _first_day("month", at_us, will or 1)
            # If no assignment tells the day, the row does.
            runs = at_us < to_us(row.ends_at) and (not was or _first_day("month", at_us, was) == row.first_day)
            if row.used > 0 and runs and will != was and first_day != row.first_day:
                yield Restart(row, _first_day("day", at_us))
                break


def _first_day(unit: Literal["day", "month"], at_us: int, anchor: int = 1) -> date:
    return calendar_window(unit, at_us, settings.time_zone, anchor).first_day


def _owner(row: PlanAssignment) -> str | SubjectKey:
    return subject_key(row.subject or "") if row.user_id is None else str(row.user_id)
