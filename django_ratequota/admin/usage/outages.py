"""Outages of Redis in words, for the pages that tell of them."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any

from django.utils import timezone
from django.utils.formats import date_format, time_format
from django.utils.translation import gettext, ngettext_lazy

from ...operations.outages import Away, outages
from ...operations.texts import local_time
from ..formatting import isolated, number_text

_OUTCOMES: dict[str, Any] = {
    "allow": ngettext_lazy(
        "%(count)s request was admitted without limits", "%(count)s requests were admitted without limits", "number"
    ),
    "deny": ngettext_lazy("%(count)s request was refused", "%(count)s requests were refused", "number"),
    "local": ngettext_lazy(
        "%(count)s request was decided by its worker alone",
        "%(count)s requests were decided by their workers alone",
        "number",
    ),
}


def outage_texts(hours: int = 24, policy_ids: Collection[int] | None = None) -> list[str]:
    """Return a sentence for each outage of the last hours; with ``policy_ids``, where one of these decided."""
    return [sentence(one) for one in outages(timezone.now() - timedelta(hours=hours), policy_ids)]


def sentence(away: Away) -> str:
    """Return from when until when it was, and what became of the requests."""
    parts = [
        text % {"count": number_text(away.requests[outcome]), "number": away.requests[outcome]}
        for outcome, text in _OUTCOMES.items()
        if away.requests[outcome]
    ]
    return gettext("Redis was unavailable %(span)s (%(requests)s).") % {
        "span": _span(away),
        "requests": ", ".join(parts),
    }


def _span(away: Away) -> str:
    """Return from when until when, to the minute, with the date unless it is today's."""
    begin, end = local_time(away.began_at), local_time(away.ended_at)
    first, last = time_format(begin, "H:i"), time_format(end, "H:i")
    text = first if first == last and begin.date() == end.date() else f"{first}–{last}"
    if begin.date() != local_time(timezone.now()).date():
        text = f"{date_format(begin, 'SHORT_DATE_FORMAT')} {text}"
    return isolated(text)
