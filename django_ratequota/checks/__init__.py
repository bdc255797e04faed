"""System checks: ``manage.py check`` reports a misconfiguration, so that the first request need not."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.core import checks


def register() -> None:
    """Register all checks, once however often it is called."""
    checks.register(_always)
    checks.register(_deployment, deploy=True)
    checks.register(_of_policies, checks.Tags.database)


def _run(kind: str, **options: Any) -> list[checks.CheckMessage]:
    # Imported when checks run, because web processes run none.
    from . import kinds

    return [message for check in getattr(kinds, kind) for message in check(**options)]


_always, _deployment, _of_policies = (partial(_run, kind) for kind in ("ALWAYS", "DEPLOYMENT", "OF_POLICIES"))
