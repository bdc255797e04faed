"""Brings plans, assignments, endpoints and policies back to a state that the history holds.

``plan_restoration`` compares a recorded state with the object as it is now, ``restore`` writes it. The object keeps
its primary key, also when it is made anew: counters are keyed by the endpoint's, and the history tells by it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from django.core.exceptions import ValidationError
from django.db import models, router, transaction
from django.utils.text import Truncator
from django.utils.translation import gettext as _

from .models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from .recording import acting, image, stored

Version = Literal["before", "after"]
KINDS: dict[str, Any] = {str(model._meta.model_name): model for model in (Plan, PlanAssignment, Endpoint, RatePolicy)}
#: What goes with an object: (kind, the field that points at it).
_DEPENDENTS = {"plan": [("ratepolicy", "plan"), ("planassignment", "plan")], "endpoint": [("ratepolicy", "endpoint")]}
#: The rows of a cascade are recorded one after the other. A longer pause between two of them: another deletion.
_PAUSE = timedelta(seconds=5)
_CASCADE = timedelta(minutes=10)


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
    along: tuple[PolicyChange, ...] = field(default=())

    @property
    def seen(self) -> str:
        """Tells one state of the object from another: what the operator looked at must be what is overwritten."""
        state = None if self.current is None else image(self.current)
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


def plan_restoration(change: PolicyChange, version: Version, *, lock: bool = False) -> Restoration:
    """Compare the version with the object as it is now; raises ``ValidationError`` where it cannot be read any more.

    ``lock`` keeps others from changing the object until the transaction ends.
    """
    model: Any = KINDS[change.model]
    state = change.before if version == "before" else change.after
    using = router.db_for_write(model)
    pk = _read(model._meta.pk, change.object_id)
    current = stored(model, [pk], using, lock).get(pk)
    target, differing = _target(model, pk, state or {}, current)
    along = _deleted_along(change) if current is None else ()
    return Restoration(
        change=change, version=version, current=current, target=target, differing=differing, along=along
    )


def restore(restoration: Restoration, *, actor: Any, reason: str, along: bool = False) -> list[models.Model]:
    """Write the version, and with ``along`` what was deleted along with it; one transaction, one publication.

    Raises ``ValidationError`` saying what does not fit any more; nothing is changed then.
    """
    using = router.db_for_write(type(restoration.target))
    with acting(actor, reason), transaction.atomic(using=using):
        written = [_write(restoration, using)]
        for deletion in restoration.along if along else ():
            try:
                written.append(_write(plan_restoration(deletion, "before", lock=True), using))
            except ValidationError as error:
                text = _("%(object)s cannot be restored along: %(errors)s")
                given = {"object": Truncator(deletion).chars(100), "errors": " ".join(error.messages)}
                raise ValidationError(text % given) from error
    return written


def problems(restoration: Restoration) -> list[str]:
    """What does not fit any more, in sentences; empty when the version can be written as things stand."""
    target = restoration.target
    text = _("The %(kind)s with the id %(pk)s is deleted; restore or create that first.")
    relations: list[Any] = [one for one in target._meta.concrete_fields if one.is_relation]
    missing = [
        text % {"kind": one.related_model._meta.verbose_name, "pk": getattr(target, one.attname)}
        for one in relations
        if not _is_there(target, one)
    ]
    if missing:
        return missing
    try:
        target.full_clean()
    except ValidationError as error:
        return _named(target, error)
    return []


def _target(
    model: type[models.Model], pk: Any, state: dict[str, Any], current: models.Model | None
) -> tuple[models.Model, tuple[str, ...]]:
    """The object of the state, and the names of the fields that differ from the current one's.

    A field that the state does not know, being newer, stays as it is.
    """
    known: dict[str, Any] = {one.name: one for one in model._meta.concrete_fields}
    gone = [name for name in state if name not in known]
    if gone:
        text = _("This version is older than the app: it has fields that there are no more (%(names)s).")
        raise ValidationError(text % {"names": ", ".join(gone)})
    now = {} if current is None else image(current)
    target = model(pk=pk)
    target._state.adding = current is None
    target._state.db = None if current is None else current._state.db
    for name, one in known.items():
        if name in state and not one.primary_key:
            setattr(target, one.attname, _read(one, state[name]))
        elif current is not None:
            setattr(target, one.attname, getattr(current, one.attname))
        if one.is_relation and one.remote_field.on_delete is models.SET_NULL and not _is_there(target, one):
            setattr(target, one.attname, None)
    then = image(target)
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


def _is_there(target: models.Model, one: Any) -> bool:
    """Whether what the relation points at exists; an empty one points at nothing that could be missing."""
    key = getattr(target, one.attname)
    return key is None or one.related_model._base_manager.filter(**{one.target_field.name: key}).exists()


def _named(target: models.Model, error: ValidationError) -> list[str]:
    """The messages, each with the field it is about."""
    names = {one.name: one.verbose_name for one in target._meta.concrete_fields}
    found = []
    for name, messages in error.message_dict.items():
        found += [f"{names[name]}: {text}" if name in names else text for text in messages]
    return list(dict.fromkeys(found))


def _deleted_along(change: PolicyChange) -> tuple[PolicyChange, ...]:
    """The deletions that the latest deletion of the change's object brought with it."""
    own = PolicyChange.objects.filter(
        model=change.model, object_id=change.object_id, action=PolicyChange.Action.DELETE
    ).first()
    if own is None:
        return ()
    near: list[PolicyChange] = []
    for kind, pointer in _DEPENDENTS.get(change.model, []):
        near += PolicyChange.objects.filter(
            model=kind,
            action=PolicyChange.Action.DELETE,
            actor=own.actor_id,
            at__range=(own.at - _CASCADE, own.at + _CASCADE),
            **{f"before__{pointer}": _read(KINDS[change.model]._meta.pk, change.object_id)},
        )
    found = _unbroken(own, near)
    present = _present(found)
    return tuple(one for one in found if one.pk not in present)


def _unbroken(own: PolicyChange, near: list[PolicyChange]) -> list[PolicyChange]:
    """Those of the same deletion: without a pause between one and the next, in either direction from ``own``."""
    chain = []
    before = sorted((one for one in near if one.at <= own.at), key=lambda one: one.at, reverse=True)
    after = sorted((one for one in near if one.at > own.at), key=lambda one: one.at)
    for direction in (before, after):
        last = own.at
        for one in direction:
            if abs(one.at - last) > _PAUSE:
                break
            chain.append(one)
            last = one.at
    return sorted(chain, key=lambda one: one.pk)


def _present(deletions: list[PolicyChange]) -> set[Any]:
    """Primary keys of the deletions whose object is there again."""
    present = set()
    for kind, model in KINDS.items():
        own = {one.object_id: one.pk for one in deletions if one.model == kind}
        if own:
            pks = model._base_manager.filter(pk__in=list(own)).values_list("pk", flat=True)
            present |= {own[str(pk)] for pk in pks}
    return present
