"""Records every change to what is enforced, in the change's own transaction, and publishes it on commit.

Saves and deletes come here from ``signals``; ``update``, ``bulk_create`` and ``bulk_update``, for which Django
sends no signal, from the managers' own queryset below. Changes of many rows are read and recorded in batches: no
statement grows with the number of rows, as databases limit its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

from django.apps import apps
from django.contrib.auth import get_user_model
from django.core.exceptions import ObjectDoesNotExist
from django.core.serializers.json import DjangoJSONEncoder
from django.db import models, transaction
from django.utils.translation import gettext as _

from ..engine.types import BucketStatus
from .databases import policy_alias
from .fixtures import record_loaded
from .publication import publish_on_commit
from .validators import refuse_duplicates, refuse_unreadable, visible

_Item = TypeVar("_Item")

_author: ContextVar[tuple[Any, str]] = ContextVar("ratequota_author", default=(None, ""))
#: Rows that are read, written and recorded by one statement each.
BATCH = 500
#: The alias that ``deleting`` collects deletions for, and the (model, primary key) of those not recorded yet.
_deletions: ContextVar[tuple[str, list[tuple[Any, Any]]] | None] = ContextVar("ratequota_deletions", default=None)
#: Model -> fields that are for operators only: no request can see them.
_FOR_OPERATORS = {
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


def in_batches(items: Sequence[_Item]) -> list[Sequence[_Item]]:
    """Return the items in slices of at most ``BATCH``."""
    return [items[start : start + BATCH] for start in range(0, len(items), BATCH)]


def field_values(instance: models.Model) -> dict[str, Any]:
    """The object's fields as JSON values, times in whole milliseconds."""
    encoder = DjangoJSONEncoder()
    values: dict[str, Any] = {}
    for field in instance._meta.concrete_fields:
        value = field.value_from_object(instance)
        if isinstance(value, datetime):  # the encoder writes 400 µs as ".000", and 0 µs as nothing
            value = value.replace(microsecond=value.microsecond // 1000 * 1000)
        plain = value is None or isinstance(value, str | int | float | bool)
        values[field.name] = value if plain else encoder.encode(value).strip('"')
    return values


def rows_by_pk(
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
    change = change_row(before, after)
    if change is not None and raw:
        _refuse_duplicates([change], using)
        record_loaded(change, using)
    elif change is not None:
        refuse_unreadable(before, after)
        write_changes([change], using)


@contextmanager
def deleting(using: str) -> Iterator[None]:
    """Record what is deleted inside in batches, before the first row goes.

    Django announces every row of a deletion and of its cascade (``pre_delete``) before it runs the first statement.
    """
    announced: list[tuple[Any, Any]] = []

    def record_first(execute: Callable[..., Any], *statement: Any) -> Any:
        rows, announced[:] = announced[:], []
        _record_deletions(rows, using)
        return execute(*statement)

    token = _deletions.set((using, announced))
    try:
        with transaction.get_connection(using).execute_wrapper(record_first):
            yield
    finally:
        _deletions.reset(token)


def record_deletion(model: Any, pk: Any, using: str) -> None:
    """Record that the row is about to be deleted: inside ``deleting`` with the others, else at once."""
    collected = _deletions.get()
    if collected is not None and collected[0] == using:
        collected[1].append((model, pk))
    else:
        _record_deletions([(model, pk)], using)


def _record_deletions(rows: list[tuple[Any, Any]], using: str) -> None:
    for model, announced in groupby(rows, key=itemgetter(0)):
        for pks in in_batches([pk for _model, pk in announced]):
            # As the database holds them: a cascade takes what belongs to an object now, whatever the object says.
            held = rows_by_pk(model, pks, using, lock=True)
            if held:
                write_changes([change_row(row, None) for row in held.values()], using)


def record_publication(reason: str, using: str | None = None) -> None:
    """Write a change that makes every process read all policies again, for edits by other means (raw SQL)."""
    PolicyChange = _policy_change()
    actor = _author.get()[0]
    change = PolicyChange(model="*", action=PolicyChange.Action.PUBLISH, actor=actor, reason=reason[:200])
    write_changes([change], using or policy_alias())


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


def change_row(before: models.Model | None, after: models.Model | None) -> Any:
    """The row to write; None where nothing changed."""
    PolicyChange = _policy_change()
    instance = after or before
    states = [None if state is None else field_values(state) for state in (before, after)]
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
        reason=(reason or _new_reason(states))[:200],
        before=states[0],
        after=states[1],
    )


def _fitting(user_id: str) -> str:
    """The key as ``touched_user``; "" where it is too long: a part of it would be another user's."""
    return user_id if len(user_id) <= _policy_change()._meta.get_field("touched_user").max_length else ""


def affects_requests(model: str, before: Any, after: Any) -> bool:
    """Whether a request can see the change; ``before`` and ``after`` are the object's fields, None = no object."""
    if not before or not after:
        return True
    unseen = _FOR_OPERATORS.get(model, ())
    return any(before.get(name) != after.get(name) for name in {*before, *after} if name not in unseen)


def _new_reason(states: list[dict[str, Any] | None]) -> str:
    """The object's own reason where this change brought it; an older one is the reason of an older change."""
    before, after = ("" if state is None else state.get("reason") or "" for state in states)
    return "" if after == before else after


def _text(instance: models.Model) -> str:
    try:
        return str(instance)
    except ObjectDoesNotExist:  # a fixture names a related object that it has yet to bring
        return f"{instance._meta.verbose_name} {instance.pk}"


def write_changes(changes: list[Any], using: str) -> None:
    # In the caller's transaction if there is one: this one is for AUTOCOMMIT False and for calls outside of any.
    with transaction.atomic(using=using, savepoint=False):
        _refuse_duplicates(changes, using)
        _policy_change().objects.using(using).bulk_create(changes, batch_size=BATCH)
        if any(affects_requests(change.model, change.before, change.after) for change in changes):
            publish_on_commit(using)


def _refuse_duplicates(changes: list[Any], using: str) -> None:
    for name in {change.model for change in changes if change.after is not None}:
        refuse_duplicates(apps.get_model("django_ratequota", name), using)
