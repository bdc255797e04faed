"""The page that asks about temporary overrides, boosts and blocks, and adds them: until when, why, and for whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import time, timedelta
from typing import Any, ClassVar

from django import forms
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...changes.databases import saving
from ...models import RatePolicy
from ..pages import AdminPage

_LAST_SECOND = time(23, 59, 59)


class EndField(forms.SplitDateTimeField):
    """A date and a time; without a time, the end of that day."""

    def compress(self, data_list: Any) -> Any:
        """Return the moment."""
        if data_list and data_list[0] and not data_list[1]:
            data_list = [data_list[0], _LAST_SECOND]
        return super().compress(data_list)


class OverrideForm(forms.Form):
    """Until when, and why; a subclass adds the fields about whom. Once valid, ``overrides`` are to be added."""

    #: How long overrides may last (None = forever), with the text of each choice.
    lengths: ClassVar[dict[str, tuple[timedelta | None, Any]]] = {
        "hour": (timedelta(hours=1), _("for 1 hour")),
        "hours": (timedelta(hours=2), _("for 2 hours")),
        "day": (timedelta(days=1), _("for 1 day")),
        "week": (timedelta(weeks=1), _("for 1 week")),
    }

    def __init__(self, request: Any, model_admin: Any, fields: Mapping[str, forms.Field]) -> None:
        super().__init__(request.POST if request.method == "POST" else None)
        self.overrides: dict[str, RatePolicy] = {}  # by the field that chose it
        choices = [(name, text) for name, (_length, text) in self.lengths.items()]
        end = {
            "form_class": EndField,
            "label": _("Or until"),
            "help_text": _("A date replaces the choice above. Without a time, the override ends with that day."),
        }
        own = {
            name: model_admin.formfield_for_dbfield(RatePolicy._meta.get_field(name), request=request, **options)
            for name, options in (("ends_at", end), ("reason", {"required": True, "label": _("Reason")}))
        }
        until = forms.ChoiceField(
            label=_("Until"), choices=choices, initial=choices[0][0], required=False, widget=forms.RadioSelect
        )
        self.fields = {**fields, "until": until, **own}

    def chosen(self, values: dict[str, Any]) -> Iterable[tuple[str, RatePolicy]]:
        """Yield the field and the override, not saved and without an end, of each that the operator has chosen."""
        raise NotImplementedError

    def text(self, field: str, override: RatePolicy) -> str:
        """Return in a sentence that the override of this field was added."""
        raise NotImplementedError

    def rows(self) -> Iterable[dict[str, Any]]:
        """Return what each override would change, and its own field, as rows of a table."""
        return ()

    def asked(self) -> Iterable[forms.BoundField]:
        """Return the fields below the table."""
        return self

    def ends_at(self) -> Any:
        """Return the end that is chosen: the date if one was entered, else the choice; None = never."""
        data = self.cleaned_data if self.is_bound else {}
        length = self.lengths[data.get("until") or next(iter(self.lengths))][0]
        return data.get("ends_at") or (length and timezone.now().replace(microsecond=0) + length)

    def clean(self) -> Any:
        """Work the end out, and validate what would be added."""
        values: dict[str, Any] = super().clean() or self.cleaned_data
        if not self.errors and not values["ends_at"] and not values["until"]:
            self.add_error("until", _("Choose until when, or enter a date."))
        if not self.errors:
            self.overrides = dict(self.chosen(values))
        for field, override in self.overrides.items():
            override.ends_at, override.reason = self.ends_at(), values["reason"]
            self._validate(field, override)
        return values

    def _validate(self, field: str, override: RatePolicy) -> None:
        """Add the errors of the override to the form: those of the rates to ``field``, each other one once."""
        try:
            asked = {"rates", "ends_at", "reason"}
            override.full_clean(exclude={one.name for one in RatePolicy._meta.fields} - asked)
        except ValidationError as error:
            for name, errors in error.error_dict.items():
                place = field if name == "rates" else name if name in self.fields else None
                if place not in self.errors:
                    self.add_error(place, errors)


class OverridePage(AdminPage):
    """Shows a form, and what the overrides would change; adds them once the operator has confirmed."""

    media = forms.Media(css={"all": ["django_ratequota/explain.css"]})

    def confirm(self, request: Any, form: OverrideForm, context: dict[str, Any]) -> Any:
        """Return the page that asks; None once the overrides are added, all or none."""
        if form.is_valid() and "post" in request.POST:
            with saving(RatePolicy):
                chosen = form.overrides.items()
                texts = [self._add(request, override, form.text(field, override)) for field, override in chosen]
            for text in texts:
                self.admin.message_user(request, text, messages.SUCCESS)
            return None
        return self.render(request, "override.html", {**context, "form": form, "rows": list(form.rows())}, form)

    def _add(self, request: Any, override: RatePolicy, text: str) -> str:
        override.save()
        self.admin.log_addition(request, override, text)
        link = self.admin.page_url("change", override.pk)
        return format_html('{} <a href="{}">{}</a>', text, link, gettext("See the override."))
