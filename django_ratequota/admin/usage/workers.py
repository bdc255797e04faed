"""The workers' and servers' parts of the Live usage page: whether every worker applies the newest policies."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from django.template.defaultfilters import filesizeformat
from django.utils.html import format_html
from django.utils.translation import gettext, ngettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from ...changes.publication import published_at
from ...conf import settings
from ...monitoring import health
from ...monitoring.health import NO_BREAKER, Health, has_late_checkpoint, state_of
from ...store.base import server_version
from ...utils.histogram import merged, quantile
from ..formatting import duration, milliseconds, moment, number_text, revision_text, shown

_STATES = {
    "live": _("up to date"),
    "idle": _("idle"),
    "behind": _("behind"),
    "fresh": _("no policies loaded yet"),
    "silent": _("not reporting"),
    "unknown": "?",
}
#: States in which no worker decides by older policies.
_UP_TO_DATE = frozenset({"live", "idle"})
_IDLE: Any = ngettext_lazy(
    "%(count)d worker is idle: it has made no decision since, and loads the newest policies before its next one.",
    "%(count)d workers are idle: they have made no decision since, and load the newest policies before their "
    "next one.",
    "count",
)
_WARNINGS: dict[str, Any] = {
    "behind": ngettext_lazy(
        "%(count)d worker is behind: it has since decided by older policies. Check its log.",
        "%(count)d workers are behind: they have since decided by older policies. Check their logs.",
        "count",
    ),
    "fresh": ngettext_lazy(
        "%(count)d worker has loaded no policies yet. It loads them before its first decision.",
        "%(count)d workers have loaded no policies yet. They load them before their first decision.",
        "count",
    ),
    "silent": ngettext_lazy(
        "%(count)d worker does not report: it has ended, hangs, or cannot reach Redis.",
        "%(count)d workers do not report: they have ended, hang, or cannot reach Redis.",
        "count",
    ),
}
_LATE: Any = ngettext_lazy(
    "%(count)d worker has not saved its counts of quotas to the database for %(age)s. If it is killed, they are "
    "lost. Check its log.",
    "%(count)d workers have not saved their counts of quotas to the database for up to %(age)s. If one is "
    "killed, its counts are lost. Check their logs.",
    "count",
)
#: Workers listed; the others are counted.
_MOST_LISTED = 50


def current_reports() -> list[Health]:
    """Return what the workers reported; this worker's state as of now. Raises ``StoreError``.

    Its last report may be older than its last request.
    """
    mine = health.health()
    return [mine if worker.process == mine.process else worker for worker in health.reports()]


def propagation(revision: int | None, workers: Sequence[Health]) -> dict[str, Any]:
    """Return the context about the stored revision (None = unknown) and the workers; those in trouble come first."""
    states = ["unknown" if revision is None else state_of(worker, revision) for worker in workers]
    counts = Counter(states)
    order = sorted(range(len(workers)), key=lambda at: (states[at] in _UP_TO_DATE, workers[at].process))
    rows = [_row(workers[at], states[at]) for at in order[:_MOST_LISTED]]
    complaints = [text % {"count": counts[state]} for state, text in _WARNINGS.items() if counts[state] and revision]
    late = [worker.checkpoint_age for worker in workers if has_late_checkpoint(worker)]
    if late:
        complaints.append(_LATE % {"count": len(late), "age": duration(max(late))})
    return {
        "proof": _proof(revision, workers, states),
        "revision_number": str(revision) if revision and workers and published_at(revision) else "",
        "idle": _IDLE % {"count": counts["idle"]} if revision and counts["idle"] else "",
        "complaints": complaints,
        "complete": "live" in states and _UP_TO_DATE.issuperset(states),
        "workers": rows,
        "workers_more": len(workers) - len(rows),
    }


def _proof(revision: int | None, workers: Sequence[Health], states: Sequence[str]) -> str:
    if not workers:
        if not settings.statistics_seconds:
            return gettext("Workers do not report, because STATISTICS_SECONDS is 0.")
        return gettext("No worker has reported in the last minute.")
    if not revision:
        return gettext("No revision has been published yet.")
    at = published_at(revision)
    live = [worker for worker, state in zip(workers, states, strict=True) if state == "live"]
    words = {"revision": revision_text(revision), "live": len(live), "all": len(workers)}
    if not live:
        text = ngettext(
            "Revision %(revision)s is live on %(live)d of %(all)d worker.",
            "Revision %(revision)s is live on %(live)d of %(all)d workers.",
            len(workers),
        )
        return text % words
    # The last worker's load, but no earlier than the publication: the workers' clocks may differ.
    since = datetime.fromtimestamp(max(worker.at - worker.policies_age for worker in live), UTC)
    text = ngettext(
        "Revision %(revision)s is live on %(live)d of %(all)d worker since %(since)s.",
        "Revision %(revision)s is live on %(live)d of %(all)d workers since %(since)s.",
        len(workers),
    )
    return text % {**words, "since": moment(max(since, at or since), seconds=True)}


def _row(worker: Health, state: str) -> dict[str, Any]:
    age = gettext("%(seconds)s s ago") % {"seconds": number_text(round(max(0.0, time.time() - worker.at)))}
    text = format_html('<span class="ratequota-usage-state ratequota-usage-{}">{}</span>', state, _STATES[state])
    revision = "–" if not worker.revision else revision_text(worker.revision)
    if published_at(worker.revision):
        revision = format_html("{} <code>{}</code>", revision, worker.revision)
    cells = [text, revision, age, number_text(worker.decisions), _breaker(worker)]
    return {"name": shown(worker.process), "cells": cells}


def _breaker(worker: Health) -> str:
    down = ", ".join(f"{shown(server)} ({shown(reason)})" for server, reason in worker.down.items())
    breaker = gettext("open: %s") % down if down else gettext("closed")
    if not worker.errors:
        return breaker
    reasons = ", ".join(shown(reason) for reason in worker.errors)
    return gettext("%(breaker)s; errors: %(reasons)s") % {"breaker": breaker, "reasons": reasons}


def errors(workers: Sequence[Health]) -> list[str]:
    """Return a sentence for each kind of error that opens no breaker, with the message of one worker."""
    counts = Counter(reason for worker in workers for reason in worker.errors)
    messages = {reason: message for worker in workers for reason, message in worker.errors.items()}
    return [
        _error_text(reason, count) % {"count": count, "reason": shown(reason), "message": shown(messages[reason])}
        for reason, count in counts.most_common()
    ]


def _error_text(reason: str, count: int) -> str:
    if reason not in NO_BREAKER:
        return ngettext(
            "In the last minute, on %(count)d worker: %(message)s",
            "In the last minute, on %(count)d workers: %(message)s",
            count,
        )
    return ngettext(
        "In the last minute, on_error decided requests on %(count)d worker (%(reason)s): %(message)s",
        "In the last minute, on_error decided requests on %(count)d workers (%(reason)s): %(message)s",
        count,
    )


def latency(workers: Sequence[Health]) -> dict[str, Any]:
    """Return the number and duration of the last minute's decisions, and the decisions made without Redis."""
    counts = merged(worker.latency for worker in workers)
    degraded: Counter[str] = Counter()
    for worker in workers:
        degraded.update(worker.degraded)
    return {
        "decisions": number_text(sum(counts)),
        "p50": milliseconds(quantile(counts, 0.5)),
        "p99": milliseconds(quantile(counts, 0.99)),
        "degraded": [(shown(reason), number_text(count)) for reason, count in degraded.most_common()],
    }


def server(name: str, info: dict[str, str]) -> dict[str, Any]:
    """Return the row of a Redis server, from its INFO."""
    product, version = server_version(info)
    # Managed servers leave some of these out.
    limit, used, up = (_integer(info.get(key)) for key in ("maxmemory", "used_memory", "uptime_in_seconds"))
    evicted = _integer(info.get("evicted_keys"))
    memory = {"used": "–" if used is None else filesizeformat(used)}
    memory["limit"] = filesizeformat(limit) if limit else gettext("no limit")
    cells = [
        gettext("up"),
        shown(f"{product} {version}"),
        "–" if up is None else duration(up),
        gettext("%(used)s (%(limit)s)") % memory,
        shown(info.get("maxmemory_policy", "")) or "–",
        "–" if evicted is None else number_text(evicted),
    ]
    return {"name": shown(name), "cells": cells, "loses": bool(evicted)}


def _integer(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None
