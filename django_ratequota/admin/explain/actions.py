"""Gives units back to counters of one caller, or resets them, from what the Explain page shows."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.widgets import AdminIntegerFieldWidget
from django.core.exceptions import ValidationError
from django.http import HttpResponseRedirect
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ...engine.rates import MAX_UNITS
from ...engine.types import Bucket, BucketStatus
from ...exceptions import StoreError
from ...models import RatePolicy
from ...operations import boosts, counters
from ..formatting import shown
from ..names import described_callers
from ..reset import CountersPage, ReasonForm, reset_message
from .form import read_query


class GrantForm(ReasonForm):
    """How much is given back, and why."""

    units = forms.IntegerField(
        label=_("Units to give back"), min_value=1, max_value=MAX_UNITS, widget=AdminIntegerFieldWidget
    )
    field_order = ["units", "reason"]


class CallerCountersPage(CountersPage):
    """Changes the counters that the operator has chosen on the Explain page, and returns there."""

    heads = (_("Counter"), _("Who"))

    def change(self, buckets: list[Bucket], data: dict[str, Any]) -> tuple[tuple[BucketStatus, ...], str]:
        """Change the counters; return how they stood before, and a message."""
        raise NotImplementedError

    def view(self, request: Any) -> Any:
        """GET asks, POST changes."""
        params, explanation = read_query(self.admin, request)
        back = self.admin.page_url("explain", query=params)
        if explanation is None:
            return HttpResponseRedirect(back)
        titles = request.GET.getlist("bucket")
        buckets = [
            bucket
            for bucket in explanation.resolution.buckets
            if bucket.title in titles and not counters.why_shared(bucket.counted_per, bucket.subject)
        ]
        if not buckets:
            text = gettext("Select at least one of the caller's own counters.")
            self.admin.message_user(request, text, messages.ERROR)
            return HttpResponseRedirect(back)
        names = described_callers([bucket.subject for bucket in buckets])
        rows = {bucket: (shown(bucket.title), names[bucket.subject]) for bucket in buckets}
        page = self.confirm(request, rows, lambda form: self._change(request, buckets, form), {"back": back})
        return page or HttpResponseRedirect(back)

    def _change(self, request: Any, buckets: list[Bucket], form: Any) -> None:
        try:
            before, text = self.change(buckets, form.cleaned_data)
        except ValidationError as error:
            form.add_error("units", error)
        except StoreError as error:
            store_error = error.reason
        names = named_callers([bucket.subject for bucket in chosen])
        context = {
            **words,
            "rows": [counter(bucket, statuses.get(bucket), explanation.context.now_us, names) for bucket in chosen],
            "store_error": store_error,
            "form": form,
            "back": self.page_url("explain", query=given),
        }
        return self._show(request, "confirm_counters.html", context, form)

    def _log(self, request: Any, before: tuple[BucketStatus, ...], text: str) -> None:
        """Write an entry into the history of each policy whose counters were changed."""
        policies = RatePolicy.objects.in_bulk({status.bucket.policy_id for status in before})
        for pk, policy in policies.items():
            texts = [
                f"{shown(s.bucket.title)}, {shown(s.bucket.subject)} ({s.used} / {s.limit})"
                for s in before
                if s.bucket.policy_id == pk
            ]
            self.admin.log_change(request, policy, f"{text} {'; '.join(texts)}")

    def boost_view(self, request: Any) -> Any:
        """A temporary override: GET shows the form, POST what it would change, and POST with ``post`` makes it."""
        if not (may(request.user, "add", override=True) and self.has_view_permission(request)):
            raise PermissionDenied
        given, explanation = self._asked(request)
        if explanation is None:
            return self._back(given)
        won = {str(c.policy.id): c.policy for c in explanation.candidates if c.won}
        facts = won.get(request.GET.get("policy", ""))
        row = None if facts is None else RatePolicy.objects.select_related("endpoint").filter(pk=facts.id).first()
        if facts is None or row is None:
            text = gettext("That policy is not in force for this request (any more): choose again.")
            self.message_user(request, text, messages.ERROR)
            return self._back(given)
        why = boosting.why_no_boost(explanation, facts)
        if why:
            self.message_user(request, why, messages.ERROR)
            return self._back(given)
        boost = boosting.propose_boost(explanation, row)
        form = self._boost_form(request, explanation, facts)(request.POST or None, instance=boost)
        sure = form.is_bound and "change" not in request.POST and form.is_valid()
        if sure and "post" in request.POST:
            return self._boost(request, form, facts, given)
        context = {
            "title": _("Boost"),
            "form": form,
            "who": shown(boost.audience),
            "endpoint": shown(row.endpoint.name) if row.endpoint else _("all endpoints"),
            "counted_per": shown(row.counted_per),
            "rates_now": shown(row.rates),
            "policy_now": facts.id,
            "back": self.page_url("explain", query=given),
        }
        if sure:
            context |= self._outlook(explanation, boost)
        return self._show(request, "boost.html", context, form)

    def _boost_form(self, request: Any, explanation: Explanation, facts: PolicyFacts) -> Any:
        now_us = explanation.context.now_us
        soon = boosting.to_datetime(now_us) + _LEAST
        windows = {}
        for bucket in explanation.resolution.buckets:
            end = boosting.window_end(bucket, now_us) if bucket.policy_id == facts.id else None
            if end is not None and end > soon:
                windows[f"window:{bucket.title}"] = end
        return boost_form(self.form, windows, partial(self.formfield_for_dbfield, request=request))

    path = "grant/"
    name = "grant"
    form_class = GrantForm
    title = _("Give units back")
    lead = _(
        "The units entered below are given back to each of these counters. The limits and "
        "the counters of other callers stay unchanged."
    )
    yes = _("Yes, give them back")

    def change(self, buckets: list[Bucket], data: dict[str, Any]) -> tuple[tuple[BucketStatus, ...], str]:
        """Give the units to each counter. Raises ``ValidationError`` where one has used fewer."""
        before = boosts.grant(buckets, data["units"], data["reason"])
        text = ngettext(
            "%(units)d units were given back to %(count)d counter.",
            "%(units)d units were given back to %(count)d counters.",
            len(before),
        )
        return before, text % {"units": data["units"], "count": len(before)}

    def _outlook(self, explanation: Explanation, boost: RatePolicy) -> dict[str, Any]:
        """What the boost would change, and what speaks against it."""
        outlook = boosting.outlook(explanation.context, boost)
        end: Any = boost.ends_at
        warnings = []
        if outlook.now is not None and (outlook.now.user or outlook.now.subject):
            words = {"id": outlook.now.id, "rates": shown(outlook.now.text)}
            text = gettext("It takes the place of the override %(rates)s (policy %(id)s) while it lasts.")
            warnings.append(text % words)
        if outlook.overtaken is not None:
            policy, at_us = outlook.overtaken
            words = {"id": policy.id, "rates": shown(policy.text), "at": clock(at_us / 10**6)}
            warnings.append(gettext("Policy %(id)s, %(rates)s, takes over at %(at)s.") % words)
        return {
            "sure": True,
            "warnings": warnings,
            "rates_boosted": shown(boost.rates),
            "ends": moment(end),
            "end": timezone.localtime(end) if timezone.is_aware(end) else end,
            "rates_after": shown(outlook.after.text) if outlook.after else gettext("no limit here"),
            "policy_after": outlook.after and outlook.after.id,
            "reason": shown(boost.reason),
        }

class ResetCountersPage(CallerCountersPage):
    """Resets to zero."""

    path = "reset-counters/"
    name = "reset_counters"

    def change(self, buckets: list[Bucket], data: dict[str, Any]) -> tuple[tuple[BucketStatus, ...], str]:
        """Reset each counter."""
        before = counters.reset(buckets, data["reason"])
        return before, reset_message(len(before))
