"""The counters of the Explain page: how much of each is used, and whether a boost can raise it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...engine.types import Bucket, BucketStatus
from ...operations.boosts import no_boost_reason
from ...operations.counters import peek, shared_reason
from ...operations.explain import Explanation, anchor_of
from ...policies.requests.caller import UNKNOWN
from ..formatting import bar_percent, clock_and_wait, shown
from ..names import described
from ..pages import reply


def counter_rows(
    explanation: Explanation,
    endpoints: Mapping[int, str],
    users: Mapping[str, str],
    boost_url: Callable[[int], str] | None,
) -> list[dict[str, Any]]:
    """Return the counters of the policies that won, and one row for each that is blocked or unlimited.

    ``endpoints`` names the endpoint by the policy's id, ``users`` the subjects (see ``caller_names``). With
    ``boost_url``, rows lead to a boost of the policy, or say why not.
    """
    statuses, at_us = _live(explanation), explanation.decision.at_us

    def row(bucket: Bucket) -> dict[str, Any]:
        if bucket.subject == UNKNOWN != explanation.customer:
            return _each(bucket, described(explanation.customer, users))
        return _counter(bucket, statuses.get(bucket), at_us, users)

    counters: list[dict[str, Any]] = []
    for candidate in explanation.candidates:
        policy = candidate.policy
        why_not = no_boost_reason(explanation, policy) if candidate.won and boost_url else ""
        link = boost_url(policy.id) if boost_url and not why_not else ""
        common = {"policy": policy.id, "boost": link, "no_boost_reason": why_not}
        counters += [{**row(bucket), **common} for bucket in candidate.buckets]
        if candidate.won and not candidate.buckets:
            title = endpoints.get(policy.id, "")
            counters.append({"title": title, "word": policy.text, "logs": policy.mode == "log", **common})
    return counters + [row(bucket) for bucket in explanation.built_in]


def _live(explanation: Explanation) -> dict[Bucket, BucketStatus]:
    """Return how the counters stand; nothing where Redis gives no answer."""
    decision = explanation.decision
    if decision.degraded:
        return {}
    if decision.blocked_by:
        # The check of a blocked caller reads no counters.
        return reply(lambda: peek(explanation.resolution.buckets))[0] or {}
    return {status.bucket: status for status in decision.statuses}


def _each(bucket: Bucket, who: str) -> dict[str, Any]:
    """Return the row for the counters that an organisation's callers have each, of which none was named."""
    return {
        "title": shown(bucket.title),
        "subject": who,
        "each": True,
        "rate": str(bucket.rate),
        "logs": bucket.mode == "log",
    }


def _counter(bucket: Bucket, status: BucketStatus | None, at_us: int, users: Mapping[str, str]) -> dict[str, Any]:
    """Return one counter for the template; ``status`` None = unknown."""
    row: dict[str, Any] = {
        "id": bucket.title,
        "title": shown(bucket.title),
        "subject": described(bucket.subject, users),
        "rate": str(bucket.rate),
        "anchor": anchor_of(bucket),
        "logs": bucket.mode == "log",
        "shared_reason": shared_reason(bucket.counted_per, bucket.subject),
        "status": status,
    }
    if status is not None:
        row["over"] = not status.allowed
        row["percent"] = bar_percent(status.used, status.limit)
        row["full"] = clock_and_wait(at_us, status.reset_after_us) if status.reset_after_us else None
        row["room"] = clock_and_wait(at_us, status.retry_after_us) if status.retry_after_us else None
        row["never"] = status.retry_after_us is None
    return row
