"""The verb ``usage`` of ``manage.py ratequota``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from ..operations.past_windows import HEADS, InvoiceLine, Invoices, cells, is_recorded, previous_month
from ..operations.subjects import named
from ..utils.csv_lines import csv_lines
from ..utils.escaping import one_line


def add_verbs(verbs: Any) -> None:
    """Add the verbs with their options."""
    text = "Show the quotas that customers have used in a month, for invoices."
    verb = verbs.add_parser("usage", run=usage, help=text)
    text = "Month of the invoices. Default: the previous month."
    verb.add_argument("--month", default="", metavar="YYYY-MM", help=text)
    verb.add_argument("--subject", default="", help="A subject such as user:42 or tenant:acme. Default: all.")
    text = "Output format. Default: text."
    verb.add_argument("--format", choices=["text", "csv", "json"], default="text", help=text)


def usage(command: BaseCommand, options: dict[str, Any]) -> Iterator[str]:
    """Yield the invoices' lines; raises ``CommandError`` where no month has the subject."""
    month, subject = options["month"] or previous_month(), options["subject"]
    found = Invoices(month=month, subject=subject).lines()
    first = next(found, None)
    if first is None:
        if subject and not is_recorded(subject):
            raise CommandError(f"No usage of {subject!r} is recorded")
        command.stderr.write(f"No usage in {month}{f' by {one_line(subject)}' if subject else ''}")
    lines = chain([] if first is None else [first], found)
    if options["format"] == "csv":
        # The terminal's line ends follow.
        yield from (line.removesuffix("\r\n") for line in csv_lines(HEADS, map(cells, lines)))
    elif options["format"] == "json":
        yield from (json.dumps(asdict(line), default=str) for line in lines)
    else:
        yield from map(_text, lines)


def _text(line: InvoiceLine) -> str:
    month = line.period == "month"
    used = f"{line.used} of {line.limit}" if month else f"{line.used}, {line.limit} each {line.period}"
    over = f", {line.over} over" if line.over else ""
    open_until = "" if line.complete else f", so far: until {line.ends}"
    plan = f"{line.plan} ({line.reason})" if line.reason else line.plan
    place = (named(line.subject, line.name), plan, line.endpoint or "all endpoints")
    return f"{'  '.join(text for text in place if text)}  {line.rate}: {used}{over}{open_until}"
