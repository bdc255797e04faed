"""The page Traffic: requests over time, by endpoint and by caller, and the latest refusals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from operator import attrgetter
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...engine.types import BucketStatus
from ...models import Endpoint
from ...monitoring import refusals as recorded_refusals
from ...monitoring.refusals import Refusal
from ...monitoring.timeline import Counts, Span, TopCaller, timeline, top_callers
from ...operations.caller_limits import tightest
from ...operations.recorded import policies_by_id
from ...policies.limit_names import limit_name
from ..explain.overrides import block_links
from ..formatting import bar_percent, number_text, percent
from ..names import caller_names, endpoint_name, explain_url, limits_text
from ..pages import AdminPage, is_id, reply, unanswered
from .chart import chart
from .status import outage_texts

SPANS: dict[Span, Any] = {"hour": _("last hour"), "day": _("last 24 hours"), "week": _("last week")}
#: Newest refusals that are searched for those of a selected endpoint or policy.
_SEARCHED = 500
#: Endpoints, callers and refusals that are listed.
_MOST = 10
#: The columns by which callers can be sorted.
_COLUMNS = {"admitted": _("Admitted"), "would_refuse": _("Log only"), "refused": _("Refused")}


class TrafficPage(AdminPage):
    """The requests of the last hour, day or week to all endpoints or to one."""

    name = "traffic"
    css = ("django_ratequota/plots.css", "django_ratequota/usage.css")

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the link from a policy to the requests that it limited."""
        return [(self.url(query={"span": "day", "policy": str(obj.pk)}), _("Traffic"))]

    def view(self, request: Any) -> Any:
        """Return the page, or why Redis does not answer."""
        endpoints = dict(Endpoint.objects.order_by("name").values_list("pk", "name"))
        span, endpoint_id, policy_id, order = self._selection(request)
        of: dict[str, Any] = {"span": span, "endpoint_id": endpoint_id, "policy_id": policy_id}
        policy = self.admin.get_queryset(request).filter(pk=policy_id).first()
        place = policy.endpoint.name if policy and policy.endpoint else endpoints.get(endpoint_id or 0)
        found, reason = reply(
            lambda: (timeline(**of), top_callers(**of, most=_MOST), newest_refusals(endpoint_id, policy_id, _MOST))
        )
        context: dict[str, Any] = {
            "title": _("Traffic"),
            "span": span,
            "spans": SPANS,
            "endpoint_id": endpoint_id,
            "endpoint_choices": {pk: endpoint_name(pk, endpoints) for pk in (*endpoints, 0, endpoint_id or 0)},
            "policy": policy,
            "outages": outage_texts(),
            "reason": reason and unanswered(reason, _("Traffic cannot be shown. Try again later.")),
        }
        if found is not None:
            over_time, tops, refusals = found
            by_endpoint = most_refused(over_time.endpoints)
            context |= {
                "plot": chart(over_time, span),
                "totals": cells(sum_counts(over_time.total)),
                "incomplete": not over_time.complete,
                "endpoints": [
                    (pk, endpoint_name(pk, endpoints), cells(counts)) for pk, counts in by_endpoint[:_MOST]
                ],
                "endpoints_more": max(0, len(by_endpoint) - _MOST),
                "columns": _COLUMNS,
                "order": order,
                **self._named(request, _sorted(tops, order), refusals, place),
            }
        return self.render(request, "traffic.html", context)

    def _selection(self, request: Any) -> tuple[Span, int | None, int | None, str]:
        """Return the span, the endpoint (0 = none, None = all) or the policy, and the order in the query string.

        Warns of parameters that are ignored.
        """
        checks = {
            "span": SPANS.__contains__,
            "endpoint": is_id,
            "policy": lambda text: is_id(text) and self.admin.get_queryset(request).filter(pk=text).exists(),
            "order": _COLUMNS.__contains__,
        }
        found: dict[str, Any] = self.known_parameters(request, checks)
        policy = int(found["policy"]) if found["policy"] else None
        # Requests are counted by endpoint or by policy, not by both.
        endpoint = int(found["endpoint"]) if found["endpoint"] and policy is None else None
        # Admitted requests are not counted by policy and caller.
        order = found["order"] or ("admitted" if policy is None else "refused")
        return found["span"] or "hour", endpoint, policy, order

    def _named(
        self, request: Any, callers: list[TopCaller], refusals: list[Refusal], endpoint: str | None
    ) -> dict[str, Any]:
        """Return the rows of callers, each with its fullest limit at the endpoint or anywhere, and of the refusals.

        They leave out the limits of policies that the operator may not see.
        """
        names = caller_names([*(top.caller for top in callers), *(one.caller for one in refusals)])
        pairs = [*((top.caller, "") for top in callers), *((one.caller, one.ip) for one in refusals)]
        blocks = block_links(self.admin, request, pairs, "traffic")
        full = reply(lambda: tightest([top.caller for top in callers], endpoint))[0] or {}
        ids = [*(one.bucket.policy_id for one in full.values()), *(pk for one in refusals for pk in one.against)]
        visible = {pk for pk, one in policies_by_id(ids).items() if self.admin.has_view_permission(request, one)}
        # A deleted one may have been any.
        hidden = set[int]() if self.admin.sees_all_policies(request) else {pk for pk in ids if pk} - visible
        return {
            "callers": [
                {
                    "caller": top.caller,
                    "url": explain_url(self.site, top.caller, endpoint or ""),
                    "cells": cells(top.counts),
                    "block": blocks.get((top.caller, "")),
                    "tightest": _standing(full.get(top.caller), hidden),
                }
                for top in callers
            ],
            "refusals": [
                (one, explain_url(self.site, one.caller), blocks.get((one.caller, one.ip)), hidden & {*one.against})
                for one in refusals
            ],
            "names": names,
        }


def _sorted(tops: Mapping[str, tuple[TopCaller, ...]], order: str) -> list[TopCaller]:
    """Return the callers with the highest counts of this outcome."""
    found = {top.caller: top for rows in tops.values() for top in rows}
    key = attrgetter(*(f"counts.{name}" for name in (order, "refused", "admitted")))
    return sorted(found.values(), key=key, reverse=True)[:_MOST]


def _standing(status: BucketStatus | None, hidden: Set[int]) -> dict[str, Any] | None:
    """Return the bar of a counter and its words; None where there is none, or its policy is one of these."""
    if status is None or status.bucket.policy_id in hidden:
        return None
    words = {"used": number_text(status.used), "limit": number_text(status.limit)}
    return {
        "over": not status.allowed,
        "percent": bar_percent(status.used, status.limit),
        "text": gettext("%(used)s of %(limit)s used") % words,
        "title": limits_text([limit_name(status.bucket)]),
    }


def sum_counts(counts: Iterable[Counts]) -> Counts:
    """Return the sum of the slots."""
    columns = zip(*((slot.admitted, slot.refused, slot.would_refuse) for slot in counts), strict=True)
    return Counts(*map(sum, columns))


def most_refused(sums: Mapping[int, Counts]) -> list[tuple[int, Counts]]:
    """Return (id, sum), the most refused first, then the most admitted."""
    return sorted(sums.items(), key=lambda row: (-row[1].refused, -row[1].would_refuse, -row[1].admitted, row[0]))


def cells(counts: Counts) -> list[str]:
    """Return the numbers of a table row: admitted, of these refused by log mode, refused, and the share refused."""
    numbers = [number_text(number) for number in (counts.admitted, counts.would_refuse, counts.refused)]
    return [*numbers, percent(counts.refused, counts.admitted + counts.refused)]


def newest_refusals(endpoint: int | None, policy: int | None, most: int) -> list[Refusal]:
    """Return the newest refusals of an endpoint or a policy, None = all, of any time; raises ``StoreError``.

    Of a policy also those that it only logged, which have no id. Endpoint 0 = requests that belong to none.
    """
    found = recorded_refusals.refusals(most if endpoint is None and policy is None else max(most, _SEARCHED))
    own = [
        one
        for one in found
        if (endpoint is None or endpoint in (one.endpoint_ids or (0,)))
        and (policy is None or any(each.refused and each.policy_id == policy for each in one.buckets))
    ]
    if policy is not None:
        own += [replace(one, id="") for one in recorded_refusals.would_be_refusals(policy, most)]
        own.sort(key=attrgetter("at"), reverse=True)
    return own[:most]
