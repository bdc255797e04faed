"""Gives units back to the counters that the operator has chosen on the Explain page, or resets them."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.widgets import AdminIntegerFieldWidget
from django.core.exceptions import ValidationError
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..engine.rates import MAX_UNITS
from ..engine.types import Bucket
from ..exceptions import StoreError
from ..models import RatePolicy
from ..operations import counters
from ..operations.explain import Explanation
from ..policies.limit_names import limit_name
from .base import ReasonField
from .explain.form import CallerPage
from .names import caller_names, caller_text, limits_text
from .pages import reply, unanswered

_NOT_SHOWN = _("The counters cannot be shown or changed right now. Try again later.")


class CountersForm(forms.Form):
    """How much to give back, and the reason."""

    units = forms.IntegerField(
        label=_("Amount to refund"),
        help_text=_("Units, or requests if the rate is in requests. Empty = all, which resets the counters to zero."),
        required=False,
        min_value=1,
        max_value=MAX_UNITS,
        widget=AdminIntegerFieldWidget,
    )
    reason = ReasonField()


class CountersPage(CallerPage):
    """Shows the chosen counters live and asks; changes them once the operator has confirmed."""

    name = "counters"
    css = ("django_ratequota/explain.css",)

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may reset counters."""
        return bool(self.admin.has_reset_permission(request, obj))

    def ask(self, request: Any, explanation: Explanation, back: str) -> Any:
        """Return the page that asks; None once the counters are changed, or with a message why they cannot be."""
        titles = request.GET.getlist("bucket")
        buckets = [
            bucket
            for bucket in explanation.resolution.buckets
            if counters.own_title(bucket) in titles
            # Slots that are stuck are so for everybody.
            and (bucket.rate.concurrent or not counters.is_shared(bucket.counted_per, bucket.subject))
        ]
        if not buckets:
            text = gettext("Select at least one of the customer's own counters.")
            self.admin.message_user(request, text, messages.ERROR)
            return None
        form = CountersForm(request.POST if request.method == "POST" else None)
        if form.is_valid() and self._change(request, buckets, form):
            return None
        statuses, store_error = reply(lambda: counters.peek(buckets))
        names = caller_names(bucket.subject for bucket in buckets)
        context = {
            "title": _("Refund or reset"),
            "rows": [
                (limits_text([limit_name(one)]), caller_text(one.subject, names), (statuses or {}).get(one))
                for one in buckets
            ],
            "store_error": store_error and unanswered(store_error, _NOT_SHOWN),
            "frees": any(bucket.rate.concurrent for bucket in buckets),
            "button": _("Refund"),
            "back": back,
        }
        return self.render(request, "confirm_counters.html", context, form)

    def _change(self, request: Any, buckets: list[Bucket], form: CountersForm) -> bool:
        """Change the counters, and record it; return False where the form has an error instead."""
        units, reason = form.cleaned_data["units"], form.cleaned_data["reason"]
        try:
            before = counters.give_back(buckets, units, reason)
        except ValidationError as error:
            form.add_error("units", error)
            return False
        except StoreError as error:
            then = gettext("Some counters may already have changed. Check them and try again.")
            self.admin.message_user(request, unanswered(error.reason, then), messages.ERROR)
            return True
        text = ngettext("%(count)d counter was reset.", "%(count)d counters were reset.", len(before))
        if units is not None:
            text = ngettext(
                "Refunded %(units)d to %(count)d counter.",
                "Refunded %(units)d to each of %(count)d counters.",
                len(before),
            )
        text %= {"units": units, "count": len(before)}
        for policy in RatePolicy.objects.filter(pk__in=[one.bucket.policy_id or 0 for one in before]):
            self.admin.log_change(request, policy, text)
        self.admin.message_user(request, text, messages.SUCCESS)
        return True
