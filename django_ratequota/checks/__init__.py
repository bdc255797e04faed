"""System checks: ``manage.py check`` reports a misconfiguration, so that the first request need not."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import Any

from django.core import checks
from django.db import Error as DatabaseError


def register() -> None:
    """Register all checks, once however often it is called."""
    checks.register(_always)
    checks.register(_deployment, deploy=True)
    checks.register(_of_policies, checks.Tags.database)


def _run(kind: str, **options: Any) -> list[checks.CheckMessage]:
    # Imported when checks run, because web processes run none.
    from . import kinds

    return [message for check in getattr(kinds, kind) for message in check(**options)]


def _of_policies(databases: Collection[str] | None = None, **_: Any) -> list[checks.CheckMessage]:
    """Run where Django checks the policies' database, once that is migrated."""
    from ..changes.databases import policy_alias
    from . import kinds

    found: list[checks.CheckMessage] = []
    for check in kinds.OF_POLICIES if policy_alias() in (databases or ()) else ():
        with suppress(DatabaseError):  # not migrated yet
            found += check()
    return found


_always, _deployment = partial(_run, "ALWAYS"), partial(_run, "DEPLOYMENT")
