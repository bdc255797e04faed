"""Records every change to what is enforced, in the change's own transaction, and publishes it on commit.

Saves and deletes come here from ``signals``; ``update``, ``bulk_create`` and ``bulk_update``, for which Django
sends no signal, from the managers' own queryset below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django.apps import apps
from django.contrib.auth import get_user_model
from django.core.exceptions import ObjectDoesNotExist
from django.core.serializers.json import DjangoJSONEncoder
from django.db import models, transaction
from django.utils.translation import gettext as _

from .databases import PrimaryQuerySet, policy_alias
from .fixtures import write_loaded
from .publication import publish_on_commit
from .types import BucketStatus
from .validation import visible

_author: ContextVar[tuple[Any, str]] = ContextVar("ratequota_author", default=(None, ""))
_BATCH = 500
#: Model -> fields that are for operators only: no request can see them.
_UNSEEN = {
    "plan": ("description",),
    "endpoint": ("description",),
    "ratepolicy": ("reason",),
    "planassignment": ("reason", "created_by", "created_at"),
}


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


def stored(
    model: type[models.Model], pks: Collection[Any], using: str, lock: bool = False
) -> dict[Any, models.Model]:
    """The objects as the database holds them, by primary key, their related objects with them; one query.

    ``lock`` keeps others from changing them until the transaction ends, where the database can.
    """
    rows = model._base_manager.using(using).filter(pk__in=pks).order_by("pk")
    connection = transaction.get_connection(using)
    if lock and connection.in_atomic_block and connection.features.has_select_for_update:
        rows = rows.select_for_update(of=("self",) if connection.features.has_select_for_update_of else ())
    related = [field.name for field in model._meta.concrete_fields if field.is_relation]
    found = {row.pk: row for row in (rows.select_related(*related) if related else rows)}
    missing = [pk for pk in pks if pk not in found]
    if missing:
        # Not there, or a fixture names a related object that it has yet to bring.
        found |= {row.pk: row for row in rows.filter(pk__in=missing)}
    return found


def record(before: models.Model | None, after: models.Model | None, using: str, raw: bool = False) -> None:
    """Write one change, from the stored object ``before`` to ``after``, and publish it on commit.

    ``raw`` is that of Django's signals: a fixture is loaded.
    """
    change = _change(before, after)
    if change is not None and raw:
        write_loaded(change, using)
    elif change is not None:
        _write([change], using)


def record_publication(reason: str, using: str | None = None) -> None:
    """Write a change that makes every process read all policies again, for edits by other means (raw SQL)."""
    PolicyChange = _policy_change()
    actor = _author.get()[0]
    change = PolicyChange(model="*", action=PolicyChange.Action.PUBLISH, actor=actor, reason=reason[:200])
    _write([change], using or policy_alias())


def record_reset(subject: str, before: Sequence[BucketStatus], reason: str = "") -> None:
    """Write that counters of the subject are being reset, given as they stood before.

    Nothing is published: no process holds anything that a reset makes stale.
    """
    _record_counters(_policy_change().Action.RESET, subject, before, reason, lambda status: status.used)


def record_grant(subject: str, before: Sequence[BucketStatus], units: int, reason: str = "") -> None:
    """Write that counters of the subject are being given units back; published as little as a reset is."""
    _record_counters(_policy_change().Action.GRANT, subject, before, reason, lambda status: min(units, status.used))


def _record_counters(
    action: str, subject: str, before: Sequence[BucketStatus], reason: str, given: Callable[[BucketStatus], int]
) -> None:
    """``given`` says how many units a counter gets back."""
    kind, _colon, user_id = subject.partition(":")
    users: Any = get_user_model()
    user = users._base_manager.using(policy_alias(users)).filter(pk=user_id).first() if kind == "user" else None
    actor, reason_given = _author.get()
    _policy_change().objects.create(
        model="counter",
        object_text=visible(subject if user is None else _("user %s") % user)[:300],
        touched_user="" if user is None else _fitting(user_id),
        action=action,
        actor=actor,
        reason=(reason or reason_given)[:200],
        before={s.bucket.title: {"used": s.used, "remaining": s.remaining} for s in before},
        after={s.bucket.title: {"used": s.used - given(s), "remaining": s.remaining + given(s)} for s in before},
    )


def _policy_change() -> Any:
    # By name: the models import this module for their manager.
    return apps.get_model("django_ratequota", "PolicyChange")


def _change(before: models.Model | None, after: models.Model | None) -> Any:
    """The row to write; None where nothing changed."""
    PolicyChange = _policy_change()
    instance = after or before
    states = [None if state is None else image(state) for state in (before, after)]
    if instance is None or states[0] == states[1]:
        return None
    action = PolicyChange.Action.UPDATE
    if before is None or after is None:
        action = PolicyChange.Action.DELETE if after is None else PolicyChange.Action.CREATE
    actor, reason = _author.get()
    users = {str(state.get("user") or "") for state in states if state is not None}
    return PolicyChange(
        model=(instance._meta.concrete_model or type(instance))._meta.model_name,
        object_id=str(instance.pk),
        object_text=_text(instance)[:300],
        touched_user=_fitting(users.pop()) if len(users) == 1 else "",
        action=action,
        actor=actor,
        reason=(reason or getattr(instance, "reason", ""))[:200],
        before=states[0],
        after=states[1],
    )


def _fitting(user_id: str) -> str:
    """The key as ``touched_user``; "" where it is too long: a part of it would be another user's."""
    return user_id if len(user_id) <= _policy_change()._meta.get_field("touched_user").max_length else ""


def is_seen(model: str, before: Any, after: Any) -> bool:
    """Whether a request can see the change; ``before`` and ``after`` are the object's fields, None = no object."""
    if not before or not after:
        return True
    unseen = _UNSEEN.get(model, ())
    return any(before.get(name) != after.get(name) for name in {*before, *after} if name not in unseen)


def _text(instance: models.Model) -> str:
    try:
        return str(instance)
    except ObjectDoesNotExist:  # a fixture names a related object that it has yet to bring
        return f"{instance._meta.verbose_name} {instance.pk}"


def _write(changes: list[Any], using: str) -> None:
    # In the caller's transaction if there is one: this one is for AUTOCOMMIT False and for calls outside of any.
    with transaction.atomic(using=using, savepoint=False):
        _policy_change().objects.using(using).bulk_create(changes, batch_size=_BATCH)
        if any(is_seen(change.model, change.before, change.after) for change in changes):
            publish_on_commit(using)


class RecordingQuerySet(PrimaryQuerySet):
    """A queryset whose mass changes are recorded and published like single ones."""

    def update(self, **kwargs: Any) -> int:
        """``QuerySet.update``, recorded row by row."""
        with transaction.atomic(using=self.db):
            before = self._rows()
            # These rows and no others: one that another transaction has committed since would go unrecorded.
            count = super(RecordingQuerySet, self.filter(pk__in=list(before))).update(**kwargs)
            after = stored(self.model, before, self.db)
            self._record((before[pk], after.get(pk)) for pk in before)
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
                after = stored(self.model, [instance.pk for instance in created], self.db)
                self._record((None, row) for row in after.values())
        return created

    bulk_create.alters_data = True  # type: ignore[attr-defined]

    def _rows(self) -> dict[Any, models.Model]:
        """The rows that an update will touch, locked."""
        return stored(self.model, list(self.order_by().values_list("pk", flat=True)), self.db, lock=True)

    def _record(self, changes: Iterable[tuple[models.Model | None, models.Model | None]]) -> None:
        written = [change for before, after in changes if (change := _change(before, after)) is not None]
        if written:
            _write(written, self.db)


RecordingManager = models.Manager.from_queryset(RecordingQuerySet)
