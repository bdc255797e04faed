"""Read-only fields for related objects: a link only where the operator may open the object, else its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin
from django.db.models import ForeignKey

from .formatting import shown
from .pages import may_view


def unlink_related(site: Any, request: Any, context: dict[str, Any]) -> None:
    """Replace the read-only fields of a change form, whose objects the operator may not view, by texts.

    Django links each related object that has an admin, for operators who may not view it as well: those get a 403.
    """
    form = context["adminform"]
    editable = set(form.form.fields) - set(form.readonly_fields)
    tables = [table for table in context["inline_admin_formsets"] if not table.has_change_permission]
    shown_forms = [(form, type(form.form.instance), editable)]
    shown_forms += [(table, table.formset.model, set()) for table in tables if not table.has_add_permission]
    for own, model, fields in shown_forms:
        texts = {
            field.name: _text(field, form.model_admin.get_empty_value_display())
            for field in model._meta.concrete_fields
            if isinstance(field, ForeignKey)
            and field.name not in fields
            and not may_view(site, field.remote_field.model, request)
        }
        own.fieldsets = [
            (title, {**options, "fields": _replaced(options["fields"], texts)}) for title, options in own.fieldsets
        ]
        own.readonly_fields = _replaced(own.readonly_fields, texts)


def _replaced(fields: Any, texts: dict[str, Callable[[Any], str]]) -> list[Any]:
    """Return the fields with the texts in place of names; a line of several fields is a list or tuple in it."""
    return [_replaced(one, texts) if isinstance(one, list | tuple) else texts.get(one, one) for one in fields]


def _text(field: Any, empty: Any) -> Callable[[Any], str]:
    """Return a read-only field with the name, label and help text of ``field``, and ``empty`` for None."""

    @admin.display(description=field.verbose_name)
    def text(obj: Any) -> Any:
        value = getattr(obj, field.name)
        return empty if value is None else shown(value)

    text.__name__ = field.name
    return text
