"""The page that asks about temporary overrides, boosts and blocks, and adds them: until when, why, and for whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import time, timedelta
from typing import Any, ClassVar, NamedTuple

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

#: Value of a choice -> (how long that is, its text).
LENGTHS = {
    "hour": (timedelta(hours=1), _("for 1 hour")),
    "hours": (timedelta(hours=2), _("for 2 hours")),
    "day": (timedelta(days=1), _("for 1 day")),
    "week": (timedelta(weeks=1), _("for 1 week")),
}
_ASKED = ("rates", "ends_at", "reason")
_LAST_SECOND = time(23, 59, 59)


class Ending(NamedTuple):
    """A choice of when overrides end."""

    #: None = never.
    at: Any
    text: Any


class EndField(forms.SplitDateTimeField):
    """A date and a time; without a time, the end of that day."""

    def compress(self, data_list: Any) -> Any:
        """Return the moment."""
        if data_list and data_list[0] and not data_list[1]:
            data_list = [data_list[0], _LAST_SECOND]
        return super().compress(data_list)


class OverrideForm(forms.Form):
    """Until when, and why; a subclass adds the fields about whom. Once valid, ``overrides`` are to be added."""

    #: Of ``LENGTHS``, those to choose from.
    lengths: ClassVar[tuple[str, ...]]

    until = forms.ChoiceField(label=_("Until"), widget=forms.RadioSelect)

    def __init__(
        self,
        request: Any,
        model_admin: Any,
        *,
        fields: Mapping[str, forms.Field],
        endings: Mapping[str, Ending],
        until: str = "",
    ) -> None:
        """``endings`` are the choices besides ``lengths`` and a date; ``until`` is the one chosen at first."""
        super().__init__(request.POST if request.method == "POST" else None)
        now = timezone.now()
        self.overrides: dict[str, RatePolicy] = {}  # by the field that chose it
        self.endings = {name: Ending(now + LENGTHS[name][0], LENGTHS[name][1]) for name in self.lengths}
        self.endings |= endings
        choices = {name: ending.text for name, ending in self.endings.items()} | {"date": _("until the date below")}
        own = {
            name: model_admin.formfield_for_dbfield(RatePolicy._meta.get_field(name), request=request, **options)
            for name, options in (("ends_at", {"form_class": EndField}), ("reason", {"required": True}))
        }
        self.fields = {**fields, "until": self.fields["until"], **own}
        self.fields["until"].choices = list(choices.items())  # type: ignore[attr-defined]
        self.fields["until"].initial = until if until in choices else self.lengths[0]
        end: Any = self.fields["ends_at"]
        end.label, end.help_text = _("Date"), _("Without a time, the override ends with that day.")
        for part, label in zip(end.widget.widgets, (_("Date"), _("Time")), strict=True):
            part.attrs["aria-label"] = label

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

    def clean(self) -> Any:
        """Work the end out, and validate what would be added."""
        values: dict[str, Any] = super().clean() or self.cleaned_data
        until, date = values.get("until"), values.get("ends_at")
        if until == "date" and date is None and "ends_at" not in self.errors:
            self.add_error("ends_at", _("Enter an end date, or choose one of the times above."))
        elif until in self.endings and date is not None:
            self.add_error("ends_at", _("Choose “until the date below”, or leave the date empty."))
        elif until in self.endings:
            end = self.endings[until].at
            values["ends_at"] = end and end.replace(microsecond=0)
        if not self.errors:
            self.overrides = dict(self.chosen(values))
        for field, override in self.overrides.items():
            override.ends_at, override.reason = values["ends_at"], values["reason"]
            self._validate(field, override)
        return values

    def _validate(self, field: str, override: RatePolicy) -> None:
        """Add the errors of the override to the form: those of the rates to ``field``, each other one once."""
        try:
            override.full_clean(exclude={one.name for one in RatePolicy._meta.fields} - {*_ASKED})
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
                texts = [self._add(request, form, field) for field in form.overrides]
            for text in texts:
                self.admin.message_user(request, text, messages.SUCCESS)
            return None
        return self.render(request, "override.html", {**context, "form": form, "rows": list(form.rows())}, form)

    def _add(self, request: Any, form: OverrideForm, field: str) -> str:
        override = form.overrides[field]
        override.save()
        text = form.text(field, override)
        self.admin.log_addition(request, override, text)
        link = self.admin.page_url("change", override.pk)
        return format_html('{} <a href="{}">{}</a>', text, link, gettext("See the override."))
