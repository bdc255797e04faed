"""Undo a save: each object that it changed gets back the values that it had before.

Only fields that the save changed are set, so edits of other fields since then stay. Objects whose fields were edited
again since then are left as they are, unless ``overwrite`` is True. Resets and units given back are not undone,
because the counters have moved on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from secrets import token_hex
from typing import Any

from django.core.exceptions import ValidationError
from django.db import IntegrityError, models, transaction
from django.utils import timezone
from django.utils.text import Truncator

from ..changes.databases import policy_alias
from ..changes.validators import visible
from ..changes.writer import changed_by, in_batches, rows_by_pk, write_changes
from ..models import PolicyChange, RatePolicy
from .cascades import KINDS
from .restore import problems_of, read_value, related_objects, restore_deleted, target_of
from .undo_plan import CHILDREN, PARENTS, Step, Undo, Verb, plan_undo, references

__all__ = ["Undo", "plan_undo", "undo"]

#: Kind -> its fields with unique values, alone or together.
_KEYS = {
    "plan": {"name", "slug", "default_for"},
    "endpoint": {"name"},
    "subjectlist": {"name"},
    "listmember": {"subject_list", "user", "subject"},
    "ratepolicy": {"endpoint", "user", "subject", "subject_list", "plan", "counted_per", "starts_at", "ends_at"},
}


def undo(
    plan: Undo,
    *,
    actor: Any,
    reason: str,
    overwrite: bool = False,
    written: Callable[[Verb, Sequence[models.Model]], None] = lambda verb, rows: None,
) -> None:
    """Undo the save in one transaction; that is itself one save.

    ``plan`` was made with ``lock`` in the same transaction. ``written`` is called with each batch of objects: before
    they are deleted, after they are changed or created. Raises ``ValidationError``; then nothing has changed.
    """
    using = policy_alias(RatePolicy)
    with changed_by(actor, reason), transaction.atomic(using=using):
        _delete(plan, CHILDREN, overwrite, using, written, unreferenced=False)
        # Their names may be those that others get back. Those that policies are on until these are moved come last.
        _delete(plan, PARENTS, overwrite, using, written, unreferenced=True)
        for kinds in (PARENTS, CHILDREN):
            for kind, steps in plan.of(kinds, "change", overwrite):
                for rows in _change(kind, steps, using):
                    written("change", rows)
            for kind, steps in plan.of(kinds, "create", overwrite):
                for rows in restore_deleted(kind, [step.first for step in steps], using):
                    written("create", rows)
        _delete(plan, PARENTS, overwrite, using, written, unreferenced=False)


def _delete(
    plan: Undo, kinds: Sequence[str], overwrite: bool, using: str, written: Any, *, unreferenced: bool
) -> None:
    for kind, steps in plan.of(kinds, "delete", overwrite):
        model = KINDS[kind]
        for batch in in_batches([read_value(model._meta.pk, step.object_id) for step in steps]):
            pks = set(batch)
            for _relation, counts in references(model, batch) if unreferenced else ():
                pks -= counts.keys()
            rows = rows_by_pk(model, pks, using)  # some are deleted already
            if rows:
                written("delete", list(rows.values()))
                model._base_manager.using(using).filter(pk__in=list(rows)).delete()


def _change(kind: str, steps: list[Step], using: str) -> Iterator[list[models.Model]]:
    """Set the fields in batches. The history gets one row per object, from its old state to its new one."""
    model = KINDS[kind]
    parked = _park(kind, [step for step in steps if not _KEYS.get(kind, set()).isdisjoint(step.fields)], using)
    for batch in in_batches(steps):
        rows = PolicyChange.objects.in_bulk([step.first for step in batch])
        states = [{name: (rows[s.first].before or {})[name] for name in s.fields} for s in batch]
        keys = [read_value(model._meta.pk, step.object_id) for step in batch]
        exists = related_objects(model, states)
        old = rows_by_pk(model, keys, using, lock=True)
        by_fields: dict[tuple[str, ...], list[models.Model]] = {}
        for key, state in zip(keys, states, strict=True):
            for name, value in parked.get(key, {}).items():
                setattr(old[key], model._meta.get_field(name).attname, value)
            target = target_of(model, key, state, old[key], exists)[0]
            by_fields.setdefault((*sorted({*state, *parked.get(key, {})}),), []).append(target)
        for names, targets in by_fields.items():
            _write(model, targets, names, using)
        new = rows_by_pk(model, keys, using)
        write_changes(((old[key], new[key]) for key in keys), using)
        yield list(new.values())


def _write(model: Any, targets: list[models.Model], names: Sequence[str], using: str) -> None:
    """Write the fields, not recorded; raises ``ValidationError`` with the object that is refused."""
    try:
        with transaction.atomic(using=using):
            rows: Any = models.QuerySet(model, using=using)
            rows.bulk_update(targets, names)
    except IntegrityError as error:
        refused = (f"{Truncator(visible(one)).chars(100)}: {text}" for one in targets for text in problems_of(one))
        raise ValidationError(next(refused, str(error))) from error


def _park(kind: str, steps: list[Step], using: str) -> dict[Any, dict[str, Any]]:
    """Free the unique values of the objects, which may swap them; return these values by primary key.

    Nothing is recorded: ``_change`` writes the objects again.
    """
    model = KINDS[kind]
    random = [column.name for column in model._meta.concrete_fields if column.unique and not column.primary_key]
    random += ["subject"] if kind == "listmember" else []
    values: dict[str, dict[str, Any]] = {
        "plan": {"default_for": ""},
        "ratepolicy": {"starts_at": timezone.now()},
        "listmember": {"user": None},
    }
    freed = values.get(kind, {})
    parked: dict[Any, dict[str, Any]] = {}
    for batch in in_batches([read_value(model._meta.pk, step.object_id) for step in steps] if len(steps) > 1 else []):
        rows: Any = models.QuerySet(model, using=using).filter(pk__in=batch)
        parked |= {row.pop("pk"): row for row in rows.values("pk", *random, *freed)}
        if freed and not random:
            rows.update(**freed)
        for pk in batch if random else ():
            rows.filter(pk=pk).update(**freed, **{name: token_hex(16) for name in random})
    return parked
