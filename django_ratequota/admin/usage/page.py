"""The live usage page: requests over time, the busiest callers, refusals, the store, and the newest revision's proof.

Seen by those who may look at policies. Operators who may look at overrides only see the counts of all requests,
but of no policy that is not theirs to see.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...exceptions import StoreError
from ...models import PolicyChange
from ...monitoring import health
from ...monitoring import timeline as timelines
from ...monitoring.refusals import Refusal
from ...monitoring.timeline import Counts, Span, Timeline, TopCaller
from ...policies.unreadable import find_unreadable
from ...runtime import default_limiter
from ..formatting import moment, number_text, shown
from ..names import usernames
from ..permissions import PolicyRights
from . import counts as figures
from . import workers
from .counts import SPANS, Chosen, cells
from .export import EXPORTS, csv_response
from .labels import SHOWN, Names, caller_cell, page_url

Found = TypeVar("Found")

_CALLERS = 10
_REFUSALS = 50
_ID = re.compile("[0-9]{1,18}")
_TOPS = {
    "admitted": _("Most requests admitted"),
    "refused": _("Most requests refused"),
    "would_refuse": _("Most requests that log mode would have refused"),
}
_KNOWN_CALLERS = {
    "hour": _("Callers are counted per clock hour. These counts cover the current hour and the one before."),
    "day": _("Callers are counted per clock hour. These counts cover the current hour and the 24 before."),
    "week": _("Callers are recorded for the last 48 hours only."),
}
_MEDIA = forms.Media(
    css={"all": ["django_ratequota/plots.css", "django_ratequota/usage.css"]}, js=["django_ratequota/usage.js"]
)


class LiveUsage(PolicyRights):
    """Shows operators what is going on."""

    def get_urls(self) -> list[Any]:
        """With the page, and what it exports."""
        view = self.admin_site.admin_view
        own = [
            path("usage/", view(self.usage_view), name="django_ratequota_ratepolicy_usage"),
            path("usage/csv/", view(self.usage_csv_view), name="django_ratequota_ratepolicy_usage_csv"),
        ]
        return [*own, *super().get_urls()]

    def usage_view(self, request: Any) -> Any:
        """The page."""
        chosen, names = self._chosen(request)
        timeline, timeline_error = _tried(lambda: timelines.timeline(chosen.span))
        tops, tops_error = _tried(lambda: figures.tops(chosen, _CALLERS))
        refusals, refusals_error = _tried(lambda: figures.refusals(chosen, names.endpoints, _REFUSALS))
        names.read(chosen, timeline, refusals or ())
        callers = [top.caller for rows in (tops or {}).values() for top in rows]
        users = usernames([*callers, *(one.caller for one in refusals or ())])
        title = gettext("Live usage: %s") % names.title(chosen)
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            **self._choices(chosen, names),
            **_counted(timeline, chosen, names),
            "timeline_error": timeline_error,
            "tops": [
                {"title": _TOPS[by], "rows": [self._top(top, users, chosen, names) for top in rows]}
                for by, rows in (tops or {}).items()
                if chosen.policy_id is None or by != "admitted"
            ],
            "tops_error": tops_error,
            "tops_note": _KNOWN_CALLERS[chosen.span],
            "refusals": [self._refusal(one, users, names) for one in refusals or ()],
            "refusals_error": refusals_error,
            **_store(),
            **_reports(),
            "unreadable": _unreadable(names),
            "title": title,
            "original": title,  # the end of the breadcrumbs
            "opts": self.opts,
            "media": self.media + _MEDIA,
            "has_view_permission": True,
        }
        return TemplateResponse(request, "admin/django_ratequota/ratepolicy/usage.html", context)

    def usage_csv_view(self, request: Any) -> Any:
        """One table of the page as CSV, whole; back to the page, with the reason, where that cannot be."""
        chosen, names = self._chosen(request)
        what = request.GET.get("what", "")
        if what in EXPORTS:
            try:
                table = EXPORTS[what](chosen, names)
            except StoreError as error:
                text = _("Redis did not answer (%(reason)s). Nothing was exported. Try again later.")
                self.message_user(request, text % {"reason": error.reason}, messages.ERROR)
            else:
                return csv_response(f"ratequota-{what}-{chosen.slug}", table)
        else:
            text = _("There is no export “%(what)s”. Choose one of: %(known)s.")
            known = {"what": shown(what)[:60], "known": ", ".join(EXPORTS)}
            self.message_user(request, text % known, messages.ERROR)
        return HttpResponseRedirect(page_url(self.admin_site.name, "ratepolicy_usage") + chosen.query())

    def _chosen(self, request: Any) -> tuple[Chosen, Names]:
        """What the query asks for; what it asks in vain is told and left out. Raises ``PermissionDenied``."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        names = Names(self, request)
        given = {name: request.GET.get(name, "") for name in ("span", "endpoint", "policy")}
        span: Span = next((span for span in SPANS if span == given["span"]), "hour")
        ids = {name: int(given[name]) if _ID.fullmatch(given[name]) else None for name in ("endpoint", "policy")}
        if ids["policy"] is not None and not names.may_choose(ids["policy"]):
            ids["policy"] = None
        understood = {"span": given["span"] in SPANS, **{name: pk is not None for name, pk in ids.items()}}
        for name, value in given.items():
            if value and not understood[name]:
                text = _("%(name)s=%(value)s was ignored: unknown value.")
                self.message_user(request, text % {"name": name, "value": shown(value)[:60]}, messages.WARNING)
        if None not in ids.values():
            ids["endpoint"] = None
            text = _(
                "The endpoint was ignored: requests are counted by endpoint or by policy, not by "
                "both. These are the policy's counts."
            )
            self.message_user(request, text, messages.WARNING)
        refresh = request.GET.get("refresh") == "1"
        return Chosen(span=span, endpoint_id=ids["endpoint"], policy_id=ids["policy"], refresh=refresh), names

    def _choices(self, chosen: Chosen, names: Names) -> dict[str, Any]:
        """The form of the page, and its links."""
        endpoints = dict.fromkeys([*names.endpoints, 0])
        if chosen.endpoint_id is not None:
            endpoints.setdefault(chosen.endpoint_id)
        csv = page_url(self.admin_site.name, "ratepolicy_usage_csv")
        return {
            "chosen": chosen,
            "spans": [(span, text, span == chosen.span) for span, text in SPANS.items()],
            "endpoint_choices": [(str(pk), names.endpoint(pk), pk == chosen.endpoint_id) for pk in endpoints],
            "policy_choices": [(str(pk), names.policy(pk), pk == chosen.policy_id) for pk in names.policies],
            "csv": {what: f"{csv}{chosen.query(refresh=False)}&what={what}" for what in EXPORTS},
        }

    def _top(self, top: TopCaller, users: Mapping[str, str], chosen: Chosen, names: Names) -> dict[str, Any]:
        endpoint = names.endpoints.get(chosen.endpoint_id or 0)
        who = caller_cell(top.caller, users, self.admin_site.name, endpoint.name if endpoint else "")
        # What a policy admitted is not counted by caller, so neither that nor the part refused is known.
        known = slice(None) if chosen.policy_id is None else slice(1, 3)
        return {**who, "cells": cells(top.counts)[known]}

    def _refusal(self, refusal: Refusal, users: Mapping[str, str], names: Names) -> dict[str, Any]:
        site = self.admin_site.name
        ids = dict.fromkeys(b.policy_id for b in refusal.buckets if b.refused and b.policy_id in names.policies)
        return {
            "id": refusal.id,
            "explain": page_url(site, "ratepolicy_explain", query={"id": refusal.id}),
            "at": moment(refusal.at, seconds=True),
            "count": number_text(refusal.count),
            "caller": caller_cell(refusal.caller, users, site),
            "what": shown(f"{refusal.method} {refusal.scope or refusal.route}"),
            "violated": shown(", ".join(refusal.violated)),
            "error": shown(refusal.error),
            "policies": [{"text": names.policy(pk), "url": names.policy_url(pk)} for pk in ids if pk],
        }


def _tried(ask: Callable[[], Found]) -> tuple[Found | None, str]:
    """What was asked for, or the reason why there is none."""
    try:
        return ask(), ""
    except StoreError as error:
        return None, error.reason


def _counted(timeline: Timeline | None, chosen: Chosen, names: Names) -> dict[str, Any]:
    """The plot, its sums, and the tables of endpoints and policies."""
    if timeline is None:
        return {}
    endpoints = figures.sums(timeline.endpoints)
    return {
        "plot": figures.drawn(timeline, chosen),
        "totals": figures.totals(figures.summed(chosen.of(timeline))),
        "endpoints": [
            _row(names.endpoint(pk), counts, chosen.query(endpoint_id=pk, policy_id=None), names.endpoint_url(pk))
            for pk, counts in endpoints[:SHOWN]
        ],
        "endpoints_more": max(0, len(endpoints) - SHOWN),
        "policies": [
            _row(names.policy(pk), counts, chosen.query(endpoint_id=None, policy_id=pk), names.policy_url(pk))
            for pk, counts in names.policy_sums[:SHOWN]
        ],
        "policies_more": max(0, len(names.policy_sums) - SHOWN),
    }


def _row(name: str, counts: Counts, query: str, url: str) -> dict[str, Any]:
    return {"name": name, "cells": cells(counts), "query": query, "url": url}


def _unreadable(names: Names) -> list[str]:
    """A sentence for each text of rates that cannot be read, of policies that the operator may see."""
    goes_on = _(
        "Policy %(id)s: the rates %(rates)s cannot be read. The last readable rates still"
        " apply: %(text)s. Edit the policy."
    )
    decides = _("Policy %(id)s: the rates %(rates)s cannot be read. Its “on error” decides. Edit the policy.")
    return [
        (goes_on if one.last_rates else decides)
        % {"id": one.policy.pk, "rates": shown(repr(one.policy.rates)), "text": one.last_rates}
        for one in find_unreadable()
        if names.may_choose(one.policy.pk)
    ]


def _store() -> dict[str, Any]:
    """The servers, as they describe themselves."""
    replies, error = _tried(lambda: default_limiter().store.info())
    return {"servers": workers.servers(replies or {}), "store_error": error}


def _reports() -> dict[str, Any]:
    """The workers, as they reported; this one alone while Redis cannot tell of the others."""
    told, error = _tried(lambda: (default_limiter().stored_revision(), health.reports()))
    revision, reports = told or (0, [health.health()])
    newest = PolicyChange.objects.exclude(action=PolicyChange.Action.RESET).order_by("-pk").first()
    return {
        **workers.propagation(revision, reports),
        "latency": workers.latency(reports),
        "errors": workers.errors(reports),
        "reports_error": error,
        "last_change": newest and {"at": moment(newest.at, seconds=True), "text": shown(newest)},
    }
