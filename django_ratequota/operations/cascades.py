"""Find in the history which policies and assignments were deleted with a plan, an endpoint or a list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import models

from ..models import Endpoint, ListMember, Plan, PlanAssignment, PolicyChange, RatePolicy, SubjectList
from ..recording.recorder import in_batches

KINDS: dict[str, Any] = {
    str(model._meta.model_name): model
    for model in (Plan, PlanAssignment, Endpoint, SubjectList, ListMember, RatePolicy)
}
#: Kind -> the kinds deleted with it, and the field of each that refers to it.
_DEPENDENTS = {
    "plan": [("ratepolicy", "plan"), ("planassignment", "plan")],
    "endpoint": [("ratepolicy", "endpoint")],
    "subjectlist": [("ratepolicy", "subject_list"), ("listmember", "subject_list")],
}
#: The rows of a cascade are recorded one after another. After a longer pause another deletion begins.
_PAUSE = timedelta(seconds=5)
_CASCADE = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Deletion:
    """A history entry of an object that was deleted with another; without the object's fields."""

    #: Primary key of the ``PolicyChange``.
    pk: int
    #: Kind of the object, a key of ``KINDS``.
    model: str
    object_id: str
    at: datetime
    #: Whether the object was a policy for a user or a subject.
    override: bool


def deleted_along(change: PolicyChange) -> tuple[Deletion, ...]:
    """Return what was deleted with the change's object the last time and does not exist again, oldest first."""
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
    found = _same_cascade(own, near)
    present = _present(found)
    return tuple(deletion for deletion in found if deletion.pk not in present)


def _read(kind: str, entries: models.QuerySet[PolicyChange]) -> Iterator[Deletion]:
    # Some columns only: 50,000 whole entries would fill the memory.
    columns = ("pk", "object_id", "at", *(("before__user", "before__subject") if kind == "ratepolicy" else ()))
    for pk, object_id, at, *audience in entries.values_list(*columns):
        yield Deletion(pk, kind, object_id, at, any(audience))


def _same_cascade(own: PolicyChange, near: list[Deletion]) -> list[Deletion]:
    """Return the entries of the same cascade: going out from ``own``, none after a pause."""
    chain = []
    near.sort(key=lambda deletion: deletion.at)
    before = [deletion for deletion in reversed(near) if deletion.at <= own.at]
    after = [deletion for deletion in near if deletion.at > own.at]
    for direction in (before, after):
        last = own.at
        for deletion in direction:
            if abs(deletion.at - last) > _PAUSE:
                break
            chain.append(deletion)
            last = deletion.at
    return sorted(chain, key=lambda deletion: deletion.pk)


def _present(deletions: list[Deletion]) -> set[int]:
    """Return the primary keys of entries whose object exists again."""
    present = set()
    for kind, model in KINDS.items():
        own = {deletion.object_id: deletion.pk for deletion in deletions if deletion.model == kind}
        for keys in in_batches(list(own)):
            pks = model._base_manager.filter(pk__in=keys).values_list("pk", flat=True)
            present |= {own[str(pk)] for pk in pks}
    return present
