"""Roll out a policy: what it would have refused in log mode, or refuses, and its mode switched from there."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.http import HttpResponseRedirect
from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..changes.databases import policy_alias
from ..models import PolicyChange, RatePolicy
from ..monitoring.refusals import would_be_refusals
from ..monitoring.timeline import Counts, Span, TopCaller
from ..runtime import default_limiter
from .base import ChangeReasonForm
from .formatting import moment, number_text, percent, shown
from .names import caller_names, caller_text, endpoint_text
from .pages import AdminPage, reply, unanswered
from .usage.counts import (
    SPANS,
    Selection,
    cells,
    chart,
    newest_refusals,
    read_timeline,
    sum_counts,
    top_callers,
    totals,
)
from .usage.labels import explain_url, refusal_row

_MOST_CALLERS = 20
_MOST_REFUSALS = 20
_MODES = {"log": _("Log only"), "enforce": _("Enforce")}


class SwitchForm(ChangeReasonForm):
    """The mode to switch to, and which state of the policy the operator saw."""

    mode = forms.ChoiceField(choices=list(_MODES.items()), widget=forms.HiddenInput, required=True)
    seen = forms.CharField(widget=forms.HiddenInput, required=False)


class RolloutPage(AdminPage):
    """Shows what a policy in log mode would have refused, then enforces it, or takes that back."""

    path = "<path:object_id>/rollout/"
    name = "rollout"
    media = forms.Media(css={"all": ["django_ratequota/usage.css"]})

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the link on the policy's page."""
        return [(self.url(obj), _("Would-be refusals") if obj.mode == RatePolicy.Mode.LOG else _("Roll out"))]

    def view(self, request: Any, policy: RatePolicy) -> Any:
        """GET shows what is recorded, POST switches the mode."""
        may_switch = self.admin.has_change_permission(request, policy)
        form = None
        if request.method == "POST":
            if not may_switch:
                raise PermissionDenied
            form = SwitchForm(request.POST)
            if form.is_valid():
                self._switch(request, policy, form.cleaned_data)
                return HttpResponseRedirect(self.url(policy))
        span: Span = next((span for span in SPANS if span == request.GET.get("span")), "day")
        selection = Selection(span=span, policy_id=policy.pk)
        changed = _last_change(policy)
        context = {
            "title": gettext("Roll out: %s") % shown(policy),
            "policy": policy,
            "facts": [
                (gettext("Who"), shown(policy.audience)),
                (gettext("Endpoint"), endpoint_text(policy.endpoint)),
                (gettext("Counted per"), shown(policy.counted_per)),
                (gettext("Mode"), policy.get_mode_display()),
                (gettext("Last changed"), moment(changed.at, seconds=True) if changed else "–"),
            ],
            "spans": [(f"?span={value}", text, value == span) for value, text in SPANS.items()],
            "policy_url": self.admin.page_url("change", policy.pk),
            **self._recorded(request, policy, selection, changed),
            "form": form if form is not None and form.errors else SwitchForm(),
            "seen": _state(changed),
            "switches": [(mode, text) for mode, text in _MODES.items() if may_switch and mode != policy.mode],
        }
        return self.render(request, "rollout.html", context)

    def _recorded(
        self, request: Any, policy: RatePolicy, selection: Selection, changed: PolicyChange | None
    ) -> dict[str, Any]:
        """Return what is recorded of the policy's requests, and the reason where Redis did not answer."""
        if default_limiter().store.absent:
            return {"absent": True}
        logs = policy.mode == RatePolicy.Mode.LOG

        def read() -> tuple[Any, Any, Any]:
            newest = (
                would_be_refusals(policy.pk, _MOST_REFUSALS) if logs else newest_refusals(selection, _MOST_REFUSALS)
            )
            return read_timeline(selection), top_callers(selection, _MOST_CALLERS), newest

        found, store_error = reply(read)
        if found is None:
            then = gettext("What the policy would have refused cannot be shown. Try again later.")
            return {"store_error": unanswered(store_error, then)}
        timeline, tops, newest = found
        counts = sum_counts(timeline.total)
        callers = tops["would_refuse" if logs else "refused"]
        names = caller_names([*(top.caller for top in callers), *(refusal.caller for refusal in newest)])
        return {
            "logs": logs,
            "sentence": _sentence(counts, selection, logs),
            "earlier": _earlier(timeline, changed),
            "plot": chart(timeline, selection),
            "totals": totals(counts),
            "callers": [self._caller(top, names) for top in callers],
            "newest": [refusal_row(self.site, refusal, names) for refusal in newest],
        }

    def _caller(self, top: TopCaller, names: dict[str, str]) -> dict[str, Any]:
        text = caller_text(top.caller, names)
        return {"name": text, "query": explain_url(self.site, top.caller), "cells": cells(top.counts)[1:3]}

    def _switch(self, request: Any, policy: RatePolicy, data: dict[str, Any]) -> None:
        """Save the mode, unless the policy is not what the operator saw any more."""
        with transaction.atomic(using=policy_alias(RatePolicy)):
            # Locked, so that nobody edits the policy between this look and the save.
            stored = RatePolicy.objects.select_for_update().filter(pk=policy.pk).order_by().first()
            if stored is None or _state(_last_change(policy)) != data["seen"]:
                text = gettext("Nothing was changed: somebody else edited the policy meanwhile. Look at it again.")
                self.admin.message_user(request, text, messages.ERROR)
                return
            stored.mode = data["mode"]
            try:
                stored.save(update_fields=["mode"])
            except ValidationError as error:
                self.admin.message_user(request, " ".join(error.messages), messages.ERROR)
                return
            self.admin.log_change(request, stored, [{"changed": {"fields": [str(_("mode"))]}}])
        done = {
            "enforce": _("Enforced from the next request on: %(policy)s."),
            "log": _("It only logs from the next request on, and refuses nothing: %(policy)s."),
        }
        text = done[stored.mode] % {"policy": shown(stored)}
        self.admin.message_user(request, text, messages.SUCCESS)
        self.admin.warn(request, [stored], stored.endpoint)


def _last_change(policy: RatePolicy) -> PolicyChange | None:
    changes = PolicyChange.objects.filter(model="ratepolicy", object_id=str(policy.pk))
    return changes.exclude(action__in=["reset", "grant"]).order_by("-pk").first()


def _state(changed: PolicyChange | None) -> str:
    """Return what differs after each edit of the policy."""
    return "" if changed is None else str(changed.pk)


def _sentence(counts: Counts, selection: Selection, logs: bool) -> str:
    """Return what the policy refused of the recorded requests, or would have."""
    requests, refused = counts.admitted + counts.refused, counts.would_refuse if logs else counts.refused
    if not requests:
        return gettext(
            "No request was counted that the policy applied to. Counts arrive about a second after the requests."
        )
    words = {
        "span": SPANS[selection.span],
        "requests": number_text(requests),
        "refused": number_text(refused),
        "percent": percent(refused, requests) if refused else number_text(0),
    }
    if not refused:
        return gettext("In the %(span)s the policy applied to %(requests)s requests and had room for all.") % words
    text = gettext(
        "In the %(span)s the policy applied to %(requests)s requests. It would have refused %(refused)s of them "
        "(%(percent)s)."
    )
    if not logs:
        text = gettext(
            "In the %(span)s the policy applied to %(requests)s requests. It refused %(refused)s of them "
            "(%(percent)s)."
        )
    return text % words


def _earlier(timeline: Any, changed: PolicyChange | None) -> str:
    """Return a sentence where some counts may be older than the policy is now."""
    if changed is None or changed.action == PolicyChange.Action.CREATE:
        return ""
    at = changed.at if timezone.is_aware(changed.at) else timezone.make_aware(changed.at)
    if at < timeline.starts[0]:
        return ""
    text = gettext("It was last changed at %(at)s: what was counted before belongs to the policy as it was then.")
    return text % {"at": moment(changed.at, seconds=True)}
