"""Records every change to what is enforced, in the change's own transaction, and publishes it on commit.

Saves and deletes come here from ``signals``; ``update``, ``bulk_create`` and ``bulk_update``, for which Django
sends no signal, from the managers' own queryset below.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django.apps import apps
from django.core.serializers.json import DjangoJSONEncoder
from django.db import models, transaction
from django.dispatch import Signal

from .exceptions import StoreError
from .limiter import default_limiter

logger = logging.getLogger("django_ratequota")

#: Sent after a change was committed and published, in the process that made it. ``revision`` is the new
#: revision, or None when Redis could not be reached: then processes find the change by themselves.
policies_changed = Signal()

_author: ContextVar[tuple[Any, str]] = ContextVar("ratequota_author", default=(None, ""))
_BATCH = 500


@contextmanager
def acting(actor: Any, reason: str = "") -> Iterator[None]:
    """Changes made inside are recorded as ``actor``'s (a user or None), for ``reason``."""
    token = _author.set((actor, reason))
    try:
        yield
    finally:
        _author.reset(token)


def image(instance: models.Model) -> dict[str, Any]:
    """The object's fields as JSON values."""
    encoder = DjangoJSONEncoder()
    values: dict[str, Any] = {}
    for field in instance._meta.concrete_fields:
        value = field.value_from_object(instance)
        plain = value is None or isinstance(value, str | int | float | bool)
        values[field.name] = value if plain else encoder.encode(value).strip('"')
    return values


def stored_image(model: type[models.Model], pk: Any, using: str) -> dict[str, Any] | None:
    """The fields that the database holds for ``pk``; None when it holds no such object."""
    stored = model._base_manager.using(using).filter(pk=pk).first()
    return None if stored is None else image(stored)


def record(instance: models.Model, before: dict[str, Any] | None, after: dict[str, Any] | None, using: str) -> None:
    """Write one change and see to it that the transaction's commit publishes it."""
    _write([_change(instance, before, after)], using)


def record_publication(reason: str, using: str = "default") -> None:
    """Write a change that makes every process load everything anew, for edits by other means (raw SQL)."""
    PolicyChange = _policy_change()
    actor, _ = _author.get()
    _write([PolicyChange(model="*", action=PolicyChange.Action.PUBLISH, actor=actor, reason=reason)], using)


def _policy_change() -> Any:
    # By name: the models import this module for their manager.
    return apps.get_model("django_ratequota", "PolicyChange")


def _change(instance: models.Model, before: dict[str, Any] | None, after: dict[str, Any] | None) -> Any:
    PolicyChange = _policy_change()
    actor, reason = _author.get()
    action = PolicyChange.Action.UPDATE
    if before is None or after is None:
        action = PolicyChange.Action.DELETE if after is None else PolicyChange.Action.CREATE
    users = {str(state.get("user") or "") for state in (before, after) if state is not None}
    own_reason = str((after or before or {}).get("reason") or "")
    return PolicyChange(
        model=instance._meta.model_name,
        object_id=str((after or before or {}).get(instance._meta.pk.name, instance.pk)),
        object_text=str(instance)[:300],
        touched_user=users.pop()[:64] if len(users) == 1 else "",
        action=action,
        actor=actor,
        reason=(reason or own_reason)[:200],
        before=before,
        after=after,
    )


def _write(changes: list[Any], using: str) -> None:
    _policy_change().objects.using(using).bulk_create(changes, batch_size=_BATCH)
    # One publication a transaction is enough, and a loop of saves should not cost a round trip each.
    if not publication_pending(using):
        transaction.on_commit(_publish, using=using)


def publication_pending(using: str = "default") -> bool:
    """Whether this thread's open transaction holds policy changes of its own, visible to nobody else yet."""
    return any(entry[1] is _publish for entry in transaction.get_connection(using).run_on_commit)


def _publish() -> None:
    revision = None
    try:
        revision = default_limiter().publish()
    except StoreError as error:
        logger.error(
            "a policy change is saved but could not be published (%s); processes find it within POLL_SECONDS",
            error,
        )
    policies_changed.send_robust(sender=None, revision=revision)


class RecordingQuerySet(models.QuerySet[Any]):
    """A queryset whose mass changes are recorded and published like single ones."""

    def update(self, **kwargs: Any) -> int:
        """``QuerySet.update``, recorded row by row."""
        with transaction.atomic(using=self.db):
            before = {instance.pk: image(instance) for instance in self._rows()}
            count = super().update(**kwargs)
            after = self.model._base_manager.using(self.db).filter(pk__in=before)
            self._record((instance, before[instance.pk]) for instance in after)
        return count

    update.alters_data = True  # type: ignore[attr-defined]

    def bulk_create(self, objs: Iterable[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """``QuerySet.bulk_create``, recorded row by row."""
        with transaction.atomic(using=self.db):
            created = super().bulk_create(objs, *args, **kwargs)
            if kwargs.get("update_conflicts") or kwargs.get("ignore_conflicts") or len(args) > 1:
                # Which rows were written, and over what, the database does not say.
                record_publication(f"bulk_create of {self.model._meta.verbose_name_plural}", self.db)
            else:
                self._record((instance, None) for instance in created)
        return created

    bulk_create.alters_data = True  # type: ignore[attr-defined]

    def _rows(self) -> models.QuerySet[Any]:
        """The rows that an update will touch, locked where the database can: no change of theirs goes between."""
        rows: models.QuerySet[Any] = (
            self.model._base_manager.using(self.db).filter(pk__in=self.order_by().values("pk")).order_by()
        )
        return (
            rows.select_for_update() if transaction.get_connection(self.db).features.has_select_for_update else rows
        )

    def _record(self, changes: Iterable[tuple[Any, dict[str, Any] | None]]) -> None:
        written = [
            _change(instance, before, after) for instance, before in changes if (after := image(instance)) != before
        ]
        if written:
            _write(written, self.db)


RecordingManager = models.Manager.from_queryset(RecordingQuerySet)
