"""Read users and subjects from lines of text: pasted ones, or those of a file.

A line is ``203.0.113.0/24``, ``tenant:acme`` or a user's login name, then optionally ``until 2026-12-31`` and
``# reason``. A file in CSV has these as columns: who, end, reason.
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

from ..changes.databases import policy_alias
from ..changes.validators import check_year, is_address_like, visible
from ..changes.writer import users_by_login
from ..policies.facts import to_datetime, to_us
from .texts import number_text

#: Maximum number of lines at once, with empty ones and comments. A longer file is refused, because servers end
#: workers that take long, and each line takes 0.2 ms to record in the history.
MAX_LINES = 25_000
_REASON, _UNTIL = re.compile(r"(?:^|(?<=\s))#"), re.compile(r"(?<=\s)until(?=\s)")
#: The first cell of a file in CSV, and what separates it from the next one.
_FIRST_CELL = re.compile(r'\s*(?:"[^"]*"\s*|[^"\s,;][^,;\t]*)?([,;\t])')
_FIRST_CELL_SIZE = 10_000
#: Names of the first column of a file in CSV.
_HEADS = ("who", "member", "subject", "customer", "user")
_SHOWN = 80
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
    try:
        for row in rows:
            who, until, reason = (*(" ".join(cell.splitlines()).strip() for cell in row[:3]), "", "", "")[:3]
            if begun > 1 or who.lower() not in _HEADS:
                yield Line(begun, who, until, reason)
            begun = rows.line_num + 1
    except csv.Error as error:
        words = {"number": begun, "problem": error}
        raise ValidationError(_("Line %(number)d is not CSV: %(problem)s.") % words) from error


def read_lines(model: type[_Row], lines: Sequence[Line], **fields: Any) -> dict[Key, tuple[Line, _Row]]:
    """Return an unsaved object for each user or subject, once.

    ``model`` has ``user``, ``subject``, ``ends_at`` and ``reason``; ``fields`` are those of all objects. Raises
    ``ValidationError`` with a message per bad line.
    """
    logins = [_login(line.who) for line in lines]
    users = users_by_login({name for name in logins if name and "\x00" not in name}, policy_alias(get_user_model()))
    subjects: Any = model._meta.get_field("subject")
    entries: dict[Key, tuple[Line, _Row]] = {}
    problems: list[str] = []
    for line, login in zip(lines, logins, strict=True):
        try:
            row: Any = model(ends_at=_end(line), reason=line.reason, **fields)
            if login is None:
                row.subject = subjects.clean(line.who, row)
            else:
                row.user_id = _user_id(login, users)
            row.clean_fields(exclude=[field.name for field in model._meta.concrete_fields if field.is_relation])
            entries.setdefault(key_of(row), (line, row))
        except ValidationError as error:
            problems.append(problem_of(line, " ".join(error.messages)))
    if problems:
        raise ValidationError(problems)
    return entries


def _login(who: str) -> str | None:
    """Return the login name that a line names, which may begin with ``user:``; None where it names a subject."""
    kind, colon, name = who.partition(":")
    if colon:
        return name if kind == "user" else None
    return None if is_address_like(who) else who


def _user_id(login: str, users: dict[str, list[Any]]) -> Any:
    if login not in users:
        raise ValidationError(_("There is no user with this login name."))
    return users[login][0]


def key_of(row: Any) -> Key:
    """Return the user id and the subject of an object, of which one is None."""
    return row.user_id, row.subject


def stored_rows(model: type[_Row], keys: Iterable[Key], **fields: Any) -> QuerySet[_Row]:
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
    end = to_datetime(to_us(end if timezone.is_aware(end) else timezone.make_aware(end)))
    if end <= timezone.now():
        raise ValidationError(_("This end is in the past."))
    return end


def problem_of(line: Line, text: str) -> str:
    """Return the message about a bad line."""
    who = visible(line.who)[:_SHOWN]
    return _("Line %(number)d, “%(who)s”: %(problem)s") % {"number": line.number, "who": who, "problem": text}
