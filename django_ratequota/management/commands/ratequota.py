"""``manage.py ratequota VERB``: the verbs are in the modules of ``django_ratequota.management``."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error as DatabaseError

from ...checks.database import check_migrated
from ...exceptions import StoreError
from ...utils.escaping import one_line
from .. import callers, maintenance, overrides, personal_data, policies, usage


class VerbParser(CommandParser):
    """The parser of one verb; ``run`` is the verb's function, which may yield lines to print."""

    def __init__(self, *, run: Callable[..., Any], **options: Any) -> None:
        super().__init__(**options)
        self.set_defaults(run=run)


class Command(BaseCommand):
    """One command with a verb for each task; ``explain``, ``near``, ``status`` and ``export`` only read."""

    help = "Explain, export, import, boost and undo limits, block customers and maintain the counters."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the verbs; the function of each is its option ``run``."""
        verbs = parser.add_subparsers(dest="verb", required=True, parser_class=VerbParser)
        for module in (callers, overrides, maintenance, personal_data, policies, usage):
            module.add_verbs(verbs)
        verbs.metavar = " | ".join(verbs.choices)

    def handle(self, *args: Any, run: Any, **options: Any) -> None:
        """Run one verb and print its lines, in which no client's text can be a line of its own or a terminal code.

        Raises ``CommandError``, with an escaped text as well.
        """
        try:
            for line in run(self, options) or ():
                self.stdout.write(one_line(line))
        except (CommandError, ValidationError, DatabaseError, StoreError) as error:
            raise CommandError(one_line(_in_words(error))) from error


def _in_words(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return " ".join(error.messages)
    if isinstance(error, DatabaseError):
        with suppress(DatabaseError):
            for problem in check_migrated():
                return f"{problem.msg} {problem.hint}"
        return f"The database is unavailable: {error}"
    return f"Redis did not answer ({error.reason}): {error}" if isinstance(error, StoreError) else str(error)
