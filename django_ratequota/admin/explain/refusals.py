"""Recorded refusals as Explain shows them: one by the id that the response carried, and the latest."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.utils.translation import gettext_lazy as _

from ...models import Plan, RatePolicy
from ...monitoring import refusals
from ...monitoring.collector import collector
from ...monitoring.refusals import CallerRefusals, Refusal
from ..formatting import bar_percent, clock, revision_text, shown
from ..names import caller_names, caller_text, described, described_callers
from ..pages import reply, unanswered
from ..usage.labels import explain_url

#: The id of a refusal: ten letters and digits.
_ID = re.compile(r"[0-9A-Za-z]{10}", re.ASCII)
_MAX_REFUSALS = 10
#: Most callers that are named for each place where an organisation was refused.
_MAX_PEOPLE = 3


def find_refusal(refusal_id: str) -> tuple[Refusal | None, str]:
    """Return the refusal with that id, and the reason when Redis did not answer."""
    return reply(lambda: _found(refusal_id)) if _ID.fullmatch(refusal_id) else (None, "")


def _found(refusal_id: str) -> Refusal | None:
    found = refusals.find_refusal(refusal_id)
    if found is None:
        collector.flush()  # it may be this worker's, and not sent yet
        found = refusals.find_refusal(refusal_id)
    return found


def refusal_details(model_admin: Any, request: Any, refusal: Refusal, users: Mapping[str, str]) -> dict[str, Any]:
    """Return all that was recorded of a refusal, for the template; ``users`` names its subjects."""
    plan = Plan.objects.filter(pk=refusal.plan_id).first() if refusal.plan_id is not None else None
    policies = RatePolicy.objects.in_bulk([b.policy_id for b in refusal.buckets if b.policy_id is not None])
    links = {
        pk: model_admin.page_url("change", pk)
        for pk, policy in policies.items()
        if model_admin.has_view_permission(request, policy)
    }
    at = refusal.at.timestamp()
    return {
        "id": refusal.id,
        "at": clock(at),
        "count": refusal.count,
        "caller": described(refusal.caller, users),
        "ip": shown(refusal.ip),
        "plan": shown(plan.name) if plan else "",
        "scope": shown(refusal.scope),
        "route": shown(refusal.route),
        "method": shown(refusal.method),
        "cost": refusal.cost,
        "violated": shown(", ".join(refusal.violated)),
        "revision": revision_text(refusal.revision),
        "error": shown(refusal.error),
        "buckets": [
            {
                "title": shown(bucket.title),
                "subject": described(bucket.subject, users),
                "rate": shown(bucket.rate),
                "refused": bucket.refused,
                "limit": bucket.limit,
                "used": bucket.limit - bucket.remaining,
                "remaining": bucket.remaining,
                "percent": bar_percent(bucket.limit - bucket.remaining, max(1, bucket.limit)),
                "room": None if bucket.retry_after is None else clock(at + bucket.retry_after),
                "policy": bucket.policy_id,
                "link": links.get(bucket.policy_id, ""),
            }
            for bucket in refusal.buckets
        ],
    }


@dataclass(slots=True)
class RefusedPlace:
    """The refusals of one caller at one endpoint, or at one route without an endpoint."""

    name: str
    #: Link to the newest of them.
    link: str
    #: When the newest was decided.
    last: str
    endpoint: str
    ip: str
    count: int = 0
    violated: list[str] = field(default_factory=list)
    #: Caller -> how often that one was refused there.
    callers: Counter[str] = field(default_factory=Counter)
    #: The callers refused most often, as (text, link), and how many others there are; none for one's own refusals.
    people: list[tuple[str, str]] = field(default_factory=list)
    more: int = 0


def refused_places(model_admin: Any, caller: str, found: CallerRefusals | None, error: str) -> dict[str, Any]:
    """Return what refused a caller in the last day, by endpoint, and how far back that was searched.

    ``found`` and ``error`` are the reply of ``caller_refusals``.
    """
    places: dict[tuple[str, str], RefusedPlace] = {}
    for refusal in found.refusals if found else ():
        key = (refusal.method, refusal.scope or refusal.route)
        if key not in places:
            places[key] = RefusedPlace(
                name=shown(" ".join(key)),
                link=model_admin.page_url("explain", query={"id": refusal.id}),
                last=clock(refusal.at.timestamp()),
                endpoint=refusal.scope,
                ip=refusal.ip,
            )
        place = places[key]
        place.count += refusal.count
        place.callers[refusal.caller] += refusal.count
        place.violated += [name for name in map(shown, refusal.violated) if name not in place.violated]
    since = found.since if found else None
    most = {
        key: place.callers.most_common(_MAX_PEOPLE) for key, place in places.items() if {*place.callers} != {caller}
    }
    users = caller_names(name for people in most.values() for name, _count in people)
    for key, people in most.items():
        places[key].people = [
            (caller_text(name, users), explain_url(model_admin.admin_site, name)) for name, _count in people
        ]
        places[key].more = len(places[key].callers) - len(people)
    return {
        "places": list(places.values()),
        "by_people": bool(most),
        "places_error": error and unanswered(error, _("Refusals cannot be looked up. Try again later.")),
        "searched": refusals.SEARCHED,
        "searched_since": since and clock(since.timestamp()),
    }


def latest_refusals(model_admin: Any) -> list[dict[str, Any]]:
    """Return the latest refusals of all callers; none while Redis gives no answer."""
    found = reply(lambda: refusals.refusals(_MAX_REFUSALS))[0] or ()
    names = described_callers([refusal.caller for refusal in found])
    return [
        {
            "id": refusal.id,
            "link": model_admin.page_url("explain", query={"id": refusal.id}),
            "at": clock(refusal.at.timestamp()),
            "count": refusal.count,
            "caller": names[refusal.caller],
            "place": shown(f"{refusal.method} {refusal.route or refusal.scope}"),
            "violated": shown(", ".join(refusal.violated)),
        }
        for refusal in found
    ]
