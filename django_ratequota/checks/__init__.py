"""System checks: ``manage.py check`` reports a misconfiguration, so that the first request need not."""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import partial
from typing import Any

from django.core import checks
from django.db import Error as DatabaseError

from ..utils.escaping import one_line


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
    """Run where Django checks the policies' database, once that is migrated. E010: it is unavailable."""
    from ..changes.databases import policy_alias
    from . import database, kinds

    alias = policy_alias()
    # Two commands check the database and then migrate it; the second is that of django-tenants.
    if alias not in (databases or ()) or sys.argv[1:2] in (["migrate"], ["migrate_schemas"]):
        return []
    try:
        found = database.check_migrated() or [message for check in kinds.OF_POLICIES for message in check()]
    except DatabaseError as error:
        text = f"The database {alias!r} is unavailable, so policies cannot be read: {error}"
        hint = "Start it or correct DATABASES. Workers that have read the policies go on with them until then."
        found = [checks.Error(text, hint=hint, id="django_ratequota.E010")]
    for message in found:  # rows may hold any text
        message.msg = one_line(message.msg)
    return found


_always, _deployment = partial(_run, "ALWAYS"), partial(_run, "DEPLOYMENT")
