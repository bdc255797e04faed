"""The page that asks about temporary overrides, boosts and blocks, and adds them: until when, why, and for whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import time, timedelta
from typing import Any, ClassVar

from django import forms
from django.contrib import messages
from django.contrib.admin.widgets import AdminSplitDateTime, AdminTextInputWidget
from django.core.exceptions import ValidationError
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...changes.databases import saving
from ...models import RatePolicy
from ...operations import overrides as operations
from ..base import ChangeReasonForm
from ..names import audience_text
from ..pages import AdminPage
from ..permissions import check_subject
from ..widgets import name_date_parts

#: How long overrides last -> the text of the choice.
_LENGTHS = {
    "hour": (timedelta(hours=1), _("for 1 hour")),
    "hours": (timedelta(hours=2), _("for 2 hours")),
    "day": (timedelta(days=1), _("for 1 day")),
    "week": (timedelta(weeks=1), _("for 1 week")),
}
_NEVER = "never"


class EndField(forms.SplitDateTimeField):
    """A date and a time; without a time, the end of that day."""

    def compress(self, data_list: Any) -> Any:
        """Return the moment."""
        if data_list and not data_list[1]:
            data_list = [data_list[0], time(23, 59, 59)]
        return super().compress(data_list)


class OverrideForm(forms.Form):
    """Until when, and why; the pages add fields about whom and what. Once valid, ``ends_at`` may be None = never."""

    until = forms.ChoiceField(
        label=_("Until"),
        choices=[(name, text) for name, (_length, text) in _LENGTHS.items()],
        initial="hour",
        required=False,
        widget=forms.RadioSelect,
    )
    ends_at = EndField(
        label=_("Or until"),
        required=False,
        widget=AdminSplitDateTime,
        help_text=_("A date replaces the choice above. Without a time, the override ends with that day."),
    )
    reason = forms.CharField(
        label=_("Reason"),
        max_length=RatePolicy._meta.get_field("reason").max_length,
        widget=AdminTextInputWidget,
        help_text=RatePolicy._meta.get_field("reason").help_text,
    )

    def __init__(self, request: Any, fields: Mapping[str, forms.Field], *, endless: bool = False) -> None:
        """``endless`` offers an override that somebody has to end."""
        super().__init__(request.POST if request.method == "POST" else None)
        if endless:
            until: Any = self.fields["until"]
            until.choices = [*until.choices, (_NEVER, _("until somebody ends it"))]
        name_date_parts(self.fields["ends_at"])  # type: ignore[arg-type]
        self.fields = {**fields, **self.fields}

    def clean(self) -> None:
        """Work the end out: the date if one was entered, else the choice."""
        values = self.cleaned_data
        if not self.errors and not values["ends_at"]:
            if not (chosen := values["until"]):
                self.add_error("until", _("Choose a duration or enter a date."))
            elif chosen != _NEVER:
                values["ends_at"] = timezone.now().replace(microsecond=0) + _LENGTHS[chosen][0]


class OverridePage(AdminPage):
    """Asks with an ``OverrideForm``; adds the overrides once the operator has confirmed, and ends those in force."""

    css = ("django_ratequota/explain.css",)
    #: What it says of an override that it has ended, and of one that had ended already.
    ended: ClassVar[Any]
    gone: ClassVar[Any]

    def text(self, override: RatePolicy) -> str:
        """Return in a sentence that the override was added."""
        raise NotImplementedError

    def end(self, request: Any, own: Iterable[RatePolicy], users: Mapping[str, str]) -> None:
        """End the overrides, which are for one audience: there may be another one that was sent twice."""
        done = ""
        with saving(RatePolicy):
            for override in own:
                done = str(self.ended) % {"audience": audience_text(override, users)}
                operations.end(override)
                self.admin.log_change(request, override, done)
        self.admin.message_user(request, done or self.gone, messages.SUCCESS if done else messages.WARNING)

    def add(self, request: Any, form: OverrideForm, overrides: Mapping[str, RatePolicy]) -> bool:
        """Save the overrides, by the form's field that chose each, all or none; False = the form has errors now."""
        for field, override in overrides.items():
            override.ends_at, override.reason = form.cleaned_data["ends_at"], form.cleaned_data["reason"]
            _validate(override, form, field)
            try:
                check_subject(request.user, override.subject)
            except ValidationError as error:
                form.add_error(field, error)
        if form.errors:
            return False
        with saving(RatePolicy):
            texts = [self._add(request, override) for override in overrides.values()]
        for text in texts:
            self.admin.message_user(request, text, messages.SUCCESS)
        return True

    def _add(self, request: Any, override: RatePolicy) -> str:
        text = self.text(override)
        override.save()
        self.admin.log_addition(request, override, text)
        link = self.admin.page_url("change", override.pk)
        return format_html('{} <a href="{}">{}</a>', text, link, gettext("See the override."))


def in_force(name: str, override: RatePolicy, who: str, until: str) -> tuple[Any, ...]:
    """Return what the page shows of an override in force, whose button to end it sends ``name``."""
    return name, override, who, until, ChangeReasonForm(auto_id=f"id_{name}_%s")


def _validate(override: RatePolicy, form: OverrideForm, field: str) -> None:
    """Add the errors of the override to the form: those of the rates to ``field``, others once."""
    try:
        override.full_clean(exclude={one.name for one in RatePolicy._meta.fields} - {"rates", "ends_at"})
    except ValidationError as error:
        for name, errors in error.error_dict.items():
            place = field if name == "rates" else name
            if place not in form.errors:
                form.add_error(place if place in form.fields else None, errors)
