"""What was decided when callers were refused: found by the id that their responses carried, and the latest."""

from __future__ import annotations

import re
from typing import Any

from django.contrib import messages
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from ...exceptions import StoreError
from ...models import Plan, RatePolicy
from ...monitoring import statistics
from ...operations.explain import Explanation
from ..base import RecordedAdmin, shown
from ..permissions import PolicyRights
from .counters import clock, named_callers

#: What responses carry: ten letters and digits.
_ID = re.compile(r"[0-9A-Za-z]{10}", re.ASCII)
_MAX_REFUSALS = 10


class Refusals(PolicyRights, RecordedAdmin):
    """Refusals as pages tell them, and the list of policies as a way to find one."""

    def changelist_view(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """The list; a search for the id of a refusal is told where it leads."""
        wanted = request.GET.get("q", "").strip()
        if request.method == "GET" and _ID.fullmatch(wanted) and self.has_view_permission(request):
            try:
                refusal = statistics.find_refusal(wanted)
            except StoreError:
                refusal = None
            if refusal is not None:
                text = _('{id} is the id of a refusal: <a href="{link}">see what was decided, and why</a>.')
                link = self.page_url("explain", query={"id": refusal.id})
                self.message_user(request, format_html(str(text), id=refusal.id, link=link), messages.INFO)
        return super().changelist_view(request, *args, **kwargs)

    def _told(self, request: Any, refusal: statistics.Refusal) -> dict[str, Any]:
        """A refusal as the page tells it."""
        plan = Plan.objects.filter(pk=refusal.plan_id).first() if refusal.plan_id is not None else None
        names = named_callers([refusal.caller, *(bucket.subject for bucket in refusal.buckets)])
        theirs = RatePolicy.objects.in_bulk([b.policy_id for b in refusal.buckets if b.policy_id is not None])
        return {
            "id": refusal.id,
            "at": clock(refusal.at.timestamp()),
            "iso": refusal.at.isoformat(),
            "count": refusal.count,
            "caller": names[refusal.caller],
            "ip": shown(refusal.ip),
            "plan": shown(plan.name) if plan else "",
            "scope": shown(refusal.scope),
            "route": shown(refusal.route),
            "method": shown(refusal.method),
            "cost": refusal.cost,
            "violated": shown(", ".join(refusal.violated)),
            "revision": refusal.revision,
            "error": shown(refusal.error),
            "buckets": [
                {
                    "title": shown(bucket.title),
                    "subject": names[bucket.subject],
                    "rate": shown(bucket.rate),
                    "refused": bucket.refused,
                    "limit": bucket.limit,
                    "used": bucket.limit - bucket.remaining,
                    "remaining": bucket.remaining,
                    "percent": max(0, min(100, 100 * (bucket.limit - bucket.remaining) // max(1, bucket.limit))),
                    "room": None
                    if bucket.retry_after is None
                    else clock(refusal.at.timestamp() + bucket.retry_after),
                    "policy": bucket.policy_id,
                    "link": self.page_url("change", bucket.policy_id)
                    if bucket.policy_id in theirs and self.has_view_permission(request, theirs[bucket.policy_id])
                    else "",
                }
                for bucket in refusal.buckets
            ],
        }

    def _refusals(self, explanation: Explanation | None, given: dict[str, str]) -> list[dict[str, Any]]:
        """The newest refusals, of this caller where there is one; none while Redis gives no answer."""
        caller = "" if explanation is None else explanation.context.caller.subject("caller", None) or ""
        try:
            found = statistics.refusals(_MAX_REFUSALS, caller)
        except StoreError:
            return []
        names = named_callers([refusal.caller for refusal in found])
        return [
            {
                "id": refusal.id,
                "link": self.page_url("explain", query={"id": refusal.id}),
                "at": clock(refusal.at.timestamp()),
                "count": refusal.count,
                "caller": names[refusal.caller],
                "place": shown(f"{refusal.method} {refusal.route or refusal.scope}"),
                "violated": shown(", ".join(refusal.violated)),
            }
            for refusal in found
            if refusal.id != given.get("id")
        ]


def find(wanted: str) -> tuple[statistics.Refusal | None, str]:
    """The refusal with that id, and why Redis could not say."""
    if not _ID.fullmatch(wanted):
        return None, ""
    try:
        return statistics.find_refusal(wanted), ""
    except StoreError as error:
        return None, error.reason
