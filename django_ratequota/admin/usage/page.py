"""The Live usage page: requests over time, the busiest callers, refusals, workers and Redis servers.

Operators who may only see overrides see the counts of all requests, but of no policy that they may not see.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django import forms
from django.contrib import messages
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...conf import settings
from ...engine.types import BucketStatus
from ...models import Endpoint, PolicyChange
from ...monitoring import health
from ...monitoring.refusals import Refusal
from ...monitoring.timeline import Counts, Timeline, TopCaller
from ...operations.tightest import tightest
from ...policies.limit_names import limit_name
from ...policies.unreadable import find_unreadable
from ...runtime import default_limiter
from ..explain.block import BlockLinks
from ..formatting import bar_percent, moment, number_text, shown
from ..names import caller_names, caller_text, limits_text
from ..pages import AdminPage, Replies, is_id, reply, unanswered
from . import workers
from .counts import (
    SPANS,
    Selection,
    cells,
    chart,
    most_refused,
    newest_refusals,
    read_timeline,
    sum_counts,
    top_callers,
    totals,
)
from .labels import MOST_LISTED, VisibleNames, explain_url, refusal_row

_MOST_CALLERS = 10
_MOST_REFUSALS = 50
_TOP_TITLES = {
    "admitted": _("Most requests admitted"),
    "refused": _("Most requests refused"),
    "would_refuse": _("Most requests that log mode would have refused"),
}
_TOP_NOTES = {
    "hour": _("Callers are counted per clock hour. These counts cover the current hour and the one before."),
    "day": _("Callers are counted per clock hour. These counts cover the current hour and the 24 before."),
    "week": _("Callers are recorded for the last 48 hours only."),
}


class UsagePage(AdminPage):
    """What happens now, and in the last hour, day or week."""

    path, name = "usage/", "usage"
    media = forms.Media(
        css={"all": ["django_ratequota/plots.css", "django_ratequota/usage.css"]}, js=["django_ratequota/usage.js"]
    )

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the link from a policy to the requests that it limited."""
        return [(self.url(query={"span": "day", "policy": str(obj.pk)}), _("Live usage"))]

    def view(self, request: Any) -> Any:
        """Return the page. Each part that Redis does not answer says so; the others are shown."""
        names = VisibleNames(self.admin, request)
        selection = self._selection(request, names)
        ask = Replies()
        propagation = _workers(ask)  # first, because reading the callers' limits loads the newest policies
        timeline, timeline_error = ask(lambda: read_timeline(selection))
        tops, tops_error = ask(lambda: top_callers(selection, _MOST_CALLERS))
        refusals, refusals_error = ask(lambda: newest_refusals(selection, names.endpoints, _MOST_REFUSALS))
        names.read(selection, timeline, refusals or ())
        callers = [top.caller for rows in (tops or {}).values() for top in rows]
        place = names.place(selection)
        standings = (
            ask(lambda: tightest(dict.fromkeys(callers), place.name if place else None))[0] if callers else None
        )
        users = caller_names([*callers, *(refusal.caller for refusal in refusals or ())])
        pairs = [(caller, "") for caller in callers] + [(one.caller, one.ip) for one in refusals or ()]
        blocks = BlockLinks(self.admin, request, pairs, "usage")
        context = {
            "title": gettext("Live usage: %s") % names.title(selection),
            **self._choices(selection, names),
            **_counted(timeline, selection, names),
            "timeline_error": timeline_error,
            "tops": [
                {
                    "title": _TOP_TITLES[outcome],
                    "rows": [
                        self._top(top, users, selection, place, blocks)
                        | {"tightest": _standing((standings or {}).get(top.caller))}
                        for top in rows
                    ],
                }
                for outcome, rows in (tops or {}).items()
                if selection.policy_id is None or outcome != "admitted"
            ],
            "tops_error": tops_error,
            "tops_partial": selection.policy_id is not None,
            "tops_note": _TOP_NOTES[selection.span],
            "refusals": [self._refusal(refusal, users, names, blocks) for refusal in refusals or ()],
            "refusals_error": refusals_error,
            "absent": _absent(),
            **_servers(ask),
            **propagation,
            "unreadable": _unreadable(names),
        }
        return self.render(request, "usage.html", context)

    def _selection(self, request: Any, names: VisibleNames) -> Selection:
        """Return the selection in the query string; warns of parameters that are ignored."""
        found = self.known_parameters(
            request,
            {
                "span": SPANS.__contains__,
                "endpoint": is_id,
                "policy": lambda text: is_id(text) and names.may_select(int(text)),
            },
        )
        span: Any = found["span"] or "hour"
        ids = {name: int(found[name]) if found[name] else None for name in ("endpoint", "policy")}
        if None not in ids.values():
            ids["endpoint"] = None
            text = _(
                "The endpoint was ignored: requests are counted by endpoint or by policy, not by both. "
                "These are the policy's counts."
            )
            self.admin.message_user(request, text, messages.WARNING)
        refresh = request.GET.get("refresh") == "1"
        return Selection(span=span, endpoint_id=ids["endpoint"], policy_id=ids["policy"], refresh=refresh)

    def _choices(self, selection: Selection, names: VisibleNames) -> dict[str, Any]:
        """Return the choices of the page's form."""
        endpoints = dict.fromkeys([*names.endpoints, 0])
        if selection.endpoint_id is not None:
            endpoints.setdefault(selection.endpoint_id)
        return {
            "selection": selection,
            "spans": [(span, text, span == selection.span) for span, text in SPANS.items()],
            "endpoint_choices": [(str(pk), names.endpoint(pk), pk == selection.endpoint_id) for pk in endpoints],
            "policy_choices": [(str(pk), names.policy(pk), pk == selection.policy_id) for pk in names.policies],
        }

    def _top(
        self,
        top: TopCaller,
        users: Mapping[str, str],
        selection: Selection,
        place: Endpoint | None,
        blocks: BlockLinks,
    ) -> dict[str, Any]:
        url = explain_url(self.site, top.caller, place.name if place else "")
        # What a policy admitted is not counted by caller, so neither that nor the share refused is known.
        known = slice(None) if selection.policy_id is None else slice(1, 3)
        return {
            "name": caller_text(top.caller, users),
            "query": url,
            "cells": cells(top.counts)[known],
            "block": blocks.link(top.caller),
        }

    def _refusal(
        self, refusal: Refusal, users: Mapping[str, str], names: VisibleNames, blocks: BlockLinks
    ) -> dict[str, Any]:
        ids = dict.fromkeys(b.policy_id for b in refusal.buckets if b.refused and b.policy_id in names.policies)
        return refusal_row(self.site, refusal, users) | {
            "block": blocks.link(refusal.caller, refusal.ip),
            "error": shown(refusal.error),
            "policies": [{"text": names.policy(pk), "url": names.policy_url(pk)} for pk in ids if pk],
        }


def _counted(timeline: Timeline | None, selection: Selection, names: VisibleNames) -> dict[str, Any]:
    """Return the chart, its totals, and the tables of endpoints and policies."""
    if timeline is None:
        return {}
    endpoints = most_refused(timeline.endpoints)
    return {
        "plot": chart(timeline, selection),
        "totals": totals(sum_counts(timeline.total)),
        "incomplete": not timeline.complete,
        "endpoints": [
            _row(names.endpoint(pk), counts, selection.query(endpoint_id=pk, policy_id=None), names.endpoint_url(pk))
            for pk, counts in endpoints[:MOST_LISTED]
        ],
        "endpoints_more": max(0, len(endpoints) - MOST_LISTED),
        "policies": [_policy_row(pk, counts, selection, names) for pk, counts in names.policy_sums[:MOST_LISTED]],
        "policies_more": max(0, len(names.policy_sums) - MOST_LISTED),
    }


def _standing(status: BucketStatus | None) -> dict[str, Any] | None:
    """Return the bar of a counter and its words; None where there is none."""
    if status is None:
        return None
    words = {"used": number_text(status.used), "limit": number_text(status.limit)}
    return {
        "status": status,
        "over": not status.allowed,
        "percent": bar_percent(status.used, status.limit),
        "text": gettext("%(used)s of %(limit)s used") % words,
        "title": limits_text([limit_name(status.bucket)]),
    }


def _row(name: str, counts: Counts, query: str, url: str) -> dict[str, Any]:
    return {"name": name, "cells": cells(counts), "query": query, "url": url}


def _policy_row(pk: int, counts: Counts, selection: Selection, names: VisibleNames) -> dict[str, Any]:
    query = selection.query(endpoint_id=None, policy_id=pk)
    return _row(names.policy(pk), counts, query, names.policy_url(pk))


def _unreadable(names: VisibleNames) -> list[str]:
    """Return a sentence for each policy that the operator may see and whose rates cannot be read."""
    text = _("Policy %(id)s: the rates %(rates)s cannot be read. Its “on error” decides. Edit the policy.")
    return [
        text % {"id": policy.pk, "rates": shown(repr(policy.rates))}
        for policy in find_unreadable()
        if names.may_select(policy.pk)
    ]


def _servers(ask: Replies) -> dict[str, Any]:
    """Return the table of Redis servers."""
    infos, error = ask(lambda: {} if (store := default_limiter().store).absent else store.info())
    return {"servers": [workers.server(name, info) for name, info in (infos or {}).items()], "store_error": error}


def _absent() -> str:
    """Return why there is no server, so that nothing is recorded, as a sentence; "" = there should be one."""
    if not reply(lambda: default_limiter().store.absent)[0]:
        return ""
    return unanswered("memory" if settings.enabled else "disabled")


def _workers(ask: Replies) -> dict[str, Any]:
    """Return what the workers reported; without an answer of Redis, the state of this worker alone."""
    mine = [health.health()]
    found, error = ask(
        lambda: (default_limiter().stored_revision(), mine if _absent() else workers.current_reports())
    )
    revision, reports = found or (None, mine)
    newest = PolicyChange.objects.exclude(action=PolicyChange.Action.RESET).order_by("-pk").first()
    return {
        **workers.propagation(revision, reports),
        "latency": workers.latency(reports),
        "errors": workers.errors(reports),
        "reports_error": error,
        "last_change": newest and {"at": moment(newest.at, seconds=True), "text": shown(newest)},
    }
