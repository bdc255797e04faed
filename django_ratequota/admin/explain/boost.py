"""Grants a boost, a temporary override for the caller that the Explain page shows."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib import messages
from django.db import transaction
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...changes.databases import policy_alias
from ...models import RatePolicy
from ...operations import boosts
from ...operations.explain import Explanation
from ...policies.facts import PolicyFacts, to_datetime
from ..formatting import clock, moment, shown
from ..names import audience_text, caller_names
from ..permissions import may
from .dated import dated_form
from .form import CallerPage

#: The lengths of time that a boost is offered for.
BOOST_LENGTHS = ("hour", "hours", "day")

#: A window that ends sooner is not offered as the end of a boost.
_SHORTEST = timedelta(minutes=1)


class BoostPage(CallerPage):
    """Asks for rates and an end, shows what they would change, then grants the override."""

    path = "boost/"
    name = "boost"

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may grant overrides."""
        return may(request.user, "add", override=True) and super().has_permission(request, obj)

    def ask(self, request: Any, explanation: Explanation, back: str) -> Any:
        """Return the form, then what the boost would change (POST), and grant it (POST with ``post``)."""
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
            "who": audience_text(boost, caller_names([boost.subject])),
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
        return dated_form(self.admin, request, {"rates": None}, BOOST_LENGTHS, windows=windows)

    def _grant(self, request: Any, form: Any, facts: PolicyFacts) -> None:
        with transaction.atomic(using=policy_alias(RatePolicy)):
            boost = form.save()
            words = {"rates": boost.rates, "end": moment(boost.ends_at), "before": facts.text, "id": facts.id}
            text = gettext("Boost granted: %(rates)s until %(end)s, instead of %(before)s (policy %(id)s).") % words
            self.admin.log_addition(request, boost, text)
        link = self.admin.page_url("change", boost.pk)
        message = format_html('{} <a href="{}">{}</a>', text, link, gettext("See the override."))
        self.admin.message_user(request, message, messages.SUCCESS)


def warnings_about(outlook: boosts.Outlook) -> list[str]:
    """Return what a boost replaces, and what replaces it, in sentences."""
    warnings = []
    if outlook.now is not None and (outlook.now.user or outlook.now.subject):
        words = {"id": outlook.now.id, "rates": shown(outlook.now.text)}
        text = gettext("Until it ends, it replaces the override %(rates)s (policy %(id)s).")
        warnings.append(text % words)
    if outlook.overtaken is not None:
        policy, at_us = outlook.overtaken
        words = {"id": policy.id, "rates": shown(policy.text), "at": clock(at_us / 10**6)}
        warnings.append(gettext("Policy %(id)s (%(rates)s) replaces it at %(at)s.") % words)
    return warnings


def _outlook(explanation: Explanation, boost: RatePolicy) -> dict[str, Any]:
    """Return what the boost would change, and the warnings about it."""
    outlook = boosts.outlook(explanation.context, boost)
    end: Any = boost.ends_at
    return {
        "sure": True,
        "warnings": warnings_about(outlook),
        "rates_boosted": shown(boost.rates),
        "ends": moment(end),
        "end": timezone.localtime(end) if timezone.is_aware(end) else end,
        "rates_after": shown(outlook.after.text) if outlook.after else gettext("no limit here"),
        "policy_after": outlook.after and outlook.after.id,
        "reason": shown(boost.reason),
    }
