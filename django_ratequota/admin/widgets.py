"""Fields and widgets that look related objects up."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib.admin.widgets import AutocompleteSelect
from django.utils.translation import gettext

from ..changes.validators import primary_key


class SafeAutocomplete(AutocompleteSelect):
    """An autocomplete that stays empty for a value that cannot be a key, where Django's raises an error."""

    @property
    def media(self) -> forms.Media:
        """Add the script that labels the drawn field for screen readers."""
        # Both are listed because ours must come after the script that it corrects.
        return super().media + forms.Media(js=["admin/js/autocomplete.js", "django_ratequota/autocomplete.js"])

    def optgroups(self, name: str, value: Any, attrs: Any = None) -> Any:
        """Return the options of the values that can be keys."""
        keys = [key for key in value if primary_key(self.field.related_model, key) is not None]
        return super().optgroups(name, keys, attrs)


class RowAutocomplete(SafeAutocomplete):
    """An autocomplete for the rows of a table: it has its row's object, where Django's makes a query for each row."""

    #: The object of the row, set by its form; None = none.
    selected: Any = None

    def __init__(self, *args: Any, placeholder: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._placeholder = placeholder

    def build_attrs(self, base_attrs: Any, extra_attrs: Any = None) -> dict[str, Any]:
        """Show the placeholder in an empty field."""
        return {**super().build_attrs(base_attrs, extra_attrs), "data-placeholder": str(self._placeholder)}

    def optgroups(self, name: str, value: Any, attrs: Any = None) -> Any:
        """Return the selected option only: the others are fetched by the autocomplete."""
        if self.selected is None or [str(key) for key in value] != [str(self.selected.pk)]:
            return super().optgroups(name, value, attrs)
        empty = self.create_option(name, "", "", False, 0)
        return [(None, [empty, self.create_option(name, self.selected.pk, str(self.selected), True, 1)], 0)]


def name_date_parts(field: forms.SplitDateTimeField) -> None:
    """Name the two inputs of a date and time for screen readers: the field's label names neither."""
    for part, text in zip(field.widget.widgets, (gettext("Date"), gettext("Time")), strict=True):
        part.attrs["aria-label"] = f"{field.label}: {text}"


def complete_subjects(field: forms.Field, url: str, kind: str = "") -> None:
    """Let a text field offer known subjects, with ``subjects.js`` from ``url``; with ``kind``, the values of these.

    Nothing is offered where ``url`` is "".
    """
    field.widget.attrs |= {"dir": "ltr", "spellcheck": "false", "autocomplete": "off"}
    if url:
        field.widget.attrs |= {"data-ratequota-subjects": url, "data-ratequota-kind": kind}
