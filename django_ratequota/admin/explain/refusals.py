"""Recorded refusals as Explain shows them: one by the id that the response carried, and the caller's latest."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext_lazy as _

from ...models import Plan
from ...monitoring import refusals
from ...monitoring.collector import collector
from ...monitoring.refusals import CallerRefusals, Refusal
from ...operations.what_to_tell import policies_of, what_to_tell
from ...policies.limit_names import limit_name
from ..formatting import bar_percent, clock, shown
from ..names import caller_names, caller_text, explain_url, limits_text
from ..pages import reply, unanswered

#: The id of a refusal: ten letters and digits.
_ID = re.compile(r"[0-9A-Za-z]{10}", re.ASCII)
#: Maximum number of callers that are listed for each place where an organisation was refused.
_MAX_PEOPLE = 3
#: Maximum number of records that are listed for each place: a record has the refusals of one minute.
_MAX_RECORDS = 20


def find_refusal(refusal_id: str) -> tuple[Refusal | None, str]:
    """Return the refusal with that id, and the reason when Redis did not answer."""
    if not _ID.fullmatch(refusal_id):
        return None, ""

    def find() -> Refusal | None:
        collector.flush()  # it may be this worker's, and not sent yet
        return refusals.find_refusal(refusal_id)

    return reply(find)


def refusal_details(model_admin: Any, request: Any, refusal: Refusal, users: Mapping[str, str]) -> dict[str, Any]:
    """Return what the template shows of a refusal besides its fields; ``users`` names its subjects."""
    policies, at = policies_of(refusal), refusal.at.timestamp()
    seen = {pk for pk, policy in policies.items() if model_admin.has_view_permission(request, policy)}
    return {
        "tell": what_to_tell(refusal, policies, clock),
        "plan": Plan.objects.filter(pk=refusal.plan_id or 0).first(),
        "request": " ".join(shown(part) for part in (refusal.method, refusal.route, refusal.scope) if part),
        "names": users,
        "buckets": [
            {
                "bucket": bucket,
                "title": limits_text([limit_name(bucket)]),
                "used": bucket.limit - bucket.remaining,
                "percent": bar_percent(bucket.limit - bucket.remaining, max(1, bucket.limit)),
                # Nobody knows when a running request ends.
                "room": ""
                if bucket.retry_after is None or bucket.rate.concurrent
                else clock(at + bucket.retry_after),
                "link": model_admin.page_url("change", bucket.policy_id) if bucket.policy_id in seen else "",
            }
            for bucket in refusal.buckets
        ],
    }


def refused_places(model_admin: Any, caller: str, found: CallerRefusals | None, error: str) -> dict[str, Any]:
    """Return what refused a caller in the last day, by endpoint, and how far back that was searched.

    ``found`` and ``error`` are the reply of ``caller_refusals``.
    """
    by_place: dict[str, list[Refusal]] = {}
    for refusal in found.refusals if found else ():
        by_place.setdefault(refusal.place, []).append(refusal)
    users = caller_names({refusal.caller for own in by_place.values() for refusal in own})
    places = [_place(model_admin, caller, own, users) for own in by_place.values()]
    return {
        "places": places,
        "names": users,
        "by_people": any(place["people"] for place in places),
        "places_error": error and unanswered(error, _("Refusals cannot be looked up. Try again later.")),
        "searched": refusals.SEARCHED,
        "searched_since": found and found.since,
    }


def _place(model_admin: Any, caller: str, own: list[Refusal], users: Mapping[str, str]) -> dict[str, Any]:
    """Return the refusals at one endpoint, or at one route without an endpoint; the newest comes first.

    ``people`` are the callers refused most often, as (text, link); none where these are one's own refusals.
    ``records`` are the latest of several, each with the refusals by the same limits in one minute.
    """
    newest, callers = own[0], Counter[str]()
    for refusal in own:
        callers[refusal.caller] += refusal.count
    people = [] if callers.keys() == {caller} else [name for name, _count in callers.most_common(_MAX_PEOPLE)]
    return {
        "newest": newest,
        "count": callers.total(),
        "limits": dict.fromkeys(name for refusal in own for name in refusal.limits),
        "people": [(caller_text(name, users), explain_url(model_admin.admin_site, name)) for name in people],
        "more": len(callers) - len(people) if people else 0,
        "records": own[:_MAX_RECORDS] if len(own) > 1 else (),
        "more_records": max(0, len(own) - _MAX_RECORDS),
    }
