"""How counters stand and what comes of it, in the words and numbers that pages show."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.utils import timezone
from django.utils.formats import date_format, time_format
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ...engine.types import Bucket, BucketStatus
from ...operations.counters import why_shared
from ...operations.explain import Explanation
from ..base import shown, shown_subject

_SECOND_US = 10**6


def counter(bucket: Bucket, status: BucketStatus | None, at_us: int, names: Mapping[str, str]) -> dict[str, Any]:
    """One counter; ``status`` None = nobody knows how it stands. ``names`` is what ``named_callers`` says."""
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
        row["full"] = when_and_in(at_us, status.reset_after_us) if status.reset_after_us else None
        row["room"] = when_and_in(at_us, status.retry_after_us) if status.retry_after_us else None
        row["never"] = status.retry_after_us is None
    return row


def named_callers(callers: Collection[str]) -> dict[str, str]:
    """Callers as pages show them: users with their names, in one query."""
    users = get_user_model()
    ids = {}
    for caller in callers:
        kind, _colon, value = caller.partition(":")
        if kind == "user":
            try:
                ids[caller] = users._meta.pk.to_python(value)
            except ValidationError:
                continue  # of an earlier user model
    found = users._default_manager.in_bulk(set(ids.values())) if ids else {}
    names = {caller: f"{shown(caller)} ({shown(found[pk])})" for caller, pk in ids.items() if pk in found}
    return {caller: names.get(caller, shown_subject(caller)) for caller in callers}


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
    words["until"] = when_and_in(decision.at_us, decision.retry_after_us)
    return _("%(request)s would be refused by %(by)s, until %(until)s.") % words


def when_and_in(at_us: int, wait_us: int) -> str:
    """``14:05:12 (in 42 s)``: the operator's local time, with the date unless it is today's."""
    words = {"time": clock((at_us + wait_us) / _SECOND_US), "span": span(wait_us / _SECOND_US)}
    return _("%(time)s (in %(span)s)") % words


def clock(at: float) -> str:
    """A Unix time as local time to the second, with the date unless it is today's."""
    local = timezone.localtime(datetime.fromtimestamp(at, tz=UTC))
    text = time_format(local, "H:i:s")
    if local.date() == timezone.localtime(datetime.now(UTC)).date():
        return text
    return f"{date_format(local, 'SHORT_DATE_FORMAT')} {text}"


def span(seconds: float) -> str:
    """A length of time in the unit that suits it, rounded up."""
    for unit, size, text in (("s", 1, _("%d s")), ("min", 60, _("%d min")), ("h", 3600, _("%d h"))):
        count = math.ceil(seconds / size)
        if count < {"s": 120, "min": 120, "h": 48}[unit]:
            return text % count
    days = math.ceil(seconds / 86_400)
    return ngettext("%d day", "%d days", days) % days
