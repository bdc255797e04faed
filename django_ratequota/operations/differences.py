"""The fields in which the two states of a recorded change differ."""

from __future__ import annotations

from typing import Any

from django.apps import apps

from ..models import PolicyChange

#: (field name, the field or None if the model no longer has it, before, after)
Difference = tuple[str, Any, Any, Any]


def fields_of(kind: str) -> dict[str, Any]:
    """Return the fields of the model by name; empty for ``*``."""
    try:
        model = apps.get_model("django_ratequota", kind)
    except (LookupError, ValueError):
        return {}
    return {field.name: field for field in model._meta.concrete_fields}


def differences(change: PolicyChange) -> list[Difference]:
    """Return the fields that the change changed, or every counter of a reset or grant."""
    before, after = change.before or {}, change.after or {}
    known = fields_of(change.model)
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
