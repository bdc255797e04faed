"""What runs in processes of its own."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.measure import Result


def set_django_up() -> None:
    """Django with the settings of the benchmark, its tables made."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)


def run_part(name: str, quick: bool) -> Result:
    """What the module of that name measures."""
    result: Result = importlib.import_module(f"benchmarks.{name}").run(quick)
    return result
