"""System checks: ``manage.py check`` reports a misconfiguration, so that the first request need not."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.core import checks


def register() -> None:
    """Register all checks. Their modules are imported when they run, because web processes run none."""
    checks.register(partial(_run, "ALWAYS"))
    checks.register(partial(_run, "DEPLOYMENT"), deploy=True)
    checks.register(partial(_run, "OF_POLICIES"), checks.Tags.database)


def _run(kind: str, **options: Any) -> list[checks.CheckMessage]:
    from . import kinds

    return [message for check in getattr(kinds, kind) for message in check(**options)]
