"""The form of a rate policy, and of a row where several are edited at once."""

from __future__ import annotations

from typing import Any

from django import forms
from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.utils.functional import cached_property
from django.utils.translation import gettext_lazy as _

from ..changes.validators import check_rates
from ..conf import COUNTED_PER, settings
from ..models import RatePolicy
from .fresh_fields import FreshForm
from .permissions import check_audience, lacking
from .widgets import RowAutocomplete


class PolicyForm(FreshForm):
    """The form of a policy, with all of its fields or some."""

    #: The user who edits; None in the tables of plans and endpoints, which hold no overrides.
    operator: Any = None

    class Meta:
        model = RatePolicy
        fields = "__all__"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "counted_per" in self.fields:
            self.fields["counted_per"] = self._counted_per_field()
        for name, field in self.fields.items():
            if isinstance(field.widget, RowAutocomplete):
                field.widget.selected = getattr(self.instance, name)
        if "rates" in self.fields:
            self.fields["rates"].widget.attrs.update({"spellcheck": "false", "class": "vTextField ratequota-rates"})
        for name in {"rates", "subject"} & self.fields.keys():
            self.fields[name].widget.attrs["dir"] = "ltr"
        if self.operator and self.instance.pk and lacking(self.operator, "change", self.instance):
            # A row of the list that this operator may not edit is shown as text, as Django 6.1 does by itself.
            self.fields.clear()

    def clean(self) -> Any:
        """Refuse an audience that the operator may not give the policy, and stored rates that cannot be read."""
        values = super().clean()
        if "rates" not in self.fields and self.has_changed():
            check_rates(self.instance.rates, self.instance.algorithm)
        if self.operator and {"user", "subject"} <= self.cleaned_data.keys():
            override = bool(self.cleaned_data["user"] or self.cleaned_data["subject"])
            check_audience(self.operator, "change" if self.instance.pk else "add", override=override)
        return values

    def _counted_per_field(self) -> forms.ChoiceField:
        plain = self.fields["counted_per"]
        names = [*COUNTED_PER, *settings.identifiers]
        # An identifier that left the settings still shows, and is refused with a sentence when saved.
        if self.instance.counted_per not in names:
            names.append(self.instance.counted_per)
        return forms.ChoiceField(
            choices=[(name, name) for name in names], label=plain.label, help_text=plain.help_text, initial="caller"
        )

    def add_error(self, field: str | None, error: Any) -> None:
        """Add the error; above the form where it belongs to a field that the form leaves out.

        Django raises ``ValueError`` for such a field.
        """
        if field is None and hasattr(error, "error_dict"):
            by_field: dict[str, list[ValidationError]] = {}
            for name, errors in error.error_dict.items():
                by_field.setdefault(name if name in self.fields else NON_FIELD_ERRORS, []).extend(errors)
            error = ValidationError(by_field)
        super().add_error(field, error)


class RowForm(PolicyForm):
    """A policy's form as a row of a table. Its fields get labels, because screen readers do not read column heads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            field.widget.attrs.setdefault("aria-label", field.label)


class ListedForm(RowForm):
    """A row of the list, where only the mode is edited."""

    def full_clean(self) -> None:
        """Validate the constraints, too: Django skips those with columns that the row leaves out."""
        super().full_clean()
        if self.is_bound and self.has_changed() and not self.errors:
            try:
                self.instance.validate_constraints()
            except ValidationError as error:
                self.add_error(None, error)


class StoredRows(forms.BaseModelFormSet):  # type: ignore[type-arg]
    """Rows of policies. Those that were deleted while the page was open are left out, edited ones refused once."""

    @cached_property
    def forms(self) -> list[Any]:
        """The rows. Deleted ones come after those that are stored, because pages show a row for each stored one."""
        made: list[Any] = super().forms
        initial = self.initial_form_count()
        return [*sorted(made[:initial], key=lambda form: form.instance.pk is None), *made[initial:]]

    def _construct_form(self, i: int, **kwargs: Any) -> Any:
        form: Any = super()._construct_form(i, **kwargs)  # type: ignore[misc]
        if self.is_bound and i < self.initial_form_count() and form.instance.pk is None and form.is_untouched():
            form.changed_data, form.empty_permitted = [], True  # as a new row that was not filled in
        return form

    def clean(self) -> None:
        """Report an edited row in words: Django's error belongs to a hidden field, and is not shown."""
        super().clean()
        if any(form.instance.pk is None and form.has_changed() for form in self.initial_forms):
            raise ValidationError(
                _("A row that you changed was deleted in the meantime. Save again to leave it out.")
            )
