"""Restore a version of a plan, assignment, endpoint or policy from the history.

``plan_restoration`` compares a version with the current object, ``restore`` writes it. The object keeps its primary
key, also when it was deleted: counters and the history refer to it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from django.core.exceptions import ValidationError
from django.db import IntegrityError, models, transaction
from django.utils.text import Truncator
from django.utils.translation import gettext as _

from ..changes.databases import policy_alias
from ..changes.writer import changed_by, field_values, in_batches, rows_by_pk
from ..models import PolicyChange
from .cascades import KINDS, Deletion, deleted_along

__all__ = ["KINDS", "Restoration", "Version", "plan_restoration", "problems", "restore", "versions"]

Version = Literal["before", "after"]
#: (object, relation) -> whether the related object exists.
Exists = Callable[[models.Model, Any], bool]


@dataclass(frozen=True, kw_only=True)
class Restoration:
    """What restoring a version would change; nothing is written."""

    change: PolicyChange
    version: Version
    #: The stored object; None when it is deleted.
    current: models.Model | None
    #: The restored object, unsaved and not validated.
    target: models.Model
    #: Fields with another value now.
    differing: tuple[str, ...]
    #: What was deleted with the object and does not exist again.
    along: tuple[Deletion, ...] = field(default=())

    @property
    def seen(self) -> str:
        """A hash of the stored state, to refuse overwriting another state than the operator saw."""
        state = None if self.current is None else field_values(self.current)
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:20]


def versions(change: PolicyChange) -> tuple[Version, ...]:
    """Return the versions of this change that can be restored. "Did not exist" cannot be."""
    known: tuple[Version, ...] = ("after", "before")
    return tuple(version for version in known if change.model in KINDS and getattr(change, version))


def plan_restoration(
    change: PolicyChange, version: Version, *, lock: bool = False, along: bool = True
) -> Restoration:
    """Compare the version with the stored object; raises ``ValidationError`` if the version is unreadable now.

    ``lock`` locks the object until the transaction ends; ``along`` looks for what was deleted with it.
    """
    model: Any = KINDS[change.model]
    state = getattr(change, version)
    using = policy_alias(model)
    pk = read_value(model._meta.pk, change.object_id)
    current = rows_by_pk(model, [pk], using, lock).get(pk)
    target, differing = target_of(model, pk, state or {}, current)
    took = deleted_along(change) if along and current is None else ()
    return Restoration(
        change=change, version=version, current=current, target=target, differing=differing, along=took
    )


def restore(
    restoration: Restoration,
    *,
    actor: Any,
    reason: str,
    along: bool = False,
    written: Callable[[Sequence[models.Model]], None] = lambda rows: None,
) -> None:
    """Write the version, and with ``along`` what was deleted with it; one transaction, one publication.

    ``written`` is called with the object, then with each batch of the others. Raises ``ValidationError`` with all
    problems; then nothing has changed.
    """
    using = policy_alias(type(restoration.target))
    with changed_by(actor, reason), transaction.atomic(using=using):
        written([_write(restoration, using)])
        for batch in _restore_along(restoration.along, using) if along else ():
            written(batch)


def _restore_along(deletions: Sequence[Deletion], using: str) -> Iterator[list[models.Model]]:
    """Restore deleted objects, in batches of one kind."""
    for kind in KINDS:
        yield from restore_deleted(kind, [deletion.pk for deletion in deletions if deletion.model == kind], using)


def restore_deleted(kind: str, pks: Sequence[Any], using: str) -> Iterator[list[models.Model]]:
    """Create deleted objects of one kind as they were before the changes ``pks``; yield them in batches."""
    for batch in in_batches(pks):
        changes = list(PolicyChange.objects.filter(pk__in=batch).order_by("pk"))
        # One by one if a batch fails, to name the row that is refused.
        yield _insert(KINDS[kind], changes, using) or [_restore_one(change, using) for change in changes]


def _insert(model: Any, changes: list[PolicyChange], using: str) -> list[models.Model] | None:
    """Insert the deleted objects by one statement; None where one of them is refused."""
    try:
        targets = _targets(model, changes)
        with transaction.atomic(using=using):
            model._base_manager.using(using).bulk_create(targets)
    except (IntegrityError, ValidationError):
        return None
    return list(rows_by_pk(model, [target.pk for target in targets], using).values())


def _targets(model: Any, changes: list[PolicyChange]) -> list[models.Model]:
    """Return the deleted objects, valid except for database constraints; raises ``ValidationError``."""
    states = [change.before or {} for change in changes]
    exists = related_objects(model, states)
    targets = []
    for change, state in zip(changes, states, strict=True):
        target = target_of(model, read_value(model._meta.pk, change.object_id), state, None, exists)[0]
        check(target, exists)
        targets.append(target)
    return targets


def check(target: models.Model, exists: Exists) -> None:
    """Raise ``ValidationError`` unless the object is valid, except for database constraints."""
    missing = missing_objects(target, exists)
    if missing:
        raise ValidationError(missing)
    target.clean_fields(exclude=[field.name for field in target._meta.concrete_fields if field.is_relation])
    target.clean()


def related_objects(
    model: Any, states: Sequence[dict[str, Any]], created: Mapping[Any, Collection[Any]] = MappingProxyType({})
) -> Exists:
    """Return ``_related_exists`` for the objects of these states, with one query per relation.

    ``created`` are keys that will exist before these objects are written, by model.
    """
    known: dict[str, set[Any]] = {}
    for relation in model._meta.concrete_fields:
        if relation.is_relation:
            keys = {read_value(relation, state.get(relation.name)) for state in states}
            name = relation.target_field.name
            rows = relation.related_model._base_manager.filter(**{f"{name}__in": keys})
            known[relation.name] = {
                None,
                *rows.values_list(name, flat=True),
                *created.get(relation.related_model, ()),
            }
    return lambda target, relation: getattr(target, relation.attname) in known[relation.name]


def _restore_one(change: PolicyChange, using: str) -> models.Model:
    try:
        return _write(plan_restoration(change, "before", lock=True, along=False), using)
    except ValidationError as error:
        text = _("%(object)s cannot be restored with it: %(errors)s")
        params = {"object": Truncator(change).chars(100), "errors": " ".join(error.messages)}
        raise ValidationError(text % params) from error


def problems(restoration: Restoration) -> list[str]:
    """Return why the version cannot be written now, in sentences; empty when it can."""
    return problems_of(restoration.target)


def problems_of(target: models.Model) -> list[str]:
    """Return why the object cannot be written now, in sentences."""
    missing = missing_objects(target, _related_exists)
    if missing:
        return missing
    try:
        target.full_clean()
    except ValidationError as error:
        return _named(target, error)
    return []


def missing_objects(target: models.Model, exists: Exists) -> list[str]:
    """Return which related objects of the target are deleted, in sentences."""
    text = _("The %(kind)s with the id %(pk)s is deleted; restore or create that first.")
    relations: list[Any] = [field for field in target._meta.concrete_fields if field.is_relation]
    return [
        text % {"kind": relation.related_model._meta.verbose_name, "pk": getattr(target, relation.attname)}
        for relation in relations
        if not exists(target, relation)
    ]


def _related_exists(target: models.Model, relation: Any) -> bool:
    """Whether the related object exists, or the relation is empty."""
    key = getattr(target, relation.attname)
    return key is None or relation.related_model._base_manager.filter(**{relation.target_field.name: key}).exists()


def target_of(
    model: type[models.Model],
    pk: Any,
    state: dict[str, Any],
    current: models.Model | None,
    exists: Exists = _related_exists,
) -> tuple[models.Model, tuple[str, ...]]:
    """Return the object of the state, and the names of the fields that differ from the current one's.

    A field that was added to the model after the state was recorded keeps its current value.
    """
    known: dict[str, Any] = {field.name: field for field in model._meta.concrete_fields}
    removed = [name for name in state if name not in known]
    if removed:
        text = _("This version has fields that no longer exist (%(names)s).")
        raise ValidationError(text % {"names": ", ".join(removed)})
    now = {} if current is None else field_values(current)
    target = model(pk=pk)
    target._state.adding = current is None
    target._state.db = None if current is None else current._state.db
    for name, column in known.items():
        if name in state and not column.primary_key:
            setattr(target, column.attname, read_value(column, state[name]))
        elif current is not None:
            setattr(target, column.attname, getattr(current, column.attname))
        if column.is_relation and column.remote_field.on_delete is models.SET_NULL and not exists(target, column):
            setattr(target, column.attname, None)
    then = field_values(target)
    differing = []
    for name in then:
        if name not in now or now[name] != then[name]:
            differing.append(name)
        elif current is not None:  # the history rounds times to milliseconds
            setattr(target, known[name].attname, getattr(current, known[name].attname))
    return target, tuple(name for name in differing if not known[name].primary_key)


def read_value(field: Any, value: Any) -> Any:
    """Convert a recorded value to the field's; raises ``ValidationError``."""
    reader = field.target_field if field.is_relation else field
    try:
        return None if value is None and field.null else reader.to_python(value)
    except ValidationError as error:
        text = _("%(field)s: %(value)r cannot be read any more. %(errors)s")
        params = {"field": field.verbose_name, "value": str(value)[:100], "errors": " ".join(error.messages)}
        raise ValidationError(text % params) from error


def _write(restoration: Restoration, using: str) -> models.Model:
    target = restoration.target
    found = problems(restoration)
    if found:
        raise ValidationError(found)
    created = restoration.current is None
    target.save(using=using, force_insert=created, force_update=not created)
    return target


def _named(target: models.Model, error: ValidationError) -> list[str]:
    """Return the messages, each with the name of its field."""
    names = {field.name: field.verbose_name for field in target._meta.concrete_fields}
    found = []
    for name, messages in error.message_dict.items():
        found += [f"{names[name]}: {text}" if name in names else text for text in messages]
    return list(dict.fromkeys(found))
