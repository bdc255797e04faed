"""``manage.py ratequota VERB``: the verbs are in the modules of ``django_ratequota.management``."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError
from django.db import Error as DatabaseError

from ...changes.databases import policy_alias
from ...checks.database import check_migrated
from ...exceptions import StoreError
from .. import callers, maintenance, overrides, personal_data, policyfile, undo, usage


class Command(BaseCommand):
    """One command with a verb for each task; ``explain``, ``near``, ``status`` and ``export`` only read."""

    help = "Explain, export, import, boost and undo limits, block callers, and look after the counters."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the verbs; the function of each is its option ``run``, and may yield lines to print."""
        verbs = parser.add_subparsers(dest="verb", required=True)
        for module in (callers, overrides, maintenance, personal_data, policyfile, undo, usage):
            module.add_verbs(verbs)
        verbs.metavar = " | ".join(verbs.choices)

    def handle(self, *args: Any, run: Any, **options: Any) -> None:
        """Run one verb; raises ``CommandError``."""
        try:
            for line in run(self, options) or ():
                self.stdout.write(line)
        except ValidationError as error:
            raise CommandError(" ".join(error.messages)) from error
        except DatabaseError as error:
            for problem in check_migrated(databases=[policy_alias()]):
                raise CommandError(f"{problem.msg} {problem.hint}") from error
            raise CommandError(f"The database did not answer: {error}") from error
        except StoreError as error:
            raise CommandError(f"Redis did not answer ({error.reason}): {error}") from error
