"""``manage.py seed``: the example's tables, plans, users, policies, and traffic of the last 24 hours."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management import call_command
from django.core.management.base import BaseCommand

from django_ratequota.exceptions import StoreError

from ...seed import seed
from ...traffic import record_traffic


class Command(BaseCommand):
    """Migrates, then creates what is missing."""

    help = "Create the example's plans, users, policies and made-up traffic, where they are missing."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--no-traffic", action="store_true", help="Record no made-up requests.")

    def handle(self, *args: Any, no_traffic: bool, **options: Any) -> None:
        call_command("migrate", verbosity=0)
        seed()
        if not no_traffic:
            try:
                record_traffic()
            except StoreError as error:
                self.stderr.write(f"There is no made-up traffic, because Redis did not answer: {error}")
