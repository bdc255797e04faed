"""Find in the history which policies and assignments were deleted with a plan, an endpoint or a list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from django.db import models

from ..changes.writer import in_batches
from ..models import Endpoint, ListMember, Plan, PlanAssignment, PolicyChange, RatePolicy, SubjectList

KINDS: dict[str, Any] = {
    str(model._meta.model_name): model
    for model in (Plan, PlanAssignment, Endpoint, SubjectList, ListMember, RatePolicy)
}


class Deletion(NamedTuple):
    """A history entry of an object that was deleted with another; without the object's fields."""

    #: Primary key of the ``PolicyChange``.
    pk: int
    #: Kind of the object, a key of ``KINDS``.
    model: str
    object_id: str
    #: Whether the object was a policy for a user or a subject.
    override: bool


def deleted_along(change: PolicyChange) -> tuple[Deletion, ...]:
    """Return what was deleted with the change's object the last time and does not exist again, oldest first."""
    deletions = PolicyChange.objects.filter(action=PolicyChange.Action.DELETE)
    own = deletions.filter(model=change.model, object_id=change.object_id).first()
    if own is None:
        return ()
    found: list[Deletion] = []
    key = KINDS[change.model]._meta.pk.to_python(change.object_id)
    for kind, model in KINDS.items():
        for field in relations(model, [KINDS[change.model]]):
            same_save = deletions.filter(change_id=own.change_id, model=kind)
            found += _read(kind, same_save.filter(**{f"before__{field.name}": key}))
    present = _present(found)
    return tuple(sorted((one for one in found if one.pk not in present), key=lambda one: one.pk))


def relations(model: type[models.Model], others: Any) -> list[Any]:
    """Return the model's fields that refer to one of the other models."""
    return [field for field in model._meta.concrete_fields if field.is_relation and field.related_model in others]


def _read(kind: str, entries: models.QuerySet[PolicyChange]) -> Iterator[Deletion]:
    # Some columns only: 50,000 whole entries would fill the memory.
    columns = ("pk", "object_id", *(("before__user", "before__subject") if kind == "ratepolicy" else ()))
    for pk, object_id, *audience in entries.values_list(*columns):
        yield Deletion(pk, kind, object_id, any(audience))


def _present(deletions: list[Deletion]) -> set[int]:
    """Return the primary keys of entries whose object exists again."""
    present = set()
    for kind, model in KINDS.items():
        own = {deletion.object_id: deletion.pk for deletion in deletions if deletion.model == kind}
        for keys in in_batches(list(own)):
            pks = model._base_manager.filter(pk__in=keys).values_list("pk", flat=True)
            present |= {own[str(pk)] for pk in pks}
    return present
