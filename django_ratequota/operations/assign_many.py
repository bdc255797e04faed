"""Assign a plan to many customers by lines of text, as members are added to lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.utils import timezone

from ..changes.databases import saving
from ..changes.writer import in_batches
from ..models import Plan, PlanAssignment
from ..policies.facts import Assignment, UserEntry, assignment_facts, to_us
from .pasted_lines import Key, Line, key_of, read_lines, stored_rows

#: The columns that ``assignment_facts`` reads, and whose assignment it is.
_COLUMNS = ("pk", "user_id", "subject", "plan_id", "starts_at", "ends_at", "anchor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """The numbers of customers who were assigned, and who were not."""

    new: int
    #: Those of ``new`` who stay on another plan until their dated assignment there ends.
    later: int
    #: Already on the plan, for as long as the line asks.
    present: int


def assign(plan: Plan, lines: Sequence[Line], *, reason: str = "", created_by: Any = None) -> Assigned:
    """Assign the plan from now on; raises ``ValidationError`` with a message per bad line, and then assigns nothing.

    ``reason`` is that of lines without one.
    """
    start = timezone.now()
    entries = read_lines(PlanAssignment, lines, plan=plan, starts_at=start, created_by=created_by)
    new, later = [], 0
    with saving(PlanAssignment):
        for batch in in_batches(list(entries.items())):
            held: dict[Key, list[Assignment]] = {}
            for row in stored_rows(PlanAssignment, [key for key, _entry in batch]).values_list(*_COLUMNS, named=True):
                held.setdefault(key_of(row), []).append(assignment_facts(row))
            for key, (_line, own) in batch:
                own.reason = own.reason or reason
                before, wanted = tuple(held.get(key, ())), assignment_facts(own)
                now = UserEntry(assignments=before).assignment(to_us(start))
                lasts = now is not None and (now.ends_us is None or now.ends_us >= (wanted.ends_us or 2**63))
                if now is None or not (lasts and now.plan_id == plan.pk):
                    new.append(own)
                    later += UserEntry(assignments=(*before, wanted)).assignment(to_us(start)) is not wanted
        PlanAssignment.objects.bulk_create(new)
    return Assigned(new=len(new), later=later, present=len(lines) - len(new))
