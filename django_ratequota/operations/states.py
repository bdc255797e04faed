"""Objects as the history recorded them: the object of a recorded state, and why it cannot be stored now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import copy
from typing import Any

from django.core.exceptions import ValidationError
from django.db import models
from django.utils.translation import gettext as _

from ..models import Endpoint, ListMember, Plan, PlanAssignment, RatePolicy, SubjectList

#: The models whose objects are recorded, by ``PolicyChange.model``; those that others refer to come first.
KINDS: dict[str, Any] = {
    str(model._meta.model_name): model
    for model in (Plan, Endpoint, SubjectList, PlanAssignment, ListMember, RatePolicy)
}
State = Mapping[str, Any]
#: Name of a foreign key -> key -> the object that it refers to.
Related = dict[str, dict[Any, models.Model]]


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
