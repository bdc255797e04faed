"""Put one customer on a plan, whatever other assignments the customer has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.utils.translation import gettext as _

from ..changes.databases import saving
from ..changes.validators import check_year, visible
from ..changes.writer import changed_by
from ..models import Plan, PlanAssignment
from ..policies.facts import Assignment, UserEntry, as_stored, assignment_facts, to_datetime, to_us
from .overrides import this_second
from .subjects import find_accounts, only_account, subject_of

_NEVER = 2**63
#: The customer's assignments, each with what becomes of it; None = it is deleted.
_Left = Mapping[Assignment, Assignment | None]


def assign(
    customer: Any,
    plan: Plan | str,
    *,
    starts_at: datetime | None = None,
    ends_at: datetime | None = None,
    reason: str = "",
    anchor: int | None = None,
) -> PlanAssignment:
    """Put a customer on a plan from ``starts_at`` (None = now) until ``ends_at`` (None = open-ended).

    ``customer`` is a user or a subject such as ``organisation:7`` or ``user:42``, ``plan`` a ``Plan`` or its slug.
    ``anchor`` is the day of the month on which monthly quotas begin, 1 to 31; None keeps the customer's day.

    Without ``ends_at``, all other assignments of the customer end at ``starts_at``, and those that would begin later
    are dropped, such as a cancellation for the end of the month. With ``ends_at``, as for a trial, this is true of
    other assignments with an end, and then the plan applies that the customer would have had without the trial. If
    the customer is on the plan already, for as long as you ask, that assignment is returned, so a call may be
    repeated. The change takes effect with the next request, and the history shows ``reason`` with it.

    Raises ``ValidationError`` with what is wrong with the arguments, such as a slug that no plan has.
    """
    for moment in (starts_at, ends_at):
        check_year(moment)
    with changed_by(None, reason), saving(PlanAssignment):
        now = this_second()
        new = PlanAssignment(
            **_owner(customer),
            plan_id=plan.pk if isinstance(plan, Plan) else _plan_id(plan),
            starts_at=now if starts_at is None else as_stored(starts_at),
            ends_at=None if ends_at is None else as_stored(ends_at),
            reason=reason,
            anchor=anchor,
        )
        new.full_clean()
        stored: Any = PlanAssignment.objects.filter(subject=new.subject).select_for_update().order_by("pk")
        rows: dict[Assignment, PlanAssignment] = {
            assignment_facts(row): row for row in stored.filter(user=new.user_id)
        }
        wanted = assignment_facts(new)
        present = UserEntry(assignments=tuple(rows)).assignment(wanted.starts_us)
        if present is not None and _is_equal(rows[present], new):
            kept = {**_left_by(wanted, [one for one in rows if one != present]), present: present}
            if _lasts(kept, present, wanted, to_us(now)):
                _write(rows, kept)
                return rows[present]
        left = _left_by(wanted, rows)
        if wanted.ends_us is None:
            left = _ended(left, wanted.starts_us)
        _write(rows, left)
        new.anchor = anchor or _lost_day(left, wanted, to_us(now))
        new.save()
        return new


def _owner(customer: Any) -> dict[str, Any]:
    """Return the field of a ``PlanAssignment`` that says whose it is. Raises ``ValidationError``."""
    subject = subject_of(customer)
    if not subject.startswith("user:"):
        return {"subject": subject}
    if isinstance(customer, str):
        subject, _name = only_account(find_accounts([subject]).get(subject, {}))
    return {"user_id": subject.removeprefix("user:")}


def _plan_id(slug: str) -> int:
    """Return the key of the plan. Raises ``ValidationError`` with the slugs that there are."""
    plans: dict[str, int] = dict(Plan.objects.values_list("slug", "pk"))
    if slug not in plans:
        words = {"slug": visible(slug), "known": ", ".join(plans)}
        raise ValidationError(_("There is no plan with the slug %(slug)s. Known slugs: %(known)s."), params=words)
    return plans[slug]


def _left_by(new: Assignment, others: Iterable[Assignment]) -> _Left:
    """Return the others such that they never override the new one."""
    left = {one: _left_of(one, new) for one in others}
    return left if new.ends_us is None else _in_turn(left, new.ends_us)


def _left_of(one: Assignment, new: Assignment) -> Assignment | None:
    """Return what is left of an assignment so that it never overrides the new one.

    What the new one has precedence over stays: after its end, it applies again.
    """
    ends_us, new_ends_us = one.ends_us or _NEVER, new.ends_us or _NEVER
    if ends_us <= new.starts_us or one.starts_us >= new_ends_us:
        return one
    if one.starts_us < new.starts_us:
        return one if one.ends_us is None or ends_us > new_ends_us else replace(one, ends_us=new.starts_us)
    if ends_us <= new_ends_us:
        return None
    return one if one.ends_us is None else replace(one, starts_us=new_ends_us)


def _is_equal(present: PlanAssignment, new: PlanAssignment) -> bool:
    """Whether the plan is the same, and so are the reason and the day if the new assignment names them."""
    same = present.plan_id == new.plan_id and new.reason in ("", present.reason)
    return same and new.anchor in (None, present.anchor)


def _lasts(kept: _Left, present: Assignment, new: Assignment, now_us: int) -> bool:
    """Whether the assignment in force at the start of the new one makes that superfluous."""
    ends_us, at_us = new.ends_us or _NEVER, max(new.starts_us, now_us)
    same_day = _entry(kept).anchor(at_us) == _entry(kept.values()).anchor(at_us)
    times = (at for at in _turns(kept) if new.starts_us <= at < ends_us)
    return same_day and all(_in_force(kept, at) == present.id for at in times)


def _ended(left: _Left, at_us: int) -> _Left:
    """Return the assignments with an end at ``at_us`` where they have none, unless that changes who precedes whom.

    An assignment takes precedence over open ones as soon as it has an end.
    """
    ended = {
        one: replace(rest, ends_us=at_us) if rest is not None and rest.ends_us is None else rest
        for one, rest in left.items()
    }
    earlier = [at for at in _turns(left) if at < at_us]
    return ended if all(_in_force(left, at) == _in_force(ended, at) for at in earlier) else left


def _in_turn(left: _Left, at_us: int) -> _Left:
    """Return the assignments such that those that now begin together at ``at_us`` have their old precedence.

    Among equals the highest id wins, so they may have to exchange their rows.
    """
    together = {one: rest for one, rest in left.items() if rest and rest.starts_us == at_us and rest.ends_us}
    ordered = sorted(together, key=lambda one: (one.starts_us, one.id))
    ids = sorted(one.id for one in together)
    return {**left, **{one: replace(together[one], id=pk) for one, pk in zip(ordered, ids, strict=True)}}


def _lost_day(left: _Left, new: Assignment, now_us: int) -> int | None:
    """Return the day on which months begin until now, or until the new one's start, if it changes then."""
    day = _entry(left).anchor(max(new.starts_us - 1, now_us))
    return day if day and day != _entry([*left.values(), new]).anchor(max(new.starts_us, now_us)) else None


def _entry(assignments: Iterable[Assignment | None]) -> UserEntry:
    return UserEntry(assignments=tuple(one for one in assignments if one is not None))


def _in_force(left: _Left, at_us: int) -> int | None:
    """Return the id of the assignment that gives the plan at ``at_us``."""
    found = _entry(left.values()).assignment(at_us)
    return None if found is None else found.id


def _turns(left: _Left) -> Iterable[int]:
    """Return the times at which assignments begin and end."""
    return {at for one in _entry(left.values()).assignments for at in (one.starts_us, one.ends_us) if at is not None}


def _write(rows: Mapping[Assignment, PlanAssignment], left: _Left) -> None:
    """Store what is left of each row."""
    PlanAssignment.objects.filter(pk__in=[rows[one].pk for one, rest in left.items() if rest is None]).delete()
    for one, rest in left.items():
        if rest not in (None, one):
            row = rows[one]
            row.pk, row.starts_at = rest.id, to_datetime(rest.starts_us)
            row.ends_at = None if rest.ends_us is None else to_datetime(rest.ends_us)
            row.save()
