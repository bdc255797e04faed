"""Gives units back to counters, or resets them: of a caller, from Explain, or of overrides, from their list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import quote
from django.contrib.admin.widgets import AdminIntegerFieldWidget
from django.core.exceptions import ValidationError
from django.http import HttpResponseRedirect
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..engine.rates import MAX_UNITS
from ..engine.types import Bucket, BucketStatus
from ..exceptions import StoreError
from ..models import RatePolicy
from ..operations import counters
from ..operations.explain import Explanation
from .base import ReasonField
from .explain.form import CallerPage
from .formatting import shown
from .names import audience_text, caller_names, described
from .pages import AdminPage, reply, unanswered
from .permissions import is_override

#: The page names each counter, and one call to Redis reads them all.
_MAX_COUNTERS = 200
#: More policies than this are counted, not listed, where the page says which have no counter of their own.
_SHOWN_WITHOUT = 20
_NOT_SHOWN = _("The counters cannot be shown, and changing them will probably fail. Try again later.")


class ReasonForm(forms.Form):
    """The reason of a change, for the history."""

    reason = ReasonField()


class CountersForm(ReasonForm):
    """The units to give back, and the reason. The button says what to do: ``grant`` or ``reset``."""

    units = forms.IntegerField(
        label=_("Units to give back"),
        required=False,
        min_value=1,
        max_value=MAX_UNITS,
        widget=AdminIntegerFieldWidget,
    )
    field_order = ["units", "reason"]

    def __init__(self, data: Any, counted: set[str]) -> None:
        """``counted`` is what the counters count: requests, units or both."""
        super().__init__(data)
        self.only_requests = counted == {"requests"}
        if self.only_requests:
            self.fields["units"].label = _("Requests to give back")
        elif "requests" in counted:
            self.fields["units"].label = _("Units (or requests, where these are counted) to give back")

    def clean_units(self) -> int | None:
        """Return the units; None to reset."""
        units: int | None = self.cleaned_data["units"]
        if "grant" in self.data and units is None:
            raise ValidationError(_("Enter how many to give back."))
        if "reset" in self.data and units is not None:
            raise ValidationError(_("Leave this empty to reset the counters."))
        return units

    def done(self, count: int) -> str:
        """Return in a sentence that so many counters were changed."""
        units = self.cleaned_data["units"]
        if units is None:
            return ngettext("%(count)d counter was reset.", "%(count)d counters were reset.", count) % {
                "count": count
            }
        text = ngettext(
            "%(units)d units were given back to %(count)d counter.",
            "%(units)d units were given back to %(count)d counters.",
            count,
        )
        if self.only_requests:
            text = ngettext(
                "%(units)d requests were given back to %(count)d counter.",
                "%(units)d requests were given back to %(count)d counters.",
                count,
            )
        return text % {"units": units, "count": count}


class CountersPage(AdminPage):
    """Shows counters live and asks; changes them once the operator has confirmed."""

    media = forms.Media(css={"all": ["django_ratequota/explain.css"]})

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may reset what was counted for the policy."""
        return bool(self.admin.has_reset_permission(request, obj))

    def confirm(
        self, request: Any, rows: Mapping[Bucket, tuple[str, str]], heads: tuple[Any, Any], context: dict[str, Any]
    ) -> Any:
        """Return the page that asks about the counters of ``rows``; None once they are changed, or Redis failed.

        ``rows`` has the texts of their first two columns, below ``heads``.
        """
        asked = {"grant", "reset"} & request.POST.keys()
        form = CountersForm(request.POST if asked else None, {bucket.rate.counts for bucket in rows})
        if rows and form.is_valid() and self._change(request, rows, form):
            return None
        statuses, store_error = reply(lambda: counters.peek(rows))
        context = {
            "title": _("Give back or reset"),
            "heads": heads,
            "rows": [(*texts, bucket.rate, (statuses or {}).get(bucket)) for bucket, texts in rows.items()],
            "store_error": store_error and unanswered(store_error, _NOT_SHOWN),
            "form": form,
            **context,
        }
        return self.render(request, "confirm_counters.html", context, form)

    def _change(self, request: Any, buckets: Iterable[Bucket], form: CountersForm) -> bool:
        """Change the counters, and record it; return False where the form has an error instead."""
        units, reason = form.cleaned_data["units"], form.cleaned_data["reason"]
        own: dict[int | None, list[Bucket]] = {}
        for bucket in buckets:
            own.setdefault(bucket.policy_id, []).append(bucket)
        policies = RatePolicy.objects.in_bulk(pk for pk in own if pk is not None)
        done = 0
        try:
            # All counters have used as many units, or none is given any. Resets before one that fails stay.
            for group in own.values() if units is None else [list(buckets)]:
                before = counters.reset(group, reason) if units is None else counters.grant(group, units, reason)
                self._log(request, policies, before, form)
                done += len(before)
        except ValidationError as error:
            form.add_error("units", error)
            return False
        except StoreError as error:
            then = gettext("Some counters may have been changed already. Check them, then try again.")
            self.admin.message_user(request, unanswered(error.reason, then), messages.ERROR)
        else:
            self.admin.message_user(request, form.done(done), messages.SUCCESS)
        return True

    def _log(
        self, request: Any, policies: Mapping[int, RatePolicy], before: tuple[BucketStatus, ...], form: CountersForm
    ) -> None:
        """Write an entry into the history of each policy, with how its counters stood before."""
        for pk, policy in policies.items():
            own = [status for status in before if status.bucket.policy_id == pk]
            stood = "; ".join(
                f"{shown(s.bucket.title)}, {shown(s.bucket.subject)} ({s.used} / {s.limit})" for s in own
            )
            if own:
                self.admin.log_change(request, policy, f"{form.done(len(own))} {stood}")


class CallerCountersPage(CallerPage, CountersPage):
    """Changes the counters that the operator has chosen on the Explain page, and returns there."""

    path = "counters/"
    name = "counters"

    def ask(self, request: Any, explanation: Explanation, back: str) -> Any:
        """Return the page that asks; None once the counters are changed, or with a message why they cannot be."""
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
        names = caller_names(bucket.subject for bucket in buckets)
        rows = {bucket: (shown(bucket.title), described(bucket.subject, names)) for bucket in buckets}
        return self.confirm(request, rows, (_("Counter"), _("Who")), {"back": back})


class ResetPage(CountersPage):
    """Changes the counters of one override; the action of the list uses it for many."""

    path = "<path:object_id>/reset/"
    name = "reset"

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the link of an override that the operator may reset."""
        offered = is_override(obj) and self.has_permission(request, obj)
        return [(self.url(obj), _("Reset usage"))] if offered else []

    def view(self, request: Any, policy: RatePolicy) -> Any:
        """GET asks, POST changes."""
        back = self.admin.page_url("change", quote(policy.pk))
        return self.ask(request, [policy], back) or HttpResponseRedirect(back)

    def ask(self, request: Any, policies: Any, back: str, action: str = "") -> Any:
        """Return the page that asks; None once the counters are changed, or with a message why they cannot be.

        ``action`` is the name of the list's action that the page repeats when the operator confirms.
        """
        owners, without = counters.own_counters(policies)
        if len(owners) > _MAX_COUNTERS:
            text = _(
                "The selected overrides have %(count)d counters, and at most %(most)d can be "
                "reset at once. Select fewer."
            )
            words = {"count": len(owners), "most": _MAX_COUNTERS}
            self.admin.message_user(request, text % words, messages.ERROR)
            return None
        names = caller_names(policy.subject for policy in owners.values())
        rows = {
            bucket: (audience_text(policy, names), shown(bucket.scope) if bucket.scope else gettext("all endpoints"))
            for bucket, policy in owners.items()
        }
        context = {
            "without": [(shown(policy), why) for policy, why in list(without.items())[:_SHOWN_WITHOUT]],
            "without_more": max(0, len(without) - _SHOWN_WITHOUT),
            "back": back,
            "action": action,
            "checkbox": ACTION_CHECKBOX_NAME,
            "policies": list(dict.fromkeys(owners.values())),
        }
        return self.confirm(request, rows, (_("Who"), _("Endpoint")), context)
