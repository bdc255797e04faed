"""Take changes back: a plan of what happens to each object, which is shown first and then applied.

A plan is about rows of the history: those of a save that is undone, or those of one object since a version that is
restored. Each object gets the values back that it had before the first of its rows. Only fields that the rows changed
are set. What was changed again since then stays. Resets and units given back are not taken back, because the counters
have moved on.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal
from uuid import UUID

from django.core.exceptions import ValidationError
from django.db import IntegrityError, models, transaction
from django.db.models import QuerySet
from django.db.models.deletion import get_candidate_relations_to_delete
from django.utils.text import Truncator
from django.utils.translation import gettext as _

from ..changes.databases import policy_alias
from ..changes.validators import visible
from ..changes.writer import changed_by, field_values, in_batches, rows_by_pk
from ..models import PolicyChange, RatePolicy
from .recorded import KINDS, Related, State, name_users, object_of, problems, read_value, related_objects, relations

#: (object now, object afterwards) -> the permission that is missing, as a sentence; "" = none. None = no object.
Forbidden = Callable[[models.Model | None, models.Model | None], str]


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """The step that reverts one object. ``now`` and ``then`` are its stored and future state; None = no object."""

    kind: str
    object_id: str
    #: The object in words, as in the history; once compared, with the name of its user.
    object_text: str
    #: Primary keys of the first and the last of its rows that are taken back.
    first: int
    last: int
    now: models.Model | None = None
    then: models.Model | None = None
    #: The kind of step; "" = the object stays as it is.
    verb: Literal["create", "change", "delete", ""] = ""
    #: Fields that get other values.
    fields: tuple[str, ...] = ()
    #: The changes since then, as an unsaved change of the fields that the rows changed. None = no changes.
    later: PolicyChange | None = None
    #: Why the object stays as it is, in sentences; "" = nothing is in the way.
    obstacle: str = ""

    def leave(self, obstacle: str) -> None:
        """Leave the object as it is."""
        self.verb, self.then, self.obstacle = "", None, visible(obstacle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Revert:
    """The plan of a revert, before it is applied."""

    #: One per object, in the order of the rows.
    steps: list[Step]
    #: A hash of the objects' states, to refuse overwriting another state than the operator saw.
    seen: str

    @property
    def done(self) -> list[Step]:
        """The steps that do something."""
        return [step for step in self.steps if step.verb]

    @property
    def left(self) -> list[Step]:
        """The steps that leave something as it is now."""
        return [step for step in self.steps if step.obstacle or step.later]


def of_save(change_id: UUID) -> QuerySet[PolicyChange]:
    """Return the rows to take back in order to undo the save."""
    return PolicyChange.objects.filter(change_id=change_id, model__in=KINDS)


def of_object(change: PolicyChange) -> QuerySet[PolicyChange]:
    """Return the rows to take back in order to restore the object as it was before the change."""
    return PolicyChange.objects.filter(model=change.model, object_id=change.object_id, pk__gte=change.pk)


def plan(rows: QuerySet[PolicyChange], *, lock: bool = False, forbidden: Forbidden = lambda now, then: "") -> Revert:
    """Compare the objects with their state before the rows; ``lock`` locks them until the transaction ends."""
    steps: dict[tuple[str, str], Step] = {}
    for pk, kind, object_id, text in rows.order_by("pk").values_list("pk", "model", "object_id", "object_text"):
        new = Step(kind=kind, object_id=object_id, object_text=text, first=pk, last=pk)
        step = steps.setdefault((kind, object_id), new)
        step.last, step.object_text = pk, text
    digest = hashlib.sha256()
    created: dict[Any, dict[Any, models.Model]] = {}
    for kind, model in KINDS.items():
        for batch in in_batches([step for step in steps.values() if step.kind == kind]):
            name_users(batch)
            keys = [read_value(model._meta.pk, step.object_id) for step in batch]
            stored = rows_by_pk(model, keys, policy_alias(model), lock)
            recorded = PolicyChange.objects.in_bulk([pk for step in batch for pk in (step.first, step.last)])
            # Before the rows, and after them.
            states = [(recorded[step.first].before or {}, recorded[step.last].after or {}) for step in batch]
            related = related_objects(model, [wanted for wanted, _left in states], created)
            for step, key, (wanted, left) in zip(batch, keys, states, strict=True):
                step.now = stored.get(key)
                now = {} if step.now is None else field_values(step.now)
                digest.update(json.dumps([kind, step.object_id, now], sort_keys=True).encode())
                try:
                    _compare(step, (now, wanted, left), related)
                except ValidationError as error:
                    step.leave(" ".join(error.messages))
                if step.verb and step.then is not None:
                    # Values that must be unique may be freed by the other objects.
                    step.obstacle = problems(step.then, unique=len(steps) == 1)
                if step.verb and (obstacle := step.obstacle or forbidden(step.now, step.then)):
                    step.leave(obstacle)
                elif step.verb == "create" and step.then is not None:
                    created.setdefault(model, {})[key] = step.then
    _keep_referred(steps.values())
    return Revert(steps=list(steps.values()), seen=digest.hexdigest()[:20])


def _compare(step: Step, states: tuple[State, State, State], related: Related) -> None:
    """Complete the step. ``states``: now, the one to return to, the one that the rows left; empty = no object.

    Raises ``ValidationError`` with what is in the way.
    """
    now, wanted, left = ({name: state.get(name, ...) for name in {*states[1], *states[2]}} for state in states)
    known = states[1] or states[2]  # a version may lack fields
    changed = [name for name in known if wanted[name] != left[name]]
    later = [name for name in changed if now[name] not in (wanted[name], left[name])]
    if later:
        was, is_now = ({name: state.get(name) for name in later} for state in (states[2], states[0]))
        step.later = PolicyChange(model=step.kind, object_id=step.object_id, before=was, after=is_now)
    if not states[1]:  # the rows created it, or created and deleted it
        step.verb = "delete" if states[0] and not later else ""
        return
    if states[2] and not states[0]:
        raise ValidationError(_("It was deleted since then. Restore it first."))
    state = {name: wanted[name] for name in changed if name not in later}
    model = KINDS[step.kind]
    key = read_value(model._meta.pk, step.object_id)
    step.then = object_of(model, key, state, step.now, related)
    then = field_values(step.then)
    step.fields = tuple(name for name in state if step.now is not None and then[name] != now[name])
    step.verb = "create" if step.now is None else "change" if step.fields else ""


def _keep_referred(steps: Iterable[Step]) -> None:
    """Leave objects as they are that others still refer to, because deleting them deletes the others."""
    ended = Counter(
        (relation, getattr(step.now, relation.attname))
        for step in steps
        if step.now is not None and step.verb in ("change", "delete")
        for relation in relations(type(step.now))
        if step.verb == "delete" or relation.name in step.fields
    )
    for kind, model in KINDS.items():
        for batch in in_batches([step for step in steps if (step.kind, step.verb) == (kind, "delete")]):
            by_key = {step.now.pk: step for step in batch if step.now is not None}
            for relation, key, count in _references(model, list(by_key)):
                if count > ended[relation, key]:
                    text = _("%(count)d of the %(kind)s refer to it now. Delete or move these first.")
                    kinds = relation.model._meta.verbose_name_plural
                    by_key[key].leave(text % {"count": count - ended[relation, key], "kind": kinds})


def _references(model: Any, keys: Sequence[Any]) -> Iterator[tuple[Any, Any, int]]:
    """Yield each foreign key to the model with each of these keys that rows have there, and the number of rows."""
    for reverse in get_candidate_relations_to_delete(model._meta):
        relation: Any = reverse.field  # type: ignore[attr-defined]
        rows = relation.model._base_manager.using(policy_alias(relation.model))
        name = f"{relation.name}__pk"
        found = rows.filter(**{f"{name}__in": keys}).order_by().values_list(name).annotate(models.Count("pk"))
        for key, count in found:
            yield relation, key, count


def apply(revert: Revert, *, actor: Any, reason: str, undoes: UUID | None = None) -> None:
    """Do the steps in one transaction, which is itself one save; ``undoes`` is the save that it undoes.

    ``revert`` was made with ``lock`` in the same transaction. Raises ``ValidationError``; then nothing has changed.
    """
    kinds, using = list(KINDS), policy_alias(RatePolicy)

    def order(step: Step) -> tuple[Any, ...]:
        deletes, number = step.verb == "delete", kinds.index(step.kind)
        return not deletes, -number if deletes else number, step.verb == "create", step.fields

    groups = (list(steps) for _order, steps in groupby(sorted(revert.done, key=order), key=order))
    todo: list[Sequence[Step]] = [batch for steps in groups for batch in in_batches(steps)]
    with changed_by(actor, reason, undoes=undoes), transaction.atomic(using=using):
        while todo:
            # One by one and once more, where others first have to give up their values, or to refer to another.
            refused: list[Sequence[Step]] = []
            for batch in todo:
                try:
                    with transaction.atomic(using=using):
                        _write(batch, using)
                except IntegrityError as error:
                    refused, text = [*refused, *([step] for step in batch)], str(error)
            if refused == todo:
                one = refused[0][0]
                text = (one.then and problems(one.then, unique=True)) or text
                raise ValidationError(f"{Truncator(visible(one.then or one.now)).chars(100)}: {text}")
            todo = refused


def _write(steps: Sequence[Step], using: str) -> None:
    """Do the same with these objects of one model; raises ``IntegrityError``."""
    verb, model = steps[0].verb, KINDS[steps[0].kind]
    rows = model._base_manager.using(using)
    if verb == "delete":
        keys = [step.now.pk for step in steps if step.now is not None]
        if any(_references(model, keys)):
            raise IntegrityError(_("Others refer to it now."))
        rows.filter(pk__in=keys).delete()
    elif verb == "create":
        rows.bulk_create([step.then for step in steps])
    else:
        rows.bulk_update([step.then for step in steps], steps[0].fields)
