"""Take changes back: a plan of the objects to create, change and delete, which is shown first and then applied.

Undoing a save gives each of its objects the values back that it had before. Only fields that the save changed are
set, so edits of other fields since then stay. Restoring a version takes all later changes of one object back. Resets
and units given back are not undone, because the counters have moved on.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

from django.core.exceptions import ValidationError
from django.db import IntegrityError, models, transaction
from django.db.models import Count
from django.db.models.deletion import get_candidate_relations_to_delete
from django.utils.text import Truncator
from django.utils.translation import gettext as _

from ..changes.databases import policy_alias
from ..changes.validators import visible
from ..changes.writer import changed_by, field_values, in_batches, rows_by_pk
from ..models import PolicyChange, RatePolicy
from .differences import name_users
from .states import KINDS, Related, State, object_of, problems, read_value, related_objects, relations

Version = Literal["before", "after"]
Verb = Literal["create", "change", "delete"]
#: (object now, object afterwards) -> the permission that is missing, as a sentence; "" = none. None = no object.
Forbidden = Callable[[models.Model | None, models.Model | None], str]
#: Kinds that others refer to. They are created before the others and deleted after them.
PARENTS = [
    kind for kind, model in KINDS.items() if not {one.related_model for one in relations(model)} & {*KINDS.values()}
]
CHILDREN = [kind for kind in KINDS if kind not in PARENTS]


@dataclass(slots=True, kw_only=True)
class Step:
    """What happens to one object. ``now`` and ``then`` are its stored and its future state; None = no object."""

    kind: str
    object_id: str
    #: The object in words, as in the history; once compared, with the name of its user.
    object_text: str
    #: Primary key of the ``PolicyChange`` with the state to return to, and which of its two states that is.
    change: int
    version: Version = "before"
    #: Primary key of the last ``PolicyChange`` that is taken back; None = all later ones are taken back.
    last: int | None = None
    #: Whether the object was deleted together with the one that is restored.
    along: bool = False
    now: models.Model | None = None
    then: models.Model | None = None
    #: Fields that get other values.
    fields: tuple[str, ...] = ()
    #: Whether the object was edited since the changes that are taken back.
    edited: bool = False
    #: Why the object stays as it is, in sentences; "" = nothing is in the way.
    obstacle: str = ""

    @property
    def verb(self) -> Verb:
        """What is done to the object."""
        return "create" if self.now is None else "delete" if self.then is None else "change"

    @property
    def done(self) -> bool:
        """Whether the object is as it was already."""
        return not self.obstacle and (self.now is self.then is None or (self.verb == "change" and not self.fields))

    def applies(self, chosen: bool) -> bool:
        """Return whether ``apply`` does the step; ``chosen``: the operator wants those left out by default, too."""
        return not self.done and not self.obstacle and (chosen or not (self.edited or self.along))


@dataclass(slots=True, kw_only=True)
class Revert:
    """What taking changes back would do; nothing is written."""

    #: One per object: of a save in the order of its changes, of a version the object itself first.
    steps: list[Step]
    #: The save that is undone; None where a version is restored.
    undoes: UUID | None = None
    #: A save with more changes than asked for, which therefore has no steps here.
    too_large: UUID | None = None
    #: A hash of the objects' states, to refuse overwriting another state than the operator saw.
    seen: str = ""

    def to_do(self, kinds: Sequence[str], verb: Verb, chosen: bool) -> Iterator[tuple[Any, list[Step]]]:
        """Yield the models of these kinds with their steps."""
        for kind in kinds:
            steps = [step for step in self.steps if (step.kind, step.verb) == (kind, verb) and step.applies(chosen)]
            if steps:
                yield KINDS[kind], steps


def versions(change: PolicyChange) -> tuple[Version, ...]:
    """Return the versions of this change that can be restored. "Did not exist" cannot be."""
    known: tuple[Version, ...] = ("after", "before")
    return tuple(version for version in known if change.model in KINDS and getattr(change, version))


def plan_undo(
    change_id: UUID, *, lock: bool = False, most: int | None = None, forbidden: Forbidden = lambda now, then: ""
) -> Revert:
    """Compare the objects of the save with their state before it.

    ``lock`` locks them until the transaction ends; of a save with more than ``most`` changes, none are compared.
    """
    rows = PolicyChange.objects.filter(change_id=change_id)
    if most is not None and rows.count() > most:
        return Revert(steps=[], undoes=change_id, too_large=change_id)
    steps: dict[tuple[str, str], Step] = {}
    found = rows.filter(model__in=KINDS).order_by("pk").values_list("pk", "model", "object_id", "object_text")
    for pk, kind, object_id, text in found:
        new = Step(kind=kind, object_id=object_id, object_text=text, change=pk)
        step = steps.setdefault((kind, object_id), new)
        step.last, step.object_text = pk, text
    return _compared(Revert(steps=list(steps.values()), undoes=change_id), lock, forbidden)


def plan_restore(
    change: PolicyChange,
    version: Version,
    *,
    lock: bool = False,
    most: int | None = None,
    forbidden: Forbidden = lambda now, then: "",
) -> Revert:
    """Compare the object with its state before or after the change, as ``plan_undo``.

    What was deleted together with it follows; ``apply`` creates that only if it is chosen.
    """
    own = Step(
        kind=change.model,
        object_id=change.object_id,
        object_text=change.object_text,
        change=change.pk,
        version=version,
    )
    plan = Revert(steps=[own])
    last = PolicyChange.objects.filter(model=change.model, object_id=change.object_id).first()
    if last is not None and last.action == PolicyChange.Action.DELETE:
        if most is not None and PolicyChange.objects.filter(change_id=last.change_id).count() > most:
            plan.too_large = last.change_id
        else:
            plan.steps += _deleted_along(last)
    return _compared(plan, lock, forbidden)


def _deleted_along(deletion: PolicyChange) -> Iterator[Step]:
    """Yield a step for each object that was deleted because it referred to the deletion's."""
    model = KINDS[deletion.model]
    key = model._meta.pk.to_python(deletion.object_id)
    same_save = PolicyChange.objects.filter(change_id=deletion.change_id, action=deletion.action).order_by("pk")
    for kind in CHILDREN:
        for relation in relations(KINDS[kind]):
            rows = same_save.filter(model=kind, **{f"before__{relation.name}": key})
            found = rows.values_list("pk", "object_id", "object_text") if relation.related_model is model else ()
            for pk, object_id, text in found:
                yield Step(kind=kind, object_id=object_id, object_text=text, change=pk, last=pk, along=True)


def _compared(plan: Revert, lock: bool, forbidden: Forbidden) -> Revert:
    """Complete the steps."""
    digest = hashlib.sha256()
    created: dict[Any, dict[Any, models.Model]] = {}
    for kind in (*PARENTS, *CHILDREN):
        model = KINDS[kind]
        for steps in in_batches([step for step in plan.steps if step.kind == kind]):
            name_users(steps)
            keys = [read_value(model._meta.pk, step.object_id) for step in steps]
            stored = rows_by_pk(model, keys, policy_alias(model), lock)
            rows = PolicyChange.objects.in_bulk([pk for step in steps for pk in (step.change, step.last) if pk])
            wanted = [getattr(rows[step.change], step.version) for step in steps]
            related = related_objects(model, [state or {} for state in wanted], created)
            for step, key, state in zip(steps, keys, wanted, strict=True):
                step.now = stored.get(key)
                values = None if step.now is None else field_values(step.now)
                digest.update(json.dumps([step.change, values], sort_keys=True).encode())
                try:
                    _compare(step, key, state, rows[step.last].after if step.last else None, related)
                except ValidationError as error:
                    step.obstacle = " ".join(error.messages)
                if not step.done:
                    step.obstacle = step.obstacle or forbidden(step.now, step.then)
                if step.verb == "create" and step.then is not None and not step.obstacle:
                    created.setdefault(model, {})[key] = step.then
    _find_references(plan)
    plan.seen = digest.hexdigest()[:20]
    return plan


def _compare(step: Step, key: Any, wanted: State | None, left: State | None, related: Related) -> None:
    """Complete the step: ``wanted`` is the state to return to, ``left`` the one that the changes left behind.

    For both, None = no object; ``left`` is also None where all later changes are taken back. Raises
    ``ValidationError`` with what is in the way.
    """
    restores = step.last is None
    if wanted is None:
        if left is None:  # created and deleted by the same save
            step.now = None
        elif step.now is not None:
            now = field_values(step.now)
            step.edited = any(now.get(name) != left[name] for name in left)
        return
    if step.along and step.now is not None:  # exists again
        step.then = step.now
        return
    state = wanted
    if left is not None:
        if step.now is None:
            raise ValidationError(_("It was deleted since then. Restore it first."))
        state = {name: value for name, value in wanted.items() if left.get(name) != value}
    step.then, fields = object_of(KINDS[step.kind], key, state, step.now, related)
    if step.now is not None:
        step.fields, now = fields, field_values(step.now)
        step.edited = not restores and any(now[name] != (left or {}).get(name, ...) for name in fields)
    # Values that must be unique may be freed by the other objects of a save.
    found = [] if step.done else problems(step.then, unique=restores)
    if found:
        raise ValidationError(found)


def _find_references(plan: Revert) -> None:
    """Leave created objects as they are that others refer to by now, because deleting them deletes the others."""
    ended = Counter(_ended_references(plan, chosen=False))
    ended_if_chosen = Counter(_ended_references(plan, chosen=True))
    for model, steps in list(plan.to_do(PARENTS, "delete", True)):
        for batch in in_batches(steps):
            by_key = {step.now.pk: step for step in batch if step.now is not None}
            for relation, counts in _references(model, list(by_key)):
                for key, count in counts.items():
                    if count > ended_if_chosen[relation, key]:
                        text = _("%(count)d of the %(kind)s refer to it now. Delete or move these first.")
                        kinds = relation.model._meta.verbose_name_plural
                        params = {"count": count - ended_if_chosen[relation, key], "kind": kinds}
                        by_key[key].obstacle = text % params
                    elif count > ended[relation, key]:
                        by_key[key].edited = True


def _ended_references(plan: Revert, chosen: bool) -> Iterator[tuple[Any, Any]]:
    """Yield (relation, key) for each reference that a step ends."""
    for step in plan.steps:
        if step.now is not None and step.applies(chosen):
            for relation in relations(type(step.now)):
                key = getattr(step.now, relation.attname)
                if key is not None and (step.then is None or getattr(step.then, relation.attname) != key):
                    yield relation, key


def _references(model: Any, keys: Sequence[Any]) -> Iterator[tuple[Any, dict[Any, int]]]:
    """Yield each foreign key to the model, with the number of rows that refer to each key; zero is left out."""
    for reverse in get_candidate_relations_to_delete(model._meta):
        relation: Any = reverse.field  # type: ignore[attr-defined]
        rows = relation.model._base_manager.using(policy_alias(relation.model))
        name = f"{relation.name}__pk"
        found = rows.filter(**{f"{name}__in": keys}).order_by().values_list(name).annotate(Count("pk"))
        yield relation, dict(found)


def apply(plan: Revert, *, actor: Any, reason: str, chosen: bool = False) -> list[Step]:
    """Do the steps in one transaction, which is itself one save; return those that were done.

    ``plan`` was made with ``lock`` in the same transaction. Raises ``ValidationError``; then nothing has changed.
    """
    using = policy_alias(RatePolicy)
    with changed_by(actor, reason, undoes=plan.undoes), transaction.atomic(using=using):
        _delete(plan.to_do(CHILDREN, "delete", chosen), using)
        # Their names may be those that others get back. Those that policies are on until these are moved come last.
        _delete(plan.to_do(PARENTS, "delete", chosen), using, referred=False)
        for kinds in (PARENTS, CHILDREN):
            for verb in ("change", "create"):
                for model, steps in plan.to_do(kinds, verb, chosen):
                    _write(model, steps, using)
        _delete(plan.to_do(PARENTS, "delete", chosen), using)
    return [step for step in plan.steps if step.applies(chosen)]


def _delete(to_do: Iterator[tuple[Any, list[Step]]], using: str, *, referred: bool = True) -> None:
    """Delete the objects; without ``referred``, only those that no row refers to."""
    for model, steps in to_do:
        for batch in in_batches([step.now.pk for step in steps if step.now is not None]):
            found = () if referred else _references(model, batch)
            kept = {key for _relation, counts in found for key in counts}
            model._base_manager.using(using).filter(pk__in={*batch} - kept).delete()


def _write(model: Any, steps: Sequence[Step], using: str) -> None:
    """Change or create the objects; raises ``ValidationError``."""
    rows = model._base_manager.using(using)
    refused: list[Any] = []
    for fields in dict.fromkeys(step.fields for step in steps):
        for batch in in_batches([step.then for step in steps if step.fields == fields]):
            try:
                with transaction.atomic(using=using):
                    rows.bulk_update(batch, fields) if fields else rows.bulk_create(batch)
            except IntegrityError:
                refused += batch
    _write_singly(refused, using)


def _write_singly(objects: Sequence[Any], using: str) -> None:
    """Save the objects one by one, again where others first had to give up their values."""
    while objects:
        refused = []
        for one in objects:
            try:
                with transaction.atomic(using=using):
                    one.save(using=using)
            except IntegrityError as error:
                refused.append((one, str(error)))
        if len(refused) == len(objects):
            one, text = refused[0]
            text = " ".join(problems(one, unique=True)) or text
            raise ValidationError(f"{Truncator(visible(one)).chars(100)}: {text}")
        objects = [one for one, _text in refused]
