"""What undoing a save would change: compares each of its objects with the state before it. Writes nothing."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import Count
from django.db.models.deletion import get_candidate_relations_to_delete
from django.utils.translation import gettext as _

from ..changes.databases import policy_alias
from ..changes.writer import field_values, in_batches, rows_by_pk
from ..models import PolicyChange
from .cascades import KINDS, relations
from .restore import check, read_value, related_objects, target_of

Verb = Literal["create", "change", "delete"]
#: (object now, object afterwards) -> the permission that is missing, as a sentence; "" = none. None = no object.
Forbidden = Callable[[models.Model | None, models.Model | None], str]
#: Kinds that others refer to. They are created before the others and deleted after them.
PARENTS = [kind for kind, model in KINDS.items() if not relations(model, KINDS.values())]
CHILDREN = [kind for kind in KINDS if kind not in PARENTS]


@dataclass(slots=True, kw_only=True)
class Step:
    """What undoing a save does to one object."""

    kind: str
    object_id: str
    #: Primary keys of the object's first and last ``PolicyChange`` of the save.
    first: int
    last: int
    verb: Verb
    #: Fields that get other values; empty when the object is deleted.
    fields: tuple[str, ...] = ()
    #: Whether the object is as it was before the save already.
    done: bool = False
    #: Whether the object was edited since the save.
    edited: bool = False
    #: Why the object stays as it is, a sentence; "" = nothing is in the way.
    obstacle: str = ""

    def applies(self, overwrite: bool) -> bool:
        """Return whether ``undo`` changes the object."""
        return not self.done and not self.obstacle and (overwrite or not self.edited)


@dataclass(slots=True, kw_only=True)
class Undo:
    """What undoing a save would change; nothing is written."""

    change_id: UUID
    #: One per object, in the order of their first changes.
    steps: list[Step]
    #: A hash of the objects' states, to refuse undoing from another state than the operator saw.
    seen: str = ""
    #: (relation, key) -> how many steps end that reference, without and with overwriting.
    _released: Counter[tuple[Any, Any]] = field(default_factory=Counter)
    _released_overwriting: Counter[tuple[Any, Any]] = field(default_factory=Counter)

    def of(self, kinds: Sequence[str], verb: Verb, overwrite: bool) -> Iterator[tuple[str, list[Step]]]:
        """Yield the kinds with the steps to take."""
        for kind in kinds:
            steps = [s for s in self.steps if s.kind == kind and s.verb == verb and s.applies(overwrite)]
            if steps:
                yield kind, steps


def plan_undo(change_id: UUID, *, lock: bool = False, forbidden: Forbidden = lambda now, then: "") -> Undo:
    """Compare the objects of the save with their state before it; ``lock`` locks them until the transaction ends."""
    undo = Undo(change_id=change_id, steps=_steps(change_id))
    digest = hashlib.sha256()
    created: dict[Any, set[Any]] = {}
    for kind in (*PARENTS, *CHILDREN):
        for steps in in_batches([step for step in undo.steps if step.kind == kind]):
            for step, now in _compare(undo, KINDS[kind], steps, lock, created, forbidden):
                state = None if now is None else field_values(now)
                digest.update(json.dumps([step.first, state], sort_keys=True).encode())
    _find_references(undo)
    undo.seen = digest.hexdigest()[:20]
    return undo


def _steps(change_id: UUID) -> list[Step]:
    """Return a step for each object of the save, not compared yet."""
    rows = PolicyChange.objects.filter(change_id=change_id, model__in=KINDS).order_by("pk")
    steps: dict[tuple[str, str], Step] = {}
    verbs: dict[str, Verb] = {"create": "delete", "update": "change", "delete": "create"}
    for pk, kind, object_id, action in rows.values_list("pk", "model", "object_id", "action"):
        step = steps.get((kind, object_id))
        if step is None:
            step = steps[kind, object_id] = Step(
                kind=kind, object_id=object_id, first=pk, last=pk, verb=verbs[action]
            )
        else:
            step.last = pk
            if step.verb == "delete":
                step.done = action == "delete"  # created and deleted by the same save
            else:
                step.verb = "create" if action == "delete" else "change"
    return list(steps.values())


def _compare(
    undo: Undo, model: Any, steps: Sequence[Step], lock: bool, created: dict[Any, set[Any]], forbidden: Forbidden
) -> Iterator[tuple[Step, models.Model | None]]:
    """Complete the steps of one kind; yield each with the object as it is now."""
    rows = PolicyChange.objects.in_bulk([pk for step in steps for pk in (step.first, step.last)])
    keys = {step.first: read_value(model._meta.pk, step.object_id) for step in steps}
    current = rows_by_pk(model, list(keys.values()), policy_alias(model), lock)
    try:
        exists = related_objects(model, [rows[step.first].before or {} for step in steps], created)
    except ValidationError:  # one of the states cannot be read any more: find out which
        exists = None
    for step in steps:
        now = current.get(keys[step.first])
        before, after = rows[step.first].before or {}, rows[step.last].after or {}
        target = None
        try:
            if step.verb == "delete":
                step.done = step.done or now is None
                values = None if now is None else field_values(now)
                step.edited = values is not None and any(values.get(name) != after[name] for name in after)
            else:
                target = _target(step, now, before, after, exists or related_objects(model, [before], created))
            if not step.done:
                step.obstacle = step.obstacle or forbidden(now, target)
        except ValidationError as error:
            step.obstacle = " ".join(error.messages)
        if step.verb == "create" and step.applies(False):
            created.setdefault(model, set()).add(keys[step.first])
        _release(undo, step, now, target)
        yield step, now


def _target(step: Step, now: Any, before: dict[str, Any], after: dict[str, Any], exists: Any) -> Any:
    """Return the object as it will be, and complete the step; raises ``ValidationError``."""
    model = KINDS[step.kind]
    state = before
    if step.verb == "change":
        if now is None:
            step.obstacle = _("It was deleted since then. Restore it first.")
            return None
        state = {name: value for name, value in before.items() if after.get(name) != value}
    values = {} if now is None else field_values(now)
    pk = read_value(model._meta.pk, step.object_id)
    target, step.fields = target_of(model, pk, state, now, exists)
    step.done = now is not None and not step.fields
    if step.done:
        return target
    if now is not None:  # of a deleted object, it exists again
        known = after if step.verb == "change" else {}
        step.edited = any(values[name] != known.get(name, ...) for name in step.fields)
        step.verb = "change"
    check(target, exists)
    return target


def _release(undo: Undo, step: Step, now: models.Model | None, target: models.Model | None) -> None:
    """Count which references the step ends."""
    if now is None or not step.applies(True):
        return
    for relation in relations(type(now), KINDS.values()):
        key = getattr(now, relation.attname)
        if key is not None and (target is None or getattr(target, relation.attname) != key):
            undo._released[relation, key] += not step.edited
            undo._released_overwriting[relation, key] += 1


def _find_references(undo: Undo) -> None:
    """Leave created objects as they are that others refer to by now, because deleting them deletes the others."""
    for kind, steps in list(undo.of(list(KINDS), "delete", True)):
        model = KINDS[kind]
        for batch in in_batches(steps):
            keys = {read_value(model._meta.pk, step.object_id): step for step in batch}
            for relation, counts in references(model, list(keys)):
                for key, count in counts.items():
                    if count > undo._released_overwriting[relation, key]:
                        text = _("%(count)d of the %(kind)s refer to it now. Delete or move these first.")
                        kinds = relation.model._meta.verbose_name_plural
                        params = {"count": count - undo._released_overwriting[relation, key], "kind": kinds}
                        keys[key].obstacle = text % params
                    elif count > undo._released[relation, key]:
                        keys[key].edited = True


def references(model: Any, keys: Sequence[Any]) -> Iterator[tuple[Any, dict[Any, int]]]:
    """Yield each foreign key to the model, with the number of rows that refer to each key; zero is left out."""
    for reverse in get_candidate_relations_to_delete(model._meta):
        relation: Any = reverse.field  # type: ignore[attr-defined]
        rows = relation.model._base_manager.using(policy_alias(relation.model))
        name = f"{relation.name}__pk"
        found = rows.filter(**{f"{name}__in": keys}).order_by().values_list(name).annotate(Count("pk"))
        yield relation, dict(found)
