"""Writes a PolicyChange for every change to policies, in the change's transaction, and publishes it on commit.

Its callers are in ``models.base``. Many rows are read and recorded in batches, because databases limit the
parameters of a statement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar
from uuid import UUID

from django.apps import apps
from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.core.serializers.json import DjangoJSONEncoder
from django.db import models, transaction

from ..engine.keys import subject_tag
from .databases import policy_alias
from .publication import Save, join_save
from .validators import refuse_duplicates, refuse_unreadable, visible

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Author:
    """Who makes the changes of ``changed_by``, and why."""

    actor: Any = None
    reason: str = ""
    #: The save that they undo.
    undoes: UUID | None = None
    #: The save that they are; None = that of their transaction.
    save: Save | None = None


_NOBODY = _Author()
_author: ContextVar[_Author] = ContextVar("ratequota_author", default=_NOBODY)
#: Most rows that one statement reads or writes.
BATCH = 500
#: Fields of the models that no request depends on.
_FOR_OPERATORS = frozenset({"description", "position", "reason", "created_by", "created_at"})


@contextmanager
def changed_by(
    actor: Any, reason: str = "", *, undoes: UUID | None = None, unpublished: Callable[[], None] | None = None
) -> Iterator[Save]:
    """Record the changes made inside as one save of ``actor`` (a user or None), for ``reason``; yield the save.

    Inside another, they join that one's save. ``undoes`` is the save that they undo; ``unpublished`` is called after
    the commit if it could not be published.
    """
    outer = _author.get().save
    save = outer or Save(closed=False, unpublished=unpublished)
    token = _author.set(_Author(actor=actor, reason=reason, undoes=undoes, save=save))
    try:
        yield save
    finally:
        _author.reset(token)
        if outer is None:
            save.close()


def in_batches(items: Sequence[_Item], size: int = BATCH) -> list[Sequence[_Item]]:
    """Return the items in slices of at most ``size``."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def users_by_login(names: Iterable[Any], using: str) -> dict[str, list[Any]]:
    """Return the primary keys of users by the name they log in with; one query per batch of names."""
    model: Any = get_user_model()
    field = model._meta.get_field(model.USERNAME_FIELD)
    valid = []
    for name in sorted(names):
        with suppress(ValidationError):  # the field may be a number
            field.to_python(name)
            valid.append(name)
    found: dict[str, list[Any]] = {}
    for batch in in_batches(valid):
        users = model._base_manager.using(using).filter(**{f"{model.USERNAME_FIELD}__in": batch})
        for login, pk in users.values_list(model.USERNAME_FIELD, "pk"):
            found.setdefault(str(login), []).append(pk)
    return found


def field_values(instance: models.Model) -> dict[str, Any]:
    """Return the object's fields as JSON values."""
    encoder = DjangoJSONEncoder()
    values: dict[str, Any] = {}
    for field in instance._meta.concrete_fields:
        value = field.value_from_object(instance)
        if isinstance(value, datetime):  # the encoder would cut off microseconds
            value = value.isoformat().replace("+00:00", "Z")
        plain = value is None or isinstance(value, str | int | float | bool)
        values[field.name] = value if plain else encoder.encode(value).strip('"')
    return values


def rows_by_pk(
    model: type[models.Model], pks: Collection[Any], using: str, lock: bool = False
) -> dict[Any, models.Model]:
    """Return the stored objects by primary key, with their related objects, in one query.

    ``lock`` locks the rows until the transaction ends, if the database can.
    """
    rows = model._base_manager.using(using).filter(pk__in=pks).order_by("pk")
    connection = transaction.get_connection(using)
    if lock and connection.in_atomic_block:
        rows = rows.select_for_update(of=("self",) if connection.features.has_select_for_update_of else ())
    related = [field.name for field in model._meta.concrete_fields if field.is_relation]
    return {row.pk: row for row in (rows.select_related(*related) if related else rows)}


def write_changes(changes: Iterable[tuple[models.Model | None, models.Model | None]], using: str) -> None:
    """Record changes, each from one stored object to the other, and publish them on commit."""
    rows = []
    for before, after in changes:
        if (row := _change_row(before, after)) is not None:
            refuse_unreadable(before, after)
            rows.append(row)
    if rows:
        _write(rows, using)


class _Deletions:
    """Rows that Django will delete: it announces all of a deletion and its cascade before its first statement."""

    def __init__(self, using: str) -> None:
        self._using = using
        self._rows: list[tuple[Any, Any]] = []

    def add(self, model: Any, pk: Any) -> None:
        """Add a row, inside the deletion's transaction."""
        if not self._announced:
            self._rows = []
            transaction.on_commit(self._forget, using=self._using)
        self._rows.append((model, pk))

    @property
    def _announced(self) -> bool:
        """Whether the transaction of the rows is still open: a rollback drops its hooks, and tells nobody else."""
        hooks = transaction.get_connection(self._using).run_on_commit
        return any(hook == self._forget for _savepoints, hook, _robust in hooks)

    def __call__(self, execute: Callable[..., Any], *statement: Any) -> Any:
        """Record the rows before the connection's next statement, in batches; wraps that statement."""
        transaction.get_connection(self._using).execute_wrappers.remove(self)
        if self._announced:
            for model, announced in groupby(self._rows, key=itemgetter(0)):
                for pks in in_batches([pk for _model, pk in announced]):
                    # As stored, because a cascade deletes what belongs to the stored object.
                    found = rows_by_pk(model, pks, self._using, lock=True)
                    write_changes(((row, None) for row in found.values()), self._using)
        return execute(*statement)

    def _forget(self) -> None:
        self._rows.clear()


def write_deletion(model: Any, pk: Any, using: str) -> None:
    """Record that the row will be deleted, together with the others of the deletion."""
    wrappers = transaction.get_connection(using).execute_wrappers
    deletions = next((one for one in wrappers if isinstance(one, _Deletions)), None)
    if deletions is None:
        deletions = _Deletions(using)
        wrappers.insert(0, deletions)  # the code that added the last one removes it
    deletions.add(model, pk)


def write_publication(reason: str, using: str | None = None) -> None:
    """Record a change that makes every process read all policies again, after edits by other means (raw SQL)."""
    _write([_unsaved("publish", reason, model="*")], using or policy_alias())


def write_counted(
    subject: str, action: str, *, before: Any, after: Any, reason: str = "", key: str = "", save: Save | None = None
) -> Any:
    """Record a change of the subject's counters, from ``before`` to ``after``, both by the counter's title.

    Returns the row; it joins ``save``, None = the current one. Raises ``IntegrityError`` if a row has the ``key``.
    Nothing is published, because processes hold nothing that it makes stale.
    """
    kind, _colon, user_id = subject.partition(":")
    change = _unsaved(
        action,
        reason or _author.get().reason,
        model="counter",
        object_id=subject_tag(subject),
        object_text=visible(subject)[:300],
        touched_user=_fitting(user_id) if kind == "user" else "",
        before=before,
        after=after,
        key=key or None,
    )
    _write([change], policy_alias(_policy_change()), save)
    return change


def _policy_change() -> Any:
    # By name, because the models import this package.
    return apps.get_model("django_ratequota", "PolicyChange")


def _unsaved(action: str, reason: str, **fields: Any) -> Any:
    """Return an unsaved PolicyChange by the present author."""
    return _policy_change()(action=action, reason=reason[:200], actor=_author.get().actor, **fields)


def _change_row(before: models.Model | None, after: models.Model | None) -> Any:
    """Return the unsaved PolicyChange from one stored object to the other; None if no field differs."""
    instance = after or before
    states = [None if state is None else field_values(state) for state in (before, after)]
    if instance is None or states[0] == states[1]:
        return None
    author = _author.get()
    users = {str(state.get("user") or "") for state in states if state is not None}
    model = str((instance._meta.concrete_model or type(instance))._meta.model_name)
    plan = instance.pk if model == "plan" else getattr(instance, "plan_id", None)
    return _unsaved(
        "create" if before is None else "delete" if after is None else "update",
        author.reason or _new_reason(states),
        model=model,
        object_id=str(instance.pk),
        object_text=_without_name(instance)[:300],
        touched_user=_fitting(users.pop()) if len(users) == 1 else "",
        touched_plan="" if plan is None else str(plan),
        undoes=author.undoes,
        before=states[0],
        after=states[1],
    )


def _without_name(instance: Any) -> str:
    """Return the object in words: its user by key, because the history outlives users."""
    pk = getattr(instance, "user_id", None)
    return str(instance) if pk is None else str(instance.in_words(f"user:{pk}"))


def _fitting(user_id: str) -> str:
    """Return the key for ``touched_user``; "" if it is too long, because a part of it could be another user's."""
    return user_id if len(user_id) <= _policy_change()._meta.get_field("touched_user").max_length else ""


def affects_requests(before: Any, after: Any) -> bool:
    """Whether requests depend on the change of the fields from ``before`` to ``after``; None = no object."""
    if not before or not after:
        return True
    return any(before.get(name) != after.get(name) for name in {*before, *after} - _FOR_OPERATORS)


def _new_reason(states: list[dict[str, Any] | None]) -> str:
    """Return the object's ``reason`` if this change has set it; else it is the reason of an older change."""
    before, after = ("" if state is None else state.get("reason") or "" for state in states)
    return "" if after == before else after


def _write(changes: list[Any], using: str, save: Save | None = None) -> None:
    """Write unsaved rows as part of ``save`` (None = the current one), and publish it on commit.

    Marks the first row of the save.
    """
    # A transaction of its own only outside of any other, or with AUTOCOMMIT False.
    with transaction.atomic(using=using, savepoint=False):
        of_policies = [change for change in changes if change.model != "counter"]
        for name in {change.model for change in of_policies if change.after is not None}:
            refuse_duplicates(apps.get_model("django_ratequota", name), using)
        publishes = any(affects_requests(change.before, change.after) for change in of_policies)
        save = join_save(using, publishes, save or _author.get().save)
        rows = _policy_change().objects.using(using)
        # Asked of the database, because a savepoint's rollback may have removed the rows written before.
        first = not (save.written and rows.filter(change_id=save.change_id).exists())
        save.written = True
        for change in changes:
            change.change_id, change.first, first = save.change_id, first, False
            save.actor, save.reason = save.actor or change.actor, save.reason or change.reason
        rows.bulk_create(changes, batch_size=BATCH)
