"""Add members to a subject list, or remove them, by lines of text: pasted ones, or those of a file.

A line is ``203.0.113.0/24``, ``ip:203.0.113.7``, ``tenant:acme`` or ``user:alice``, then optionally
``until 2026-12-31`` and ``# reason``. A file in CSV has these as columns: member, end, reason.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db.models import Q
from django.utils import timezone
from django.utils.dateparse import parse_date, parse_datetime
from django.utils.translation import gettext as _

from ..changes.databases import policy_alias, saving
from ..changes.validators import canonical_subject, check_year, visible
from ..changes.writer import in_batches, users_by_login
from ..conf import settings
from ..models import ListMember, SubjectList
from ..policies.facts import to_datetime, to_us
from .numbers import number

#: Most lines at once; a longer file is refused, because a worker that takes long is ended by its server: each line is
#: recorded in the history, in 0.2 ms.
MAX_LINES = 25_000
_REASON, _UNTIL = re.compile(r"(?:^|(?<=\s))#"), re.compile(r"(?<=\s)until(?=\s)")
#: The first cell of a file in CSV, and what separates it from the next one.
_FIRST_CELL = re.compile(r'\s*(?:"[^"]*"\s*|[^"\s,;][^,;\t]*)?([,;\t])')
#: Names of the first column of a file in CSV.
_HEADS = ("member", "subject", "who")
_SHOWN = 80
#: A member's user id and subject, of which one is None.
_Key = tuple[Any, str | None]


@dataclass(frozen=True, slots=True)
class Line:
    """One line: the member as it is written, its end and its reason ("" = none)."""

    number: int
    who: str
    until: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The numbers of members that were added, given other dates, found present, and removed."""

    added: int = 0
    changed: int = 0
    #: Already in the list, or written twice.
    present: int = 0
    removed: int = 0
    #: Not in the list, so that nothing was removed.
    absent: int = 0


def lines_of(text: str, columns: bool = False) -> list[Line]:
    """Return the lines of the text without empty ones and comments; ``columns``: it is CSV."""
    found = [line for line in (_csv_lines if columns else _plain_lines)(text) if line.who and line.who[0] != "#"]
    if len(found) > MAX_LINES:
        text = _("More than %(most)s lines: split them up, or use a policy file and manage.py ratequota import.")
        raise ValidationError(text % {"most": number(MAX_LINES)})
    return found


def add_members(subject_list: SubjectList, lines: Iterable[Line], *, may_change: bool = True) -> Outcome:
    """Add the members; raises ``ValidationError`` with a message per bad line, and then adds nothing.

    A member that is in the list keeps its dates, unless the line has other ones, or its entry has ended: then these
    change, which ``may_change`` permits.
    """
    entries, repeated = _read(subject_list, lines)
    problems: list[str] = []
    added = changed = 0
    now = timezone.now()
    with saving(ListMember):
        for batch in in_batches(list(entries.items())):
            stored = _stored(subject_list, [key for key, _entry in batch])
            updates = []
            for key, (line, entry) in batch:
                member = stored.get(key)
                ended = member is not None and member.ends_at is not None and member.ends_at <= now
                if member is None or not (ended or (entry.ends_at and entry.ends_at != member.ends_at)):
                    continue
                if not may_change:
                    text = _("It is in the list already, and you may not change its dates.")
                    problems.append(problem_of(line, text))
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
    return Outcome(added=added, changed=changed, present=len(entries) - added - changed + repeated)


def remove_members(subject_list: SubjectList, lines: Iterable[Line]) -> Outcome:
    """Remove the members; raises ``ValidationError`` with a message per bad line, and then removes nothing."""
    entries, repeated = _read(subject_list, lines)
    removed = 0
    with saving(ListMember):
        for batch in in_batches(list(entries)):
            pks = [member.pk for member in _stored(subject_list, batch).values()]
            ListMember.objects.filter(pk__in=pks).delete()
            removed += len(pks)
    return Outcome(removed=removed, absent=len(entries) - removed + repeated)


def _plain_lines(text: str) -> Iterator[Line]:
    for at, line in enumerate(text.splitlines(), start=1):
        head, *reason = _REASON.split(line.strip(), maxsplit=1)
        who, *until = _UNTIL.split(f"{head} ", maxsplit=1)
        # "until" without a date is reported as a bad one.
        end = (until[0].strip() or "?") if until else ""
        yield Line(at, who.strip(), end, reason[0].strip() if reason else "")


def _csv_lines(text: str) -> Iterator[Line]:
    # Strict: a quote that is never closed would silently make the rest of the file one cell.
    separator = _FIRST_CELL.match(text)
    rows = csv.reader(text.splitlines(keepends=True), delimiter=separator[1] if separator else ",", strict=True)
    begun = 1
    try:
        for row in rows:
            who, until, reason = (*(" ".join(cell.splitlines()).strip() for cell in row[:3]), "", "", "")[:3]
            if begun > 1 or who.lower() not in _HEADS:
                yield Line(begun, who, until, reason)
            begun = rows.line_num + 1
    except csv.Error as error:
        words = {"number": begun, "problem": error}
        raise ValidationError(_("Line %(number)d is not CSV: %(problem)s.") % words) from error


def _read(subject_list: SubjectList, lines: Iterable[Line]) -> tuple[dict[_Key, tuple[Line, ListMember]], int]:
    """Return each member once, unsaved, and how many lines repeat one; raises ``ValidationError``."""
    lines = list(lines)
    entries, problems = read_members(lines)
    if problems:
        raise ValidationError(problems)
    for _line, member in entries.values():
        member.subject_list = subject_list
    return entries, len(lines) - len(entries)


def read_members(lines: Sequence[Line]) -> tuple[dict[_Key, tuple[Line, ListMember]], list[str]]:
    """Return each member that the lines name once, unsaved and in no list, and a message per bad line."""
    names = {line.who[5:] for line in lines if line.who.startswith("user:") and "\x00" not in line.who}
    users = users_by_login(names, policy_alias(get_user_model()))
    entries: dict[_Key, tuple[Line, ListMember]] = {}
    problems: list[str] = []
    for line in lines:
        try:
            member = _member(line, users)
            entries.setdefault(_key(member), (line, member))
        except ValidationError as error:
            problems.append(problem_of(line, " ".join(error.messages)))
    return entries, problems


def _member(line: Line, users: dict[str, list[Any]]) -> ListMember:
    """Return the member that the line names, in no list; raises ``ValidationError``."""
    member = ListMember(ends_at=_end(line), reason=line.reason)
    if line.who.startswith("user:"):
        if line.who[5:] not in users:
            raise ValidationError(_("There is no user with this login name."))
        member.user_id = users[line.who[5:]][0]
    else:
        try:
            member.subject = canonical_subject(line.who)
        except ValidationError as error:
            if not (error.params and "known" in error.params):
                raise
            known = ", ".join(("ip", "user", *settings.identifiers))
            text = _("Write an address, a network, or kind:value, where kind is one of %(known)s.")
            raise ValidationError(text % {"known": known}) from error
    member.clean_fields(exclude=["subject_list", "user"])
    return member


def _key(member: ListMember) -> _Key:
    return member.user_id, member.subject


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
        text = _("Write the end as a day, such as until 2026-12-31, or a time: until 2026-12-31 18:00.")
        raise ValidationError(text)
    end = to_datetime(to_us(end if timezone.is_aware(end) else timezone.make_aware(end)))
    if end <= timezone.now():
        raise ValidationError(_("This end is over already."))
    return end


def _stored(subject_list: SubjectList, keys: Iterable[_Key]) -> dict[_Key, ListMember]:
    """Return the list's entries for these members."""
    users, subjects = ({value for value in values if value is not None} for values in zip(*keys, strict=True))
    rows = ListMember.objects.filter(Q(user__in=users) | Q(subject__in=subjects), subject_list=subject_list)
    return {_key(row): row for row in rows.order_by()}


def problem_of(line: Line, text: str) -> str:
    """Return the message about a bad line."""
    who = visible(line.who)[:_SHOWN]
    return _("Line %(number)d, “%(who)s”: %(problem)s") % {"number": line.number, "who": who, "problem": text}
