"""Publishes changes that nobody records: by ``flush``, and by data migrations through historical models."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from django.apps import apps as current
from django.db import Error as DatabaseError
from django.db import transaction
from django.db.migrations import RunPython, RunSQL, SeparateDatabaseAndState

from ..exceptions import StoreError
from ..recording.databases import policy_alias
from ..recording.publication import current_save, publish_on_commit
from ..runtime import default_limiter
from .cache import policies

logger = logging.getLogger("django_ratequota")

_LABEL = "django_ratequota"
_HOLD_POLICIES = ("plan", "planassignment", "endpoint", "subjectlist", "ratepolicy", "policychange")


def publish_after_migrate(using: str, plan: Any = None, apps: Any = current, **_: Any) -> None:
    """Receive ``post_migrate``; ``flush`` sends it without a ``plan``. ``apps`` holds the models as migrated."""
    if using != policy_alias():
        return
    names = [
        f"{migration.app_label}.{migration.name}"
        for migration, _backwards in plan or ()
        if _runs_code(migration.operations)
    ]
    if plan is None or names:
        policies.expire()
        if not _record(names, using, apps) and plan is None:
            # Without a row to write the history is empty too: a new revision makes other processes read everything.
            try:
                default_limiter().publish()
            except StoreError as error:
                # No warning, because test suites flush after each test, and many run without Redis.
                logger.info("the database was flushed, and no new revision published: %s", error)


def _runs_code(operations: Iterable[Any]) -> bool:
    return any(
        isinstance(operation, RunPython | RunSQL)
        or (isinstance(operation, SeparateDatabaseAndState) and _runs_code(operation.database_operations))
        for operation in operations
    )


def _record(names: list[str], using: str, apps: Any) -> bool:
    """Record that anything may have changed; return False without policies and history, or if that failed."""
    try:
        models = [apps.get_model(_LABEL, name) for name in _HOLD_POLICIES]
        with transaction.atomic(using=using):
            if not any(model._base_manager.using(using).exists() for model in models):
                return False
            reason = f"migrate: {', '.join(names)}"[:200] if names else "post_migrate"
            save = current_save(using)
            models[-1]._base_manager.using(using).create(
                model="*", action="publish", reason=reason, change_id=save.change_id
            )
            publish_on_commit(using)
    except LookupError:  # this app is not migrated, or was migrated back to zero
        return False
    except DatabaseError as error:
        logger.warning("what migrations changed is not published, run `manage.py ratequota publish`: %s", error)
        return False
    return True
