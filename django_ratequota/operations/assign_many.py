"""Assign a plan to many customers by lines of text, as members are added to lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Q

from ..changes.validators import assignable_subject
from ..changes.writer import in_batches
from ..models import Plan, PlanAssignment
from ..policies.facts import UserEntry, assignment_facts, to_us
from .list_members import Line, problem_of, read_members

#: The columns that ``assignment_facts`` reads, and whose assignment it is.
_COLUMNS = ("pk", "user_id", "subject", "plan_id", "starts_at", "ends_at", "anchor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigning:
    """What the lines would do."""

    #: The assignments to create, unsaved.
    new: tuple[PlanAssignment, ...]
    #: Plan id of those of ``new`` who have an assignment now (None = no assignment) -> their number.
    moved: Counter[int | None]
    #: Customers who are on the plan already, for as long as the line asks; nothing is created for these.
    present: int
    #: Those of ``new`` who stay on another plan until their dated assignment there ends.
    later: int
    #: A message per line that was not understood.
    problems: tuple[str, ...]


def assigning(plan: Plan, lines: Iterable[Line], *, starts_at: datetime, **fields: Any) -> Assigning:
    """Return what the lines would do; ``fields`` are those of each assignment, unless its line has others.

    A line without a colon is a user's login name.
    """
    understood, problems = [], []
    for line in lines:
        who = line.who if ":" in line.who else f"user:{line.who}"
        try:
            if not who.startswith("user:"):
                assignable_subject(who)
            understood.append(replace(line, who=who))
        except ValidationError as error:
            problems.append(problem_of(line, " ".join(error.messages)))
    entries, unknown = read_members(understood)
    new, moved, present, later = [], Counter[int | None](), 0, 0
    for batch in in_batches(list(entries.items())):
        assigned = _assigned([key for key, _entry in batch])
        for key, (line, member) in batch:
            own = PlanAssignment(plan=plan, user_id=member.user_id, subject=member.subject, starts_at=starts_at)
            for name, value in fields.items():
                setattr(own, name, getattr(member, name, None) or value)
            try:
                own.clean()
            except ValidationError as error:
                problems.append(problem_of(line, " ".join(error.messages)))
                continue
            facts, start_us = assigned.get(key, ()), to_us(starts_at)
            now = UserEntry(assignments=facts).assignment(start_us)
            wanted = assignment_facts(own)
            if now and now.plan_id == plan.pk and (now.ends_us is None or now.ends_us >= (wanted.ends_us or 2**63)):
                present += 1
                continue
            new.append(own)
            moved[now.plan_id if now else None] += 1
            later += UserEntry(assignments=(*facts, wanted)).assignment(start_us) is not wanted
    return Assigning(new=tuple(new), moved=moved, present=present, later=later, problems=(*problems, *unknown))


def _assigned(keys: Iterable[tuple[Any, str | None]]) -> dict[tuple[Any, str | None], tuple[Any, ...]]:
    """Return the assignments of users and subjects, by these."""
    users, subjects = ({value for value in values if value is not None} for values in zip(*keys, strict=True))
    rows = PlanAssignment.objects.filter(Q(user__in=users) | Q(subject__in=subjects)).order_by()
    found: dict[tuple[Any, str | None], tuple[Any, ...]] = {}
    for row in rows.values_list(*_COLUMNS, named=True):
        key = row.user_id, row.subject
        found[key] = (*found.get(key, ()), assignment_facts(row))
    return found
