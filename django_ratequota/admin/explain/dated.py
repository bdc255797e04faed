"""The form of a temporary override: how long it lasts, and why. Boosts and blocks add their own fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from django import forms
from django.forms.models import modelform_factory
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ...models import RatePolicy
from ..formatting import clock, shown

#: Value of a choice -> (how long that is, its text).
LENGTHS = {
    "hour": (timedelta(hours=1), _("for 1 hour")),
    "hours": (timedelta(hours=2), _("for 2 hours")),
    "day": (timedelta(days=1), _("for 1 day")),
    "week": (timedelta(weeks=1), _("for 1 week")),
}


def dated_form(
    model_admin: Any,
    request: Any,
    fields: Mapping[str, forms.Field | None],
    lengths: Iterable[str],
    *,
    windows: Mapping[str, Any] | None = None,
    open_ended: bool = False,
) -> Any:
    """Return the form class of an override: ``fields`` (None = the model's own), the choice of an end, and a reason.

    ``windows`` maps a choice's value (``window:`` and the counter's title) to the time when that window ends.
    """
    windows = windows or {}
    now = timezone.now()
    ends: dict[str, Any] = {name: now + LENGTHS[name][0] for name in lengths} | dict(windows)
    choices: dict[str, Any] = {name: LENGTHS[name][1] for name in lengths}
    for name, end in windows.items():
        words = {"counter": shown(name.partition(":")[2]), "end": clock(end.timestamp())}
        choices[name] = _("until the window of %(counter)s ends, at %(end)s") % words
    choices["date"] = _("until the date below")
    if open_ended:
        choices["never"] = _("until somebody ends it")
        ends["never"] = None

    class DatedForm(model_admin.form):  # type: ignore[misc]
        until = forms.ChoiceField(
            label=_("Until"), choices=list(choices.items()), initial=next(iter(choices)), widget=forms.RadioSelect
        )
        field_order = [*fields, "until", "ends_at", "reason"]

        def clean(self) -> Any:
            """Set ``ends_at`` by the choice; the policy's own ``clean`` validates it."""
            values = super().clean() or self.cleaned_data
            until = values.get("until")
            if until in ends:
                values["ends_at"] = ends[until] and ends[until].replace(microsecond=0)
            elif until == "date" and not values.get("ends_at") and "ends_at" not in self.errors:
                self.add_error("ends_at", _("Enter an end date, or choose one of the times above."))
            return values

    own = [name for name, field in fields.items() if field is None]
    formfield = partial(model_admin.formfield_for_dbfield, request=request)
    form = modelform_factory(
        RatePolicy, form=DatedForm, fields=[*own, "ends_at", "reason"], formfield_callback=formfield
    )
    form.base_fields |= {name: field for name, field in fields.items() if field is not None}
    form.base_fields["reason"].required = True
    form.base_fields["ends_at"].label = _("Date")
    form.base_fields["ends_at"].help_text = ""
    for part, label in zip(form.base_fields["ends_at"].widget.widgets, (_("Date"), _("Time")), strict=True):
        part.attrs["aria-label"] = label
    return form
