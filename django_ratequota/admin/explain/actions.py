"""More for one caller: boosts, units given back and resets, from what Explain shows. Each asks first."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.widgets import AdminIntegerFieldWidget
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.forms.models import modelform_factory
from django.urls import path
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ...engine.rates import MAX_UNITS
from ...engine.types import Bucket, BucketStatus
from ...exceptions import StoreError
from ...models import RatePolicy
from ...operations import boosts as boosting
from ...operations import counters as usage
from ...operations.explain import Explanation
from ...policies.facts import PolicyFacts
from ...recording.databases import policy_alias
from ..base import moment, shown
from ..permissions import may
from ..reset import ReasonForm
from .counters import clock, counter, named_callers
from .page import Explain

#: A window that ends sooner is no time to boost for.
_LEAST = timedelta(minutes=1)


class GrantForm(ReasonForm):
    """How much is given back, and why."""

    units = forms.IntegerField(
        label=_("Units to give back"), min_value=1, max_value=MAX_UNITS, widget=AdminIntegerFieldWidget
    )
    field_order = ["units", "reason"]


def boost_form(base: Any, windows: dict[str, Any], formfield: Any) -> Any:
    """The form of a boost: a part of a policy's own form, and until when, in a choice."""
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
            """Works out the end; the policy's own ``clean`` judges it."""
            values = super().clean() or self.cleaned_data
            until = values.get("until")
            if until in ends:
                values["ends_at"] = ends[until].replace(microsecond=0)
            elif until == "date" and not values.get("ends_at") and "ends_at" not in self.errors:
                self.add_error("ends_at", _("Say until when, or choose one of the times above."))
            return values

    fields = ["rates", "ends_at", "reason"]
    form = modelform_factory(RatePolicy, form=BoostForm, fields=fields, formfield_callback=formfield)
    form.base_fields["reason"].required = True
    form.base_fields["ends_at"].label = _("Date")
    form.base_fields["ends_at"].help_text = ""
    for part, label in zip(form.base_fields["ends_at"].widget.widgets, (_("Date"), _("Time")), strict=True):
        part.attrs["aria-label"] = label
    return form


class Boosts(Explain):
    """What operators do for a caller, each by its own permission, back to Explain when done."""

    def get_urls(self) -> list[Any]:
        """With a page for each."""
        pages = {"boost": self.boost_view, "grant": self.grant_view, "reset_counters": self.reset_counters_view}
        own = [
            path(
                f"{name.replace('_', '-')}/",
                self.admin_site.admin_view(partial(self._recorded, view)),
                name=f"django_ratequota_ratepolicy_{name}",
            )
            for name, view in pages.items()
        ]
        return [*own, *super().get_urls()]

    def grant_view(self, request: Any) -> Any:
        """Gives units back to the chosen counters: GET asks, POST gives."""

        def give(chosen: list[Bucket], form: Any) -> tuple[BucketStatus, ...]:
            return boosting.grant(chosen, form.cleaned_data["units"], form.cleaned_data["reason"])

        def told(form: Any, count: int) -> str:
            units = form.cleaned_data["units"]
            text = ngettext(
                "%(units)d units were given back to %(count)d counter.",
                "%(units)d units were given back to %(count)d counters.",
                count,
            )
            return text % {"units": units, "count": count}

        words = {
            "title": _("Give units back"),
            "lead": _(
                "The caller gets as many units back as you write below, in each of these counters. The limits stay "
                "as they are, and what others have counted stays too."
            ),
            "yes": _("Yes, give them back"),
        }
        return self._counters(request, GrantForm, give, told, words)

    def reset_counters_view(self, request: Any) -> Any:
        """Resets the chosen counters: GET asks, POST resets."""

        def reset(chosen: list[Bucket], form: Any) -> tuple[BucketStatus, ...]:
            return usage.reset(chosen, form.cleaned_data["reason"])

        def told(form: Any, count: int) -> str:
            text = ngettext("%(count)d counter was reset.", "%(count)d counters were reset.", count)
            return text % {"count": count}

        words = {
            "title": _("Reset what was counted"),
            "lead": _(
                "These counters are reset to zero. The limits stay as they are, and what others have "
                "counted stays too."
            ),
            "yes": _("Yes, reset them"),
        }
        return self._counters(request, ReasonForm, reset, told, words)

    def _counters(self, request: Any, form_class: Any, act: Any, told: Any, words: dict[str, Any]) -> Any:
        if not self.has_reset_permission(request):
            raise PermissionDenied
        given, explanation = self._asked(request)
        if explanation is None:
            return self._back(given)
        names = request.GET.getlist("bucket")
        own = [b for b in explanation.resolution.buckets if not usage.why_shared(b.counted_per, b.subject)]
        chosen = [bucket for bucket in own if bucket.title in names]
        if not chosen:
            self.message_user(request, gettext("Choose one of the caller's own counters, or more."), messages.ERROR)
            return self._back(given)
        confirmed = request.method == "POST" and "post" in request.POST
        form = form_class(request.POST if confirmed else None)
        if confirmed and form.is_valid():
            try:
                before = act(chosen, form)
            except ValidationError as error:
                form.add_error("units", error)
            except StoreError as error:
                text = gettext("Redis gave no answer (%(reason)s): look at what was done, and try again later.")
                self.message_user(request, text % {"reason": error.reason}, messages.ERROR)
                return self._back(given)
            else:
                text = told(form, len(before))
                self._log(request, before, text)
                self.message_user(request, text, messages.SUCCESS)
                return self._back(given)
        statuses, store_error = {}, ""
        try:
            statuses = usage.peek(chosen)
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
        """Into the own history of each policy that says the limit."""
        policies = RatePolicy.objects.in_bulk({status.bucket.policy_id for status in before})
        for pk, policy in policies.items():
            stood = [
                f"{shown(s.bucket.title)}, {shown(s.bucket.subject)} ({s.used} / {s.limit})"
                for s in before
                if s.bucket.policy_id == pk
            ]
            self.log_change(request, policy, f"{text} {'; '.join(stood)}")

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

    def _boost(self, request: Any, form: Any, facts: PolicyFacts, given: dict[str, str]) -> Any:
        with transaction.atomic(using=policy_alias(RatePolicy)):
            boost = form.save()
            words = {"rates": boost.rates, "end": moment(boost.ends_at), "before": facts.text, "id": facts.id}
            text = gettext("Boost granted: %(rates)s until %(end)s, instead of %(before)s (policy %(id)s).") % words
            self.log_addition(request, boost, text)
        done = format_html(
            '{} <a href="{}">{}</a>', text, self.page_url("change", boost.pk), gettext("See the override.")
        )
        self.message_user(request, done, messages.SUCCESS)
        return self._back(given)

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

    def _asked(self, request: Any) -> tuple[dict[str, str], Explanation | None]:
        """What the query string asks, and the answer; None where it cannot be read (Explain then says why)."""
        form = self._form(request, request.GET)
        explanation = form.question.explain() if form.is_bound and form.is_valid() else None
        given = form.given() if form.is_bound else {}
        if request.GET.get("id"):
            given["id"] = request.GET["id"]
        return given, explanation
