"""The counters of the Explain page: how much of each is used, and whether a boost can raise it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from django.utils.translation import gettext

from ...engine.rates import BLOCKED
from ...engine.types import Bucket, BucketStatus
from ...monitoring.health import state_of
from ...operations.counters import is_shared, own_title, peek, slots_by_worker
from ...operations.explain import Explanation, anchor_of
from ...operations.overrides import is_boost, no_boost_reason
from ...policies.facts import to_datetime
from ...policies.limit_names import limit_name
from ...policies.requests.caller import UNKNOWN
from ..formatting import bar_percent, clock, clock_and_wait, moment, shown
from ..names import caller_text, limits_text
from ..pages import reply
from ..usage.status import STATES

#: Workers of a limit of concurrent requests that are listed, those with the oldest requests first.
_MOST_WORKERS = 10


def counter_rows(
    explanation: Explanation,
    users: Mapping[str, str],
    policies: Mapping[int, dict[str, Any]],
    boost_url: Callable[[int], str] | None,
) -> list[dict[str, Any]]:
    """Return the counters of the policies that won, and one row for each that is blocked or unlimited.

    ``users`` names the subjects (see ``caller_names``), ``policies`` has what the page shows of the policies. With
    ``boost_url``, rows lead to a boost of the policy, or say why not.
    """
    statuses, at_us = _live(explanation), explanation.decision.at_us

    def row(bucket: Bucket) -> dict[str, Any]:
        common = {"title": limits_text([limit_name(bucket)]), "rate": str(bucket.rate)}
        if bucket.subject == UNKNOWN != explanation.customer:
            return {**common, "subject": caller_text(explanation.customer, users), "each": True}
        return {
            **common,
            "id": own_title(bucket),
            "subject": caller_text(bucket.subject, users),
            "anchor": anchor_of(bucket),
            "shared": is_shared(bucket.counted_per, bucket.subject),
            **_standing(statuses.get(bucket), at_us),
            **(_slots(statuses[bucket]) if bucket.rate.concurrent and bucket in statuses else {}),
        }

    counters: list[dict[str, Any]] = []
    for policy, endpoint, buckets in explanation.resolution.applied:
        why_not = no_boost_reason(explanation, policy) if boost_url else ""
        common = {
            "scope": endpoint.name if endpoint else "",
            "policy": policies.get(policy.id) or {"id": policy.id},
            "boost": boost_url(policy.id) if boost_url and (not why_not or is_boost(policy)) else "",
            "boosted": moment(to_datetime(policy.ends_us or 0)) if boost_url and is_boost(policy) else "",
            "no_boost_reason": why_not,
        }
        counters += [{**row(bucket), **common} for bucket in buckets]
        if not buckets:
            title = shown(endpoint.name) if endpoint else gettext("all endpoints")
            counters.append({"title": title, "word": policy.text, "logs": policy.mode == "log", **common})
    return counters + [row(bucket) for bucket in explanation.built_in]


def fullest_first(row: dict[str, Any]) -> tuple[bool, float]:
    """Return a sort key: blocked policies, then counters by the share that is used, then what counts nothing."""
    status = row.get("status")
    return row.get("word") != BLOCKED, -(status.used / status.limit if status else -1)


def _live(explanation: Explanation) -> dict[Bucket, BucketStatus]:
    """Return how the counters stand; nothing where Redis gives no answer."""
    decision = explanation.decision
    if decision.degraded:
        return {}
    if decision.blocked_by:
        # The check of a blocked caller reads no counters.
        return reply(lambda: peek(explanation.resolution.buckets))[0] or {}
    return {status.bucket: status for status in decision.statuses}


def _standing(status: BucketStatus | None, at_us: int) -> dict[str, Any]:
    """Return how one counter stands, for the template; ``status`` None = unknown."""
    if status is None:
        return {}
    return {
        "status": status,
        "over": not status.allowed,
        "percent": bar_percent(status.used, status.limit),
        "full": clock_and_wait(at_us, status.reset_after_us) if status.reset_after_us else None,
        "room": clock_and_wait(at_us, status.retry_after_us) if status.retry_after_us else None,
    }


def _slots(status: BucketStatus) -> dict[str, Any]:
    """Return how many requests run, which may be more than a lowered limit, in which workers, and since when."""
    found = reply(lambda: slots_by_worker(status.bucket))[0] or []
    workers = [
        {
            "name": shown(worker.process) if worker else gettext("Workers that do not report"),
            "state": STATES["silent"] if worker and state_of(worker, 0) == "silent" else "",
            "running": len(held),
            "since": clock(held[0].since_us // 10**6),
        }
        for worker, held in found[:_MOST_WORKERS]
    ]
    more = len(found) - len(workers)
    return {"slots": True, "running": status.used + status.debt, "workers": workers, "workers_more": more}
