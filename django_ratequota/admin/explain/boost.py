"""Grants a boost, a temporary override for the caller that the Explain page shows."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

from django import forms
from django.contrib import messages
from django.db import transaction
from django.forms.models import modelform_factory
from django.http import HttpResponseRedirect
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...models import RatePolicy
from ...operations import boosts
from ...operations.explain import Explanation
from ...policies.facts import PolicyFacts, to_datetime
from ...recording.databases import policy_alias
from ..formatting import clock, moment, shown
from ..pages import AdminPage
from ..permissions import may
from .form import read_query

#: A window that ends sooner is not offered as the end of a boost.
_SHORTEST = timedelta(minutes=1)


class BoostPage(AdminPage):
    """Asks for rates and an end, shows what they would change, then grants the override."""

    path = "boost/"
    name = "boost"
    media = forms.Media(css={"all": ["django_ratequota/explain.css"]})

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may grant overrides."""
        return may(request.user, "add", override=True) and super().has_permission(request, obj)

    def view(self, request: Any) -> Any:
        """GET shows the form, POST what it would change, and POST with ``post`` grants the boost."""
        params, explanation = read_query(self.admin, request)
        back = self.admin.page_url("explain", query=params)
        page = None if explanation is None else self._boost(request, explanation, back)
        return page or HttpResponseRedirect(back)

    def _boost(self, request: Any, explanation: Explanation, back: str) -> Any:
        """Return the page; None once the boost is granted, or with a message why it cannot be."""
        winners = {str(c.policy.id): c.policy for c in explanation.candidates if c.won}
        facts = winners.get(request.GET.get("policy", ""))
        row = None if facts is None else RatePolicy.objects.select_related("endpoint").filter(pk=facts.id).first()
        if facts is None or row is None:
            text = gettext("That policy does not apply to this request, or no longer does. Choose again.")
            self.admin.message_user(request, text, messages.ERROR)
            return None
        why_not = boosts.no_boost_reason(explanation, facts)
        if why_not:
            self.admin.message_user(request, why_not, messages.ERROR)
            return None
        boost = boosts.propose_boost(explanation, row)
        form = self._form(request, explanation, facts)(request.POST or None, instance=boost)
        sure = form.is_bound and "change" not in request.POST and form.is_valid()
        if sure and "post" in request.POST:
            return self._grant(request, form, facts)
        context = {
            "title": _("Boost"),
            "form": form,
            "who": shown(boost.audience),
            "endpoint": shown(row.endpoint.name) if row.endpoint else _("all endpoints"),
            "counted_per": shown(row.counted_per),
            "rates_now": shown(row.rates),
            "policy_now": facts.id,
            "back": back,
            **(_outlook(explanation, boost) if sure else {}),
        }
        return self.render(request, "boost.html", context, form)

    def _form(self, request: Any, explanation: Explanation, facts: PolicyFacts) -> Any:
        now_us = explanation.context.now_us
        soon = to_datetime(now_us) + _SHORTEST
        windows = {}
        for bucket in explanation.resolution.buckets:
            end = boosts.window_end(bucket, now_us) if bucket.policy_id == facts.id else None
            if end is not None and end > soon:
                windows[f"window:{bucket.title}"] = end
        return boost_form(self.admin.form, windows, partial(self.admin.formfield_for_dbfield, request=request))

    def _grant(self, request: Any, form: Any, facts: PolicyFacts) -> None:
        with transaction.atomic(using=policy_alias(RatePolicy)):
            boost = form.save()
            words = {"rates": boost.rates, "end": moment(boost.ends_at), "before": facts.text, "id": facts.id}
            text = gettext("Boost granted: %(rates)s until %(end)s, instead of %(before)s (policy %(id)s).") % words
            self.admin.log_addition(request, boost, text)
        link = self.admin.page_url("change", boost.pk)
        message = format_html('{} <a href="{}">{}</a>', text, link, gettext("See the override."))
        self.admin.message_user(request, message, messages.SUCCESS)


def boost_form(base: Any, windows: dict[str, Any], formfield: Any) -> Any:
    """Return the form class of a boost: rates and reason of the policy form ``base``, and the choice of an end.

    ``windows`` maps a choice's value (``window:`` and the counter's title) to the time when that window ends.
    """
    now = timezone.now()
    ends = {"hour": now + timedelta(hours=1), "day": now + timedelta(days=1), **windows}
    choices: dict[str, Any] = {"hour": _("for 1 hour"), "day": _("for 1 day")}
    for name, end in windows.items():
        words = {"counter": shown(name.partition(":")[2]), "end": clock(end.timestamp())}
        choices[name] = _("until the window of %(counter)s ends, at %(end)s") % words
    choices["date"] = _("until the date below")

    class BoostForm(base):  # type: ignore[misc]
        until = forms.ChoiceField(
            label=_("Until"), choices=list(choices.items()), initial="hour", widget=forms.RadioSelect
        )
        field_order = ["rates", "until", "ends_at", "reason"]

        def clean(self) -> Any:
            """Set ``ends_at`` by the choice; the policy's own ``clean`` validates it."""
            values = super().clean() or self.cleaned_data
            until = values.get("until")
            if until in ends:
                values["ends_at"] = ends[until].replace(microsecond=0)
            elif until == "date" and not values.get("ends_at") and "ends_at" not in self.errors:
                self.add_error("ends_at", _("Enter an end date, or choose one of the times above."))
            return values

    fields = ["rates", "ends_at", "reason"]
    form = modelform_factory(RatePolicy, form=BoostForm, fields=fields, formfield_callback=formfield)
    form.base_fields["reason"].required = True
    form.base_fields["ends_at"].label = _("Date")
    form.base_fields["ends_at"].help_text = ""
    for part, label in zip(form.base_fields["ends_at"].widget.widgets, (_("Date"), _("Time")), strict=True):
        part.attrs["aria-label"] = label
    return form


def _outlook(explanation: Explanation, boost: RatePolicy) -> dict[str, Any]:
    """Return what the boost would change, and the warnings about it."""
    outlook = boosts.outlook(explanation.context, boost)
    end: Any = boost.ends_at
    warnings = []
    if outlook.now is not None and (outlook.now.user or outlook.now.subject):
        words = {"id": outlook.now.id, "rates": shown(outlook.now.text)}
        text = gettext("Until it ends, it replaces the override %(rates)s (policy %(id)s).")
        warnings.append(text % words)
    if outlook.overtaken is not None:
        policy, at_us = outlook.overtaken
        words = {"id": policy.id, "rates": shown(policy.text), "at": clock(at_us / 10**6)}
        warnings.append(gettext("Policy %(id)s (%(rates)s) replaces it at %(at)s.") % words)
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
