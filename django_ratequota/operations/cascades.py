"""What the deletion of a plan or an endpoint took along: policies and assignments, as the history holds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import models

from ..models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from ..recording.recorder import in_batches

KINDS: dict[str, Any] = {str(model._meta.model_name): model for model in (Plan, PlanAssignment, Endpoint, RatePolicy)}
#: What goes with an object: (kind, the field that points at it).
_DEPENDENTS = {"plan": [("ratepolicy", "plan"), ("planassignment", "plan")], "endpoint": [("ratepolicy", "endpoint")]}
#: The rows of a cascade are recorded one after the other. A longer pause between two of them: another deletion.
_PAUSE = timedelta(seconds=5)
_CASCADE = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Deletion:
    """An entry of the history about an object that was deleted along with another; without the object's fields."""

    #: Primary key of the ``PolicyChange``.
    pk: int
    #: Kind of the object, a key of ``KINDS``.
    model: str
    object_id: str
    at: datetime
    #: Whether the object was a policy for a user or a subject.
    override: bool


def deleted_along(change: PolicyChange) -> tuple[Deletion, ...]:
    """Return what the latest deletion of the change's object took along and is not there again, oldest first."""
    deletions = PolicyChange.objects.filter(action=PolicyChange.Action.DELETE)
    own = deletions.filter(model=change.model, object_id=change.object_id).first()
    if own is None:
        return ()
    near: list[Deletion] = []
    for kind, pointer in _DEPENDENTS.get(change.model, []):
        key = KINDS[change.model]._meta.pk.to_python(change.object_id)
        same_moment = deletions.filter(
            model=kind, actor=own.actor_id, at__range=(own.at - _CASCADE, own.at + _CASCADE)
        )
        near += _read(kind, same_moment.filter(**{f"before__{pointer}": key}))
    found = _unbroken(own, near)
    present = _present(found)
    return tuple(one for one in found if one.pk not in present)


def _read(kind: str, entries: models.QuerySet[PolicyChange]) -> Iterator[Deletion]:
    # Not the whole entries: of 50,000 they would fill the memory.
    columns = ("pk", "object_id", "at", *(("before__user", "before__subject") if kind == "ratepolicy" else ()))
    for pk, object_id, at, *audience in entries.values_list(*columns):
        yield Deletion(pk, kind, object_id, at, any(audience))


def _unbroken(own: PolicyChange, near: list[Deletion]) -> list[Deletion]:
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


def _present(deletions: list[Deletion]) -> set[int]:
    """Primary keys of the deletions whose object is there again."""
    present = set()
    for kind, model in KINDS.items():
        own = {one.object_id: one.pk for one in deletions if one.model == kind}
        for keys in in_batches(list(own)):
            pks = model._base_manager.filter(pk__in=keys).values_list("pk", flat=True)
            present |= {own[str(pk)] for pk in pks}
    return present
