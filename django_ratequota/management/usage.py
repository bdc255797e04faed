"""The verb ``usage`` of ``manage.py ratequota``."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from io import StringIO
from itertools import islice
from typing import Any

from django.core.management.base import BaseCommand
from django.utils import timezone

from ..conf import settings
from ..operations.past_windows import Used, previous_month, used_in_month
from ..operations.subject_names import named, printable, subject_names

#: Subjects whose names are looked up at once.
_NAMED = 1000
_HEADS = ("subject", "endpoint", "rate", "windows", "used", "limit", "begins", "ends", "policy")


def add_verbs(verbs: Any) -> None:
    """Add the verbs with their options."""
    verb = verbs.add_parser("usage", help="Show what callers have used of their quotas in a month, for invoices.")
    verb.set_defaults(run=usage)
    verb.add_argument("--month", default="", metavar="YYYY-MM", help="Default: the month before this one.")
    verb.add_argument("--subject", default="", help="Only this one, such as user:42 or tenant:acme.")
    verb.add_argument("--format", choices=["text", "csv", "json"], default="text", help="Default: text.")


def usage(_command: BaseCommand, options: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each subject and rate."""
    today = timezone.now().astimezone(settings.time_zone).date()
    month = options["month"] or previous_month(today)
    rows = used_in_month(month, options["subject"])
    if options["format"] == "csv":
        yield _csv_line(_HEADS)
        yield from (_csv_line(list(asdict(row).values())) for row in rows)
    elif options["format"] == "json":
        yield from (json.dumps(asdict(row), default=str) for row in rows)
    else:
        left = iter(rows)
        while batch := list(islice(left, _NAMED)):
            names = subject_names(row.subject for row in batch)
            yield from (_text(row, today, names.get(row.subject, "")) for row in batch)


def _csv_line(values: Any) -> str:
    line = StringIO()
    csv.writer(line).writerow(values)  # with its own line ends, so that those within a subject are quoted
    return line.getvalue().removesuffix("\r\n")


def _text(row: Used, today: date, name: str) -> str:
    windows = "" if row.windows == 1 else f" in {row.windows} windows"
    open_until = "" if row.ends <= today else f", so far: until {row.ends}"
    used = f"{row.used} of {row.limit}{windows}{open_until}"
    who = printable(named(row.subject, name))
    return f"{who}  {row.endpoint or 'all endpoints'}  {row.rate}: {used}"
