"""``manage.py seed``: the example's tables, plans, users and policies."""

from __future__ import annotations

from typing import Any

from django.core.management import call_command
from django.core.management.base import BaseCommand

from ...seed import seed


class Command(BaseCommand):
    """Migrates, then creates what is missing."""

    help = "Create the example's plans, users and policies, where they are missing."

    def handle(self, *args: Any, **options: Any) -> None:
        call_command("migrate", verbosity=0)
        seed()
