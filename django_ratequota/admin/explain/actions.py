"""Gives units back to counters of one caller, or resets them, from what the Explain page shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.widgets import AdminIntegerFieldWidget
from django.core.exceptions import ValidationError
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ...engine.rates import MAX_UNITS
from ...engine.types import Bucket, BucketStatus
from ...exceptions import StoreError
from ...models import RatePolicy
from ...operations import counters
from ...operations.explain import Explanation
from ..formatting import shown
from ..names import described_callers
from ..pages import unanswered
from ..reset import CountersPage, ReasonForm, counters_text, reset_message
from .form import CallerPage


class GrantForm(ReasonForm):
    """The units to give back, and the reason."""

    units = forms.IntegerField(
        label=_("Units to give back"), min_value=1, max_value=MAX_UNITS, widget=AdminIntegerFieldWidget
    )
    field_order = ["units", "reason"]


class CallerCountersPage(CallerPage, CountersPage):
    """Changes the counters that the operator has chosen on the Explain page, and returns there."""

    heads = (_("Counter"), _("Who"))

    def change(self, buckets: list[Bucket], data: dict[str, Any]) -> tuple[tuple[BucketStatus, ...], str]:
        """Change the counters; return how they stood before, and a message."""
        raise NotImplementedError

    def ask(self, request: Any, explanation: Explanation, back: str) -> Any:
        """Return the page that asks; change the counters once the operator has confirmed."""
        titles = request.GET.getlist("bucket")
        buckets = [
            bucket
            for bucket in explanation.resolution.buckets
            if bucket.title in titles and not counters.shared_reason(bucket.counted_per, bucket.subject)
        ]
        if not buckets:
            text = gettext("Select at least one of the caller's own counters.")
            self.admin.message_user(request, text, messages.ERROR)
            return None
        names = described_callers([bucket.subject for bucket in buckets])
        rows = {bucket: (shown(bucket.title), names[bucket.subject]) for bucket in buckets}
        return self.confirm(request, rows, lambda form: self._change(request, buckets, form), {"back": back})

    def _change(self, request: Any, buckets: list[Bucket], form: Any) -> None:
        try:
            before, text = self.change(buckets, form.cleaned_data)
        except ValidationError as error:
            form.add_error("units", error)
        except StoreError as error:
            then = gettext("Some counters may have been changed already. Check them, then try again.")
            self.admin.message_user(request, unanswered(error.reason, then), messages.ERROR)
        else:
            self._log(request, before, text)
            self.admin.message_user(request, text, messages.SUCCESS)

    def _log(self, request: Any, before: tuple[BucketStatus, ...], text: str) -> None:
        """Write an entry into the history of each policy whose counters were changed."""
        policies = RatePolicy.objects.in_bulk({status.bucket.policy_id for status in before})
        for pk, policy in policies.items():
            own = (status for status in before if status.bucket.policy_id == pk)
            self.admin.log_change(request, policy, f"{text} {counters_text(own)}")


class GrantPage(CallerCountersPage):
    """Gives units back."""

    path = "grant/"
    name = "grant"
    title = _("Give units back")
    lead = _(
        "What you enter below is given back to each of these counters. The limits and the counters of other callers "
        "stay unchanged."
    )
    yes = _("Yes, give them back")

    def form(self, buckets: Iterable[Bucket], data: Any) -> forms.Form:
        """Return the form, which names what these counters count."""
        form = GrantForm(data)
        counted = {bucket.rate.counts for bucket in buckets}
        if counted == {"requests"}:
            form.fields["units"].label = _("Requests to give back")
        elif "requests" in counted:
            form.fields["units"].label = _("Units (or requests, where these are counted) to give back")
        return form

    def change(self, buckets: list[Bucket], data: dict[str, Any]) -> tuple[tuple[BucketStatus, ...], str]:
        """Give the units to each counter. Raises ``ValidationError`` where one has used fewer."""
        before = counters.grant(buckets, data["units"], data["reason"])
        text = ngettext(
            "%(units)d units were given back to %(count)d counter.",
            "%(units)d units were given back to %(count)d counters.",
            len(before),
        )
        if {bucket.rate.counts for bucket in buckets} == {"requests"}:
            text = ngettext(
                "%(units)d requests were given back to %(count)d counter.",
                "%(units)d requests were given back to %(count)d counters.",
                len(before),
            )
        return before, text % {"units": data["units"], "count": len(before)}


class ResetCountersPage(CallerCountersPage):
    """Resets to zero."""

    path = "reset-counters/"
    name = "reset_counters"

    def change(self, buckets: list[Bucket], data: dict[str, Any]) -> tuple[tuple[BucketStatus, ...], str]:
        """Reset each counter."""
        before = counters.reset(buckets, data["reason"])
        return before, reset_message(len(before))
