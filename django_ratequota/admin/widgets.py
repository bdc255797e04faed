"""Fields and widgets that look related objects up."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib.admin.widgets import AutocompleteSelect, ForeignKeyRawIdWidget
from django.core.exceptions import ValidationError
from django.utils.translation import gettext


class SafeAutocomplete(AutocompleteSelect):
    """An autocomplete that stays empty for a value that cannot be a key, where Django's raises an error."""

    @property
    def media(self) -> forms.Media:
        """Add the script that labels the drawn field for screen readers."""
        # Both are listed because ours must come after the script that it corrects.
        return super().media + forms.Media(js=["admin/js/autocomplete.js", "django_ratequota/autocomplete.js"])

    def optgroups(self, name: str, value: Any, attrs: Any = None) -> Any:
        """Return the options of the values that can be keys."""
        return super().optgroups(name, [key for key in value if self._can_be_key(key)], attrs)

    def _can_be_key(self, value: Any) -> bool:
        key = self.field.target_field
        try:
            key.run_validators(key.to_python(value))
        except ValidationError:
            return False
        return True


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


class UserIdInput(ForeignKeyRawIdWidget):
    """A field for a user's id, with Django's links to the users only where the operator may view them."""

    def __init__(self, *args: Any, linked: bool) -> None:
        super().__init__(*args)
        self._linked = linked

    def get_context(self, name: str, value: Any, attrs: Any) -> dict[str, Any]:
        """Return the context of Django's template."""
        context = super().get_context(name, value, attrs)
        return context if self._linked else {**context, "related_url": None, "link_url": ""}


class UserField(forms.ModelChoiceField):  # type: ignore[type-arg]
    """A user's id. One that cannot be an id, such as 7 where ids are UUIDs, has the same error as an unknown one."""

    def to_python(self, value: Any) -> Any:
        """Return the user."""
        try:
            return super().to_python(value)
        except ValidationError as error:
            message = self.error_messages["invalid_choice"]
            raise ValidationError(message, code="invalid_choice", params={"value": value}) from error


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
