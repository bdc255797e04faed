"""What the history recorded: the fields in which a change's states differ, in words, and the object of a state."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import copy
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db import models
from django.utils.dateparse import parse_datetime
from django.utils.text import Truncator
from django.utils.translation import gettext as _

from ..changes.validators import primary_key, visible
from ..models import Endpoint, ListMember, Plan, PlanAssignment, PolicyChange, RatePolicy, SubjectList
from .texts import isolated, moment

#: The models whose objects are recorded, by ``PolicyChange.model``; those that others refer to come first.
KINDS: dict[str, Any] = {
    str(model._meta.model_name): model
    for model in (Plan, Endpoint, SubjectList, PlanAssignment, ListMember, RatePolicy)
}
State = Mapping[str, Any]
#: Name of a foreign key -> key -> the object that it refers to.
Related = dict[str, dict[Any, models.Model]]
#: Characters of a value in a sentence, and newest changes of an object that are searched for those of its fields.
_CHARACTERS, _MOST_CHANGES = 100, 100
#: The user with whose key an object's text begins: of a policy, an assignment, a list member, counters.
_USER = re.compile(r"user:(.+?)(?= × |: | \(|$)")


def differences(change: PolicyChange) -> list[tuple[str, Any, Any, Any]]:
    """Return the fields that the change changed, or every counter of a reset or grant.

    Each has its name, the field or None if the model no longer has it, and its values before and after.
    """
    before, after = change.before or {}, change.after or {}
    fields = KINDS[change.model]._meta.concrete_fields if change.model in KINDS else ()
    known = {field.name: field for field in fields}
    counted = change.model == "counter"
    found = []
    # In the model's order, because PostgreSQL keeps no order of JSON keys.
    for name in dict.fromkeys([*known, *before, *after]):
        field = known.get(name)
        states = [state.get(name) for state in (before, after)]
        changed = (states[0] or "") != (states[1] or "") and not (field and field.primary_key)
        if changed or counted:
            found.append((name, field, states[0], states[1]))
    return found


class Words:
    """The changes in words, with today's names of related objects, looked up in one query per model."""

    def __init__(self, changes: Iterable[PolicyChange]) -> None:
        # By identity, because they may be unsaved.
        self._rows = {id(change): differences(change) for change in changes}
        wanted: dict[Any, set[Any]] = {}
        for _name, field, *values in (row for rows in self._rows.values() for row in rows):
            if field is not None and field.is_relation:
                wanted.setdefault(field.related_model, set()).update(one for one in values if one not in (None, ""))
        self._names = {model: object_names(model, keys) for model, keys in wanted.items()}

    def table(self, change: PolicyChange) -> list[tuple[Any, str, str]]:
        """Return the label of each field that differs, and its values before and after; "" for a missing value."""
        return [
            (field.verbose_name if field else name, self._text(field, before), self._text(field, after))
            for name, field, before, after in self._rows[id(change)]
        ]

    def _text(self, field: Any, value: Any) -> str:
        if field is not None and field.is_relation and value not in (None, ""):
            value, field = self._names[field.related_model].get(str(value)) or deleted(value), None
        return visible(_in_words(field, value))


def _in_words(field: Any, value: Any) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, dict) and value.keys() >= {"used", "remaining"}:
        return _("%(used)s used, %(remaining)s left") % value
    if isinstance(field, models.DateTimeField):
        return moment(parse_datetime(value)) or str(value)
    if isinstance(value, bool):
        return _("yes") if value else _("no")
    # Without a field it is one of an earlier version.
    return str(dict(field.flatchoices).get(value, value) if field else value)


def who_changed(change: PolicyChange, since: int = 0) -> list[str]:
    """Return in sentences who changed the fields of an unsaved change, from one state to another, last and when.

    ``since`` is the primary key of the change that left the first state; 0 = unknown.
    """
    rows = PolicyChange.objects.filter(model=change.model, object_id=change.object_id, pk__gt=since)
    last: dict[str, PolicyChange] = {}
    for row in rows.select_related("actor")[:_MOST_CHANGES]:
        last = {name: row for name, *_states in differences(row)} | last
    found = []
    for (name, *_states), (label, *values) in zip(differences(change), Words([change]).table(change), strict=True):
        before, after = (isolated(Truncator(value or _("empty")).chars(_CHARACTERS)) for value in values)
        words = {"field": label, "before": before, "after": after}
        text = _("%(field)s was changed from %(before)s to %(after)s.")
        if name in last:  # else it was changed by SQL, or by a bulk write that records no rows
            text = _("%(actor)s changed %(field)s from %(before)s to %(after)s at %(at)s.")
            actor = visible(last[name].actor or _("Code or a command"))
            words |= {"actor": actor, "at": moment(last[name].at)}
        found.append(text % words)
    return found


def name_users(rows: Iterable[Any]) -> None:
    """Put today's names of users into the ``object_text`` of these rows, which are not to be saved; in one query."""
    found = [(row, match) for row in rows if (match := _USER.match(row.object_text))]
    names = object_names(get_user_model(), {match[1] for _row, match in found})
    for row, match in found:
        if match[1] in names:
            row.object_text = _("user %s") % visible(names[match[1]]) + row.object_text[match.end() :]


def object_name(model: type[models.Model], pk: Any) -> str:
    """The object's name and id; the id alone where the model cannot have it."""
    if primary_key(model, pk) is None:
        return str(pk)
    name = object_names(model, [pk]).get(str(pk))
    return deleted(pk) if name is None else _("%(object)s (id %(pk)s)") % {"object": name, "pk": pk}


def deleted(pk: Any) -> str:
    """Return the text in place of a deleted object's name."""
    return _("deleted (id %(pk)s)") % {"pk": pk}


def policies_by_id(
    ids: Iterable[int | None], among: models.QuerySet[RatePolicy] | None = None
) -> dict[int, RatePolicy]:
    """Return the policies with these ids that still exist, with the objects that their texts name, in one query.

    With ``among`` only those of them.
    """
    found = RatePolicy.objects.all() if among is None else among
    return found.select_related("user", "subject_list", "plan", "endpoint").in_bulk({pk for pk in ids if pk})


def object_names(model: type[models.Model], ids: Iterable[Any], name: Callable[[Any], str] = str) -> dict[str, str]:
    """Return id as text -> name of the model's objects, in one query; ``name`` makes the name from the object.

    Deleted objects, and ids that the model cannot have (a project may have changed its user model), are left out.
    """
    keys = {key for key in (primary_key(model, pk) for pk in ids) if key is not None}
    return {str(row.pk): name(row) for row in model._base_manager.filter(pk__in=keys)} if keys else {}


def relations(model: type[models.Model]) -> list[Any]:
    """Return the model's foreign keys."""
    return [field for field in model._meta.concrete_fields if field.is_relation]


def related_objects(
    model: type[models.Model], states: Iterable[State], created: Mapping[Any, Mapping[Any, models.Model]]
) -> Related:
    """Return the objects that these states refer to, with one query per foreign key; unreadable keys are left out.

    ``created`` has the objects that will be created before, by model and primary key.
    """
    found: Related = {}
    for relation in relations(model):
        name = relation.target_field.attname
        keys = set()
        for state in states:
            with suppress(ValidationError):  # the object of that state names it
                keys.add(read_value(relation, state.get(relation.name)))
        rows = relation.related_model._base_manager.filter(**{f"{name}__in": keys - {None}})
        stored = {getattr(row, name): row for row in rows}
        found[relation.name] = {**created.get(relation.related_model, {}), **stored}
    return found


def object_of(model: Any, pk: Any, state: State, now: models.Model | None, related: Related) -> models.Model:
    """Return the object with the values of the state, unsaved; fields that the state lacks are as ``now``.

    Raises ``ValidationError`` if the state cannot be read any more, or refers to an object that does not exist.
    """
    known: dict[str, Any] = {field.name: field for field in model._meta.concrete_fields}
    if removed := [name for name in state if name not in known]:
        text = _("This version has fields that no longer exist (%(names)s).")
        raise ValidationError(text % {"names": ", ".join(removed)})
    then: models.Model = model(pk=pk) if now is None else copy(now)
    for field in (known[name] for name in state if not known[name].primary_key):
        value = read_value(field, state[field.name])
        if not field.is_relation or value is None:
            setattr(then, field.attname, value)
        elif value in related[field.name] or field.remote_field.on_delete is models.SET_NULL:
            setattr(then, field.name, related[field.name].get(value))
        else:
            text = _("The %(kind)s with the id %(pk)s is deleted. Restore or create it first.")
            raise ValidationError(text % {"kind": field.related_model._meta.verbose_name, "pk": value})
    return then


def read_value(field: Any, value: Any) -> Any:
    """Convert a recorded value to the field's; raises ``ValidationError``."""
    reader = field.target_field if field.is_relation else field
    try:
        return None if value is None and field.null else reader.to_python(value)
    except ValidationError as error:
        text = _("%(field)s: %(value)r is no longer valid. %(errors)s")
        params = {"field": field.verbose_name, "value": str(value)[:100], "errors": " ".join(error.messages)}
        raise ValidationError(text % params) from error


def problems(then: models.Model, *, unique: bool) -> str:
    """Return why the object cannot be stored, in sentences; with ``unique``, also because others have its values."""
    fields: list[Any] = [*then._meta.concrete_fields]
    try:
        excluded = [] if unique else [field.name for field in fields if field.is_relation]
        then.full_clean(excluded, validate_unique=unique, validate_constraints=unique)
    except ValidationError as error:
        labels = {field.name: f"{field.verbose_name}: " for field in fields}
        found = (labels.get(name, "") + text for name, texts in error.message_dict.items() for text in texts)
        return " ".join(dict.fromkeys(found))
    return ""
