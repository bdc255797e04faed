"""Assign a plan to many customers, or add them to a list or remove them, by lines of text: pasted ones, or a file's.

A line is ``203.0.113.0/24``, ``tenant:acme``, ``user:42`` or a user's name or email address, then optionally
``until 2026-12-31`` and ``# reason``. A file in CSV has these as columns: who, end, reason, or others that its first
line names.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from io import StringIO
from itertools import islice
from typing import Any, TypeVar

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db.models import Model, Q, QuerySet
from django.utils import timezone
from django.utils.dateparse import parse_date, parse_datetime
from django.utils.translation import gettext as _

from ..changes.databases import saving
from ..changes.validators import check_year, is_address_like, primary_key, visible
from ..changes.writer import in_batches
from ..models import ListMember, Plan, PlanAssignment, SubjectList
from ..policies.facts import Assignment, UserEntry, as_stored, assignment_facts, to_us
from .subjects import find_accounts, only_account
from .texts import number_text

#: Maximum number of lines at once, with empty ones and comments. A longer file is refused, because servers end
#: workers that take long, and each line takes 0.2 ms to record in the history.
MAX_LINES = 25_000
_REASON, _UNTIL = re.compile(r"(?:^|(?<=\s))#"), re.compile(r"(?<=\s)until(?=\s)")
#: The first cell of a file in CSV, and what separates it from the next one.
_FIRST_CELL = re.compile(r'\s*(?:"[^"]*"\s*|[^"\s,;][^,;\t]*)?([,;\t])')
_FIRST_CELL_SIZE = 10_000
#: Names of the columns of a file in CSV, the one to prefer first; a hyphen or an underscore is written as a space.
_NAMES = [
    names.split(", ")
    for names in (
        "who, member, subject, user, user name, username, login, email, e mail, email address, customer",
        "end, ends, ends at, end date, until, valid until, expires, expires at, expiry, expiry date",
        "reason, why, comment, note",
    )
]
_SHOWN = 80
#: The columns that ``assignment_facts`` reads, and whose assignment it is.
_COLUMNS = ("pk", "user_id", "subject", "plan_id", "starts_at", "ends_at", "anchor")
#: A user's id and a subject, of which one is None.
Key = tuple[Any, str | None]
_Row = TypeVar("_Row", bound=Model)


@dataclass(frozen=True, slots=True)
class Line:
    """One line: the member as it is written, its end and its reason ("" = none)."""

    number: int
    who: str
    until: str = ""
    reason: str = ""


def lines_of(text: str, columns: bool = False) -> list[Line]:
    """Return the lines of the text without empty ones and comments; ``columns``: it is CSV."""
    # With newline="" a line ends at \n, \r\n and \r alone, unlike those of ``splitlines``.
    source = StringIO(text, newline="")
    lines = list(islice((_csv_lines if columns else _plain_lines)(source), MAX_LINES + 1))
    if len(lines) > MAX_LINES:
        problem = _(
            "There are more than %(most)s lines. Split them up or import a policy file with manage.py ratequota "
            "import."
        )
        raise ValidationError(problem % {"most": number_text(MAX_LINES)})
    return [line for line in lines if line.who and line.who[0] != "#"]


def _plain_lines(source: StringIO) -> Iterator[Line]:
    for at, line in enumerate(source, start=1):
        head, *reason = _REASON.split(line.strip(), maxsplit=1)
        who, *until = _UNTIL.split(f"{head} ", maxsplit=1)
        # "until" without a date is reported as a bad one.
        end = (until[0].strip() or "?") if until else ""
        yield Line(at, who.strip(), end, reason[0].strip() if reason else "")


def _csv_lines(source: StringIO) -> Iterator[Line]:
    # Strict: a quote that is never closed would silently make the rest of the file one cell.
    separator = _FIRST_CELL.match(source.read(_FIRST_CELL_SIZE))
    source.seek(0)
    rows = csv.reader(source, delimiter=separator[1] if separator else ",", strict=True)
    begun = 1
    usual: list[int | None] = [0, 1, 2]
    places: list[int | None] = []  # not known before the first line that is neither empty nor a comment
    try:
        for row in rows:
            cells = [" ".join(cell.splitlines()).strip() for cell in row]
            if not places and (named := _places(cells)):
                places = named
            else:
                if not places and cells and cells[0][:1] not in {"", "#"}:
                    places = usual
                yield Line(begun, *("" if at is None or at >= len(cells) else cells[at] for at in places or usual))
            begun = rows.line_num + 1
    except csv.Error as error:
        words = {"number": begun, "problem": error}
        raise ValidationError(_("Line %(number)d is not CSV: %(problem)s.") % words) from error


def _places(cells: list[str]) -> list[int | None]:
    """Return the place of each column that the first line names; None = it has no such column.

    Returns [] if the line is no head. Raises ``ValidationError`` if it is one without a column of customers.
    """
    heads = [re.sub("[-_ ]+", " ", cell.lower()) for cell in cells]
    places = [next((heads.index(name) for name in names if name in heads), None) for names in _NAMES]
    if places[0] is not None:
        return places
    if len(cells) > 1 and cells[1] and not cells[1][0].isdigit() and cells[0][:1] not in {"", "#"}:
        known = ", ".join(name for name in _NAMES[0] if name not in {"e mail", "user name"})
        problem = _("The first line names no column that is known: %(line)s. Name the one with customers %(names)s.")
        line = visible(", ".join(cells))[:_SHOWN]
        raise ValidationError(problem % {"line": line, "names": known})
    return []


def read_lines(model: type[_Row], lines: Sequence[Line], **fields: Any) -> dict[Key, tuple[Line, _Row]]:
    """Return an unsaved object for each user or subject, once.

    ``model`` has ``user``, ``subject``, ``ends_at`` and ``reason``; ``fields`` are those of all objects. Raises
    ``ValidationError`` with a message per bad line.
    """
    users = find_accounts(line.who for line in lines if _is_user(line.who))
    subjects: Any = model._meta.get_field("subject")
    entries: dict[Key, tuple[Line, _Row]] = {}
    problems: list[str] = []
    for line in lines:
        try:
            row: Any = model(ends_at=_end(line), reason=line.reason, **fields)
            if _is_user(line.who):
                subject, _name = only_account(users.get(line.who, {}))
                row.user_id = primary_key(get_user_model(), subject.removeprefix("user:"))
            else:
                row.subject = subjects.clean(line.who, row)
            row.clean_fields(exclude=[field.name for field in model._meta.concrete_fields if field.is_relation])
            entries.setdefault(_key_of(row), (line, row))
        except ValidationError as error:
            problems.append(_problem_of(line, " ".join(error.messages)))
    if problems:
        raise ValidationError(problems)
    return entries


def _is_user(who: str) -> bool:
    """Whether a line names a user, and not a subject."""
    kind, colon, _value = who.partition(":")
    return kind == "user" if colon else not is_address_like(who)


def _key_of(row: Any) -> Key:
    """Return the user id and the subject of an object, of which one is None."""
    return row.user_id, row.subject


def _stored_rows(model: type[_Row], keys: Iterable[Key], **fields: Any) -> QuerySet[_Row]:
    """Return the stored objects of the users and subjects."""
    users, subjects = ({value for value in values if value is not None} for values in zip(*keys, strict=True))
    return model._default_manager.filter(Q(user__in=users) | Q(subject__in=subjects), **fields).order_by()


def _end(line: Line) -> datetime | None:
    """Return the end of the day, or the time, that the line names; raises ``ValidationError``."""
    if not line.until:
        return None
    try:
        day = parse_date(line.until)
        end = parse_datetime(line.until)
        check_year(day or end)
        if day is not None:
            end = datetime(day.year, day.month, day.day) + timedelta(days=1)
    except ValueError:
        end = None
    if end is None:
        text = _("Enter the end as a day, such as until 2026-12-31, or as a time, such as until 2026-12-31 18:00.")
        raise ValidationError(text)
    end = as_stored(end)
    if end <= timezone.now():
        raise ValidationError(_("This end is in the past."))
    return end


def _problem_of(line: Line, text: str) -> str:
    """Return the message about a bad line."""
    who = visible(line.who)[:_SHOWN]
    return _("Line %(number)d, “%(who)s”: %(problem)s") % {"number": line.number, "who": who, "problem": text}


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
            rows = _stored_rows(PlanAssignment, [key for key, _entry in batch])
            for row in rows.values_list(*_COLUMNS, named=True):
                held.setdefault(_key_of(row), []).append(assignment_facts(row))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """The numbers of members that were added, given other dates, and found present, or written twice."""

    added: int
    changed: int
    present: int


def add_members(subject_list: SubjectList, lines: Sequence[Line], *, may_change: bool = True) -> Added:
    """Add the members; raises ``ValidationError`` with a message per bad line, and then adds nothing.

    A member that is in the list keeps its dates, unless the line has other ones, or its entry has ended: then these
    change, which ``may_change`` permits.
    """
    entries = read_lines(ListMember, lines, subject_list=subject_list)
    problems: list[str] = []
    added = changed = 0
    now = timezone.now()
    with saving(ListMember):
        for batch in in_batches(list(entries.items())):
            keys = [key for key, _entry in batch]
            stored = {_key_of(row): row for row in _stored_rows(ListMember, keys, subject_list=subject_list)}
            updates = []
            for key, (line, entry) in batch:
                member = stored.get(key)
                ended = member is not None and member.ends_at is not None and member.ends_at <= now
                if member is None or not (ended or (entry.ends_at and entry.ends_at != member.ends_at)):
                    continue
                if not may_change:
                    text = _("This entry is already in the list. You may not change its dates.")
                    problems.append(_problem_of(line, text))
                member.starts_at = None if ended else member.starts_at
                member.ends_at = entry.ends_at
                member.reason = entry.reason or member.reason
                updates.append(member)
            new = [entry for key, (_line, entry) in batch if key not in stored]
            ListMember.objects.bulk_create(new)
            ListMember.objects.bulk_update(updates, ["starts_at", "ends_at", "reason"])
            added, changed = added + len(new), changed + len(updates)
        if problems:
            raise ValidationError(problems)
    return Added(added=added, changed=changed, present=len(lines) - added - changed)


def remove_members(subject_list: SubjectList, lines: Sequence[Line]) -> int:
    """Remove the members, and return their number; raises as ``add_members``, and then removes nothing."""
    removed = 0
    with saving(ListMember):
        for batch in in_batches(list(read_lines(ListMember, lines))):
            pks = [member.pk for member in _stored_rows(ListMember, batch, subject_list=subject_list)]
            ListMember.objects.filter(pk__in=pks).delete()
            removed += len(pks)
    return removed
