"""Brings plans, assignments, endpoints and policies back to a state that the history holds.

``plan_restoration`` compares a recorded state with the object as it is now, ``restore`` writes it. The object keeps
its primary key, also when it is made anew: counters are keyed by the endpoint's, and the history tells by it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from django.core.exceptions import ValidationError
from django.db import IntegrityError, models, transaction
from django.utils.text import Truncator
from django.utils.translation import gettext as _

from ..models import PolicyChange
from ..recording.databases import policy_alias
from ..recording.recorder import acting, field_values, in_batches, rows_by_pk
from .cascades import KINDS, Deletion, deleted_along

__all__ = ["KINDS", "Restoration", "Version", "plan_restoration", "problems", "restore", "versions"]

Version = Literal["before", "after"]
#: Whether what a relation of an object points at exists.
_IsThere = Callable[[models.Model, Any], bool]


@dataclass(frozen=True, kw_only=True)
class Restoration:
    """What restoring a version would do, found out before anything is written."""

    change: PolicyChange
    version: Version
    #: The object as the database holds it now; None when it is deleted.
    current: models.Model | None
    #: The object as it would be, not saved; its fields are whatever the history says.
    target: models.Model
    #: Fields that hold something else now.
    differing: tuple[str, ...]
    #: Deletions, in the same moment as the object's own, of what belonged to it and is still missing.
    along: tuple[Deletion, ...] = field(default=())

    @property
    def seen(self) -> str:
        """Tells one state of the object from another: what the operator looked at must be what is overwritten."""
        state = None if self.current is None else field_values(self.current)
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:20]


def versions(change: PolicyChange) -> tuple[Version, ...]:
    """The states of the change that can be gone back to; that the object did not exist yet is none of them."""
    if change.model not in KINDS:
        return ()
    found: list[Version] = []
    if change.after:
        found.append("after")
    if change.before:
        found.append("before")
    return tuple(found)


def plan_restoration(
    change: PolicyChange, version: Version, *, lock: bool = False, along: bool = True
) -> Restoration:
    """Compare the version with the object as it is now; raises ``ValidationError`` where it cannot be read any more.

    ``lock`` keeps others from changing the object until the transaction ends; ``along`` looks for what was deleted
    with it.
    """
    model: Any = KINDS[change.model]
    state = change.before if version == "before" else change.after
    using = policy_alias(model)
    pk = _read(model._meta.pk, change.object_id)
    current = rows_by_pk(model, [pk], using, lock).get(pk)
    target, differing = _target(model, pk, state or {}, current)
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
    """Write the version, and with ``along`` what was deleted along with it; one transaction, one publication.

    ``written`` is called with the object, then with each batch of the others. Raises ``ValidationError`` saying what
    does not fit any more; nothing is changed then.
    """
    using = policy_alias(type(restoration.target))
    with acting(actor, reason), transaction.atomic(using=using):
        written([_write(restoration, using)])
        for batch in _return(restoration.along, using) if along else ():
            written(batch)


def _return(deletions: Sequence[Deletion], using: str) -> Iterator[list[models.Model]]:
    """Restore what was deleted along, in batches of one kind."""
    for kind, model in KINDS.items():
        for pks in in_batches([one.pk for one in deletions if one.model == kind]):
            changes = list(PolicyChange.objects.filter(pk__in=pks).order_by("pk"))
            # One by one, where the database or a row has an objection: that finds and names the row.
            yield _insert(model, changes, using) or [_return_one(change, using) for change in changes]


def _insert(model: Any, changes: list[PolicyChange], using: str) -> list[models.Model] | None:
    """Insert what was deleted by as many statements for 500 as for one; None where one of them does not fit."""
    try:
        targets = _targets(model, changes)
        with transaction.atomic(using=using):
            rows: list[models.Model] = model._base_manager.using(using).insert_as_they_are(targets)
    except (IntegrityError, ValidationError):
        return None
    return rows


def _targets(model: Any, changes: list[PolicyChange]) -> list[models.Model]:
    """The deleted objects, valid but for what the database sees to; raises ``ValidationError``."""
    states = [change.before or {} for change in changes]
    is_there = _presence(model, states)
    relations = [one.name for one in model._meta.concrete_fields if one.is_relation]
    targets = []
    for change, state in zip(changes, states, strict=True):
        target = _target(model, _read(model._meta.pk, change.object_id), state, None, is_there)[0]
        missing = _missing(target, is_there)
        if missing:
            raise ValidationError(missing)
        target.clean_fields(exclude=relations)
        target.clean()
        targets.append(target)
    return targets


def _presence(model: Any, states: list[dict[str, Any]]) -> _IsThere:
    """``_is_there`` for the objects of the states, by one query for each relation."""
    known: dict[str, set[Any]] = {}
    for one in model._meta.concrete_fields:
        if one.is_relation:
            keys = {_read(one, state.get(one.name)) for state in states}
            name = one.target_field.name
            rows = one.related_model._base_manager.filter(**{f"{name}__in": keys})
            known[one.name] = {None, *rows.values_list(name, flat=True)}
    return lambda target, one: getattr(target, one.attname) in known[one.name]


def _return_one(change: PolicyChange, using: str) -> models.Model:
    try:
        return _write(plan_restoration(change, "before", lock=True, along=False), using)
    except ValidationError as error:
        text = _("%(object)s cannot be restored along: %(errors)s")
        given = {"object": Truncator(change).chars(100), "errors": " ".join(error.messages)}
        raise ValidationError(text % given) from error


def problems(restoration: Restoration) -> list[str]:
    """What does not fit any more, in sentences; empty when the version can be written as things stand."""
    target = restoration.target
    missing = _missing(target, _is_there)
    if missing:
        return missing
    try:
        target.full_clean()
    except ValidationError as error:
        return _named(target, error)
    return []


def _missing(target: models.Model, is_there: _IsThere) -> list[str]:
    """Which objects that the target refers to are deleted, in sentences."""
    text = _("The %(kind)s with the id %(pk)s is deleted; restore or create that first.")
    relations: list[Any] = [one for one in target._meta.concrete_fields if one.is_relation]
    return [
        text % {"kind": one.related_model._meta.verbose_name, "pk": getattr(target, one.attname)}
        for one in relations
        if not is_there(target, one)
    ]


def _is_there(target: models.Model, one: Any) -> bool:
    """Whether what the relation points at exists; an empty one points at nothing that could be missing."""
    key = getattr(target, one.attname)
    return key is None or one.related_model._base_manager.filter(**{one.target_field.name: key}).exists()


def _target(
    model: type[models.Model],
    pk: Any,
    state: dict[str, Any],
    current: models.Model | None,
    is_there: _IsThere = _is_there,
) -> tuple[models.Model, tuple[str, ...]]:
    """The object of the state, and the names of the fields that differ from the current one's.

    A field that the state does not know, being newer, stays as it is.
    """
    known: dict[str, Any] = {one.name: one for one in model._meta.concrete_fields}
    gone = [name for name in state if name not in known]
    if gone:
        text = _("This version is older than the app: it has fields that there are no more (%(names)s).")
        raise ValidationError(text % {"names": ", ".join(gone)})
    now = {} if current is None else field_values(current)
    target = model(pk=pk)
    target._state.adding = current is None
    target._state.db = None if current is None else current._state.db
    for name, one in known.items():
        if name in state and not one.primary_key:
            setattr(target, one.attname, _read(one, state[name]))
        elif current is not None:
            setattr(target, one.attname, getattr(current, one.attname))
        if one.is_relation and one.remote_field.on_delete is models.SET_NULL and not is_there(target, one):
            setattr(target, one.attname, None)
    then = field_values(target)
    differing = []
    for name in then:
        if name not in now or now[name] != then[name]:
            differing.append(name)
        elif current is not None:  # the history's times are whole milliseconds, the object's are not
            setattr(target, known[name].attname, getattr(current, known[name].attname))
    return target, tuple(name for name in differing if not known[name].primary_key)


def _read(one: Any, value: Any) -> Any:
    """A recorded value as the field holds it."""
    reader = one.target_field if one.is_relation else one
    try:
        return None if value is None and one.null else reader.to_python(value)
    except ValidationError as error:
        text = _("%(field)s: %(value)r cannot be read any more. %(errors)s")
        given = {"field": one.verbose_name, "value": str(value)[:100], "errors": " ".join(error.messages)}
        raise ValidationError(text % given) from error


def _write(restoration: Restoration, using: str) -> models.Model:
    target = restoration.target
    found = problems(restoration)
    if found:
        raise ValidationError(found)
    if restoration.current is None:
        # Raw: the time at which an assignment was made is the time at which it was made, not that of its return.
        target.save_base(raw=True, using=using, force_insert=True)
    else:
        target.save(using=using, force_update=True)
    return target


def _named(target: models.Model, error: ValidationError) -> list[str]:
    """The messages, each with the field it is about."""
    names = {one.name: one.verbose_name for one in target._meta.concrete_fields}
    found = []
    for name, messages in error.message_dict.items():
        found += [f"{names[name]}: {text}" if name in names else text for text in messages]
    return list(dict.fromkeys(found))
