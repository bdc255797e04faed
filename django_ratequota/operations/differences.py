"""The fields in which the two states of a recorded change differ, and today's names of what they refer to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from django.contrib.auth import get_user_model
from django.db import models
from django.utils.translation import gettext as _

from ..changes.validators import primary_key, visible
from ..models import PolicyChange
from .states import KINDS

#: (field name, the field or None if the model no longer has it, before, after)
Difference = tuple[str, Any, Any, Any]
#: The user with whose key an object's text begins: of a policy, an assignment, a list member, counters.
_USER = re.compile(r"user:(.+?)(?= × |: | \(|$)")


def differences(change: PolicyChange) -> list[Difference]:
    """Return the fields that the change changed, or every counter of a reset or grant."""
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


def label(name: str, field: Any) -> Any:
    """Return the field's verbose name."""
    return field.verbose_name if field else name


def related_names(rows: Iterable[Difference]) -> dict[Any, dict[str, str]]:
    """Return model -> id as text -> name of the related objects in the differences; one query per model."""
    wanted: dict[Any, set[Any]] = {}
    for _name, field, *values in rows:
        if field is not None and field.is_relation:
            wanted.setdefault(field.related_model, set()).update(value for value in values if value not in (None, ""))
    return {model: object_names(model, values) for model, values in wanted.items()}


def name_users(rows: Iterable[Any]) -> None:
    """Put today's names of users into the ``object_text`` of these rows, which are not to be saved; in one query."""
    found = [(row, match) for row in rows if (match := _USER.match(row.object_text))]
    names = object_names(get_user_model(), {match[1] for _row, match in found})
    for row, match in found:
        if match[1] in names:
            row.object_text = _("user %s") % visible(names[match[1]]) + row.object_text[match.end() :]


def object_names(model: type[models.Model], ids: Iterable[Any], name: Callable[[Any], str] = str) -> dict[str, str]:
    """Return id as text -> name of the model's objects, in one query; ``name`` makes the name from the object.

    Deleted objects, and ids that the model cannot have (a project may have changed its user model), are left out.
    """
    keys = {key for key in (primary_key(model, pk) for pk in ids) if key is not None}
    return {str(row.pk): name(row) for row in model._base_manager.filter(pk__in=keys)} if keys else {}
