"""How counters stand and what comes of it, in the words and numbers that pages show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ...engine.types import Bucket, BucketStatus
from ...operations.counters import why_shared
from ...operations.explain import Explanation
from ..formatting import clock_and_wait, shown

_SECOND_US = 10**6


def counter(bucket: Bucket, status: BucketStatus | None, at_us: int, names: Mapping[str, str]) -> dict[str, Any]:
    """One counter; ``status`` None = nobody knows how it stands. ``names`` is what ``described_callers`` says."""
    row: dict[str, Any] = {
        "id": bucket.title,
        "title": shown(bucket.title),
        "subject": names[bucket.subject],
        "rate": str(bucket.rate),
        "logs": bucket.mode == "log",
        "why_shared": why_shared(bucket.counted_per, bucket.subject),
        "status": status,
    }
    if status is not None:
        row["percent"] = max(1 if status.used else 0, 100 * status.used // status.limit)
        row["full"] = clock_and_wait(at_us, status.reset_after_us) if status.reset_after_us else None
        row["room"] = clock_and_wait(at_us, status.retry_after_us) if status.retry_after_us else None
        row["never"] = status.retry_after_us is None
    return row


def verdict(explanation: Explanation) -> str:
    """What the next request would get, and until when."""
    decision, cost = explanation.decision, explanation.resolution.cost
    units = ngettext("The next request, of %(count)d unit,", "The next request, of %(count)d units,", cost)
    words = {"request": units % {"count": cost}, "by": shown(", ".join(decision.violated))}
    if decision.allowed:
        return _("%(request)s would be admitted.") % words
    if decision.retry_after_us is None:
        return _("%(request)s would be refused by %(by)s, and waiting does not help.") % words
    if decision.degraded:
        return _("%(request)s would be refused by %(by)s.") % words
    words["until"] = clock_and_wait(decision.at_us, decision.retry_after_us)
    return _("%(request)s would be refused by %(by)s, until %(until)s.") % words
