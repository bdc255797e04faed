"""Refunds units to counters that the operator has chosen on Explain or on Past quotas, or resets them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from secrets import token_hex
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.widgets import AdminIntegerFieldWidget
from django.core.exceptions import ValidationError
from django.http import Http404, HttpResponseRedirect
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..changes.validators import visible
from ..engine.rates import MAX_UNITS
from ..engine.types import Bucket
from ..exceptions import StoreError
from ..models import QuotaWindow, RatePolicy
from ..operations import counters
from ..operations.explain import Explanation
from ..policies.limit_names import limit_name
from .base import ReasonField
from .explain.form import CallerPage
from .formatting import when
from .names import caller_names, caller_text, limits_text
from .pages import AdminPage, is_id, reply, unanswered

_NOT_SHOWN = _("The counters cannot be shown or changed right now. Try again later.")


class CountersForm(forms.Form):
    """How much to refund, and the reason."""

    units = forms.IntegerField(
        label=_("Amount to refund"),
        help_text=_("Units, or requests if the rate is in requests. Empty = all, which resets the counters to zero."),
        required=False,
        min_value=1,
        max_value=MAX_UNITS,
        widget=AdminIntegerFieldWidget,
    )
    reason = ReasonField()
    #: So that a double click refunds once.
    key = forms.CharField(
        initial=lambda: token_hex(16), required=False, max_length=counters.MAX_KEY, widget=forms.HiddenInput
    )


class CorrectionPage(AdminPage):
    """Shows counters and asks; changes them once the operator has confirmed."""

    css = ("django_ratequota/explain.css",)

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may reset counters."""
        return bool(self.admin.has_reset_permission(request, obj))

    def own(self, request: Any, buckets: Iterable[Bucket]) -> list[Bucket]:
        """Return the buckets that may be changed; shows a message where there are none."""
        # Slots that are stuck are so for everybody.
        found = [
            one for one in buckets if one.rate.concurrent or not counters.is_shared(one.counted_per, one.subject)
        ]
        if not found:
            text = gettext("Select at least one of the customer's own counters.")
            self.admin.message_user(request, text, messages.ERROR)
        return found

    def confirm(self, request: Any, buckets: list[Bucket], back: str, row: QuotaWindow | None = None) -> Any:
        """Return the page that asks; None once the counters are changed, or with a message why they cannot be.

        ``row`` is the window that is corrected; None = the ones that run now.
        """
        form = CountersForm(request.POST if request.method == "POST" else None)
        if form.is_valid() and self._change(request, buckets, form, row.first_day if row else None):
            return None
        states: Any
        if row is None:
            states, store_error = reply(lambda: counters.peek(buckets))
        else:
            left = {"remaining": max(0, row.limit - row.used), "limit": row.limit}
            states, store_error = {buckets[0]: {"used": row.used, **left}}, ""
        names = caller_names(bucket.subject for bucket in buckets)
        context = {
            "title": _("Refund or reset"),
            "period": row and when(row),
            "rows": [
                (limits_text([limit_name(one)]), caller_text(one.subject, names), (states or {}).get(one))
                for one in buckets
            ],
            "store_error": store_error and unanswered(store_error, _NOT_SHOWN),
            "frees": any(bucket.rate.concurrent for bucket in buckets),
            "button": _("Refund"),
            "back": back,
        }
        return self.render(request, "confirm_counters.html", context, form)

    def _change(self, request: Any, buckets: list[Bucket], form: CountersForm, first_day: date | None) -> bool:
        """Change the counters, and record it; return False where the form has an error instead."""
        units, reason, key = (form.cleaned_data[name] for name in ("units", "reason", "key"))
        try:
            found = counters.give_back(buckets, units, reason, first_day=first_day, key=key)
        except ValidationError as error:
            form.add_error("units", error)
            return False
        except StoreError as error:
            then = gettext("Some counters may already have changed. Check them and try again.")
            self.admin.message_user(request, unanswered(error.reason, then), messages.ERROR)
            return True
        if any(one.repeated for one in found):
            text = gettext("The form was sent twice. The counters changed only once.")
            self.admin.message_user(request, text, messages.WARNING)
            return True
        text = ngettext("%(count)d counter was reset.", "%(count)d counters were reset.", len(found))
        if units is not None:
            text = ngettext(
                "Refunded %(units)d to %(count)d counter.",
                "Refunded %(units)d to each of %(count)d counters.",
                len(found),
            )
        text %= {"units": units, "count": len(found)}
        changed = {(one.subject, one.title) for one in found}
        policies = {
            one.policy_id or 0 for one in buckets if (visible(one.subject), counters.own_title(one)) in changed
        }
        for policy in RatePolicy.objects.filter(pk__in=policies):
            self.admin.log_change(request, policy, text)
        self.admin.message_user(request, text, messages.SUCCESS)
        return True


class CountersPage(CorrectionPage, CallerPage):
    """Corrects the counters that the operator has chosen on the Explain page."""

    name = "counters"

    def ask(self, request: Any, explanation: Explanation, back: str) -> Any:
        """Return the page that asks; None once the counters are changed, or with a message why they cannot be."""
        titles = request.GET.getlist("bucket")
        chosen = (one for one in explanation.resolution.buckets if counters.own_title(one) in titles)
        buckets = self.own(request, chosen)
        return self.confirm(request, buckets, back) if buckets else None


class WindowPage(CorrectionPage):
    """Corrects one window of Past quotas, also one that is over or whose policy is gone."""

    path, name = "quotas/history/<str:window>/refund/", "refund_window"

    def view(self, request: Any, window: str) -> Any:
        """Return the page; redirect to Past quotas once all is done."""
        row = QuotaWindow.objects.filter(pk=int(window)).first() if is_id(window) else None
        sees_all = self.admin.sees_all_policies(request)
        if row is None or not (sees_all or self.admin.get_queryset(request).filter(pk=row.policy_id or 0).exists()):
            raise Http404
        back = self.admin.page_url("quota_history", query={"subject": row.subject, "period": row.period})
        buckets = self.own(request, counters.recorded_buckets([row]))
        return (self.confirm(request, buckets, back, row) if buckets else None) or HttpResponseRedirect(back)
