"""How the store and the workers do, and the proof that the newest policies are live on all of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from django.template.defaultfilters import filesizeformat
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ...conf import settings
from ...monitoring.health import NO_BREAKER, Health, published_at, state_of
from ...store.server import server_version
from ...utils.histogram import merged, quantile
from ..formatting import milliseconds, moment, number_text, shown, uptime

_STATES = {
    "live": _("up to date"),
    "idle": _("no decision since"),
    "behind": _("behind"),
    "fresh": _("no policies read yet"),
    "silent": _("silent"),
}
#: States in which a worker judges nothing by older policies.
_SOUND = frozenset({"live", "idle"})
#: Workers of the table; what is more is counted.
_SHOWN = 50


def propagation(revision: int, workers: Sequence[Health]) -> dict[str, Any]:
    """What the page says about the revision and each worker."""
    states = [state_of(worker, revision) for worker in workers]
    # Those in trouble first.
    order = sorted(range(len(workers)), key=lambda at: (states[at] in _SOUND, workers[at].process))
    rows = [_row(workers[at], states[at]) for at in order[:_SHOWN]]
    return {
        "proof": _proof(revision, workers, states),
        "idle": _idle(states.count("idle")) if revision else "",
        "complaints": _complaints(Counter(states)) if revision else [],
        "complete": "live" in states and _SOUND.issuperset(states),
        "workers": rows,
        "workers_more": len(workers) - len(rows),
    }


def _proof(revision: int, workers: Sequence[Health], states: Sequence[str]) -> str:
    if not workers:
        if not settings.report_seconds:
            return gettext("Workers do not report: REPORT_SECONDS is 0.")
        return gettext("No worker has reported in the last minute.")
    if not revision:
        return gettext("No revision has been published yet.")
    at = published_at(revision)
    published = gettext("%(revision)d (published %(when)s)") if at else "%(revision)d"
    live = [worker for worker, state in zip(workers, states, strict=True) if state == "live"]
    words = {
        "revision": published % {"revision": revision, "when": moment(at, seconds=True) if at else ""},
        "live": len(live),
        "all": len(workers),
    }
    if not live:
        text = ngettext(
            "Revision %(revision)s is live on %(live)d of %(all)d worker.",
            "Revision %(revision)s is live on %(live)d of %(all)d workers.",
            len(workers),
        )
        return text % words
    # Since each of them has had it; no earlier than it was published, whatever their clocks say.
    since = datetime.fromtimestamp(max(worker.at - worker.policies_age for worker in live), UTC)
    text = ngettext(
        "Revision %(revision)s is live on %(live)d of %(all)d worker since %(since)s.",
        "Revision %(revision)s is live on %(live)d of %(all)d workers since %(since)s.",
        len(workers),
    )
    return text % {**words, "since": moment(max(since, at or since), seconds=True)}


def _idle(count: int) -> str:
    text = ngettext(
        "%(count)d worker has decided nothing since: it reads the newest policies before its next decision.",
        "%(count)d workers have decided nothing since: each reads the newest policies before its next decision.",
        count,
    )
    return text % {"count": count} if count else ""


def _complaints(states: Counter[str]) -> list[str]:
    said = []
    if count := states["behind"]:
        said.append(
            ngettext(
                "%(count)d worker is behind: it has decided by older policies since. Its log says why.",
                "%(count)d workers are behind: they have decided by older policies since. Their logs say why.",
                count,
            )
            % {"count": count}
        )
    if count := states["fresh"]:
        said.append(
            ngettext(
                "%(count)d worker has read no policies yet: it does before its first decision.",
                "%(count)d workers have read no policies yet: each does before its first decision.",
                count,
            )
            % {"count": count}
        )
    if count := states["silent"]:
        said.append(
            ngettext(
                "%(count)d worker is silent: it ended, hangs, or does not reach Redis.",
                "%(count)d workers are silent: they ended, hang, or do not reach Redis.",
                count,
            )
            % {"count": count}
        )
    return said


def _row(worker: Health, state: str) -> dict[str, Any]:
    return {
        "process": shown(worker.process),
        "revision": str(worker.revision or "–"),
        "state": state,
        "state_text": _STATES[state],
        "age": gettext("%(seconds)s s ago") % {"seconds": number_text(round(max(0.0, time.time() - worker.at)))},
        "breaker": _breaker(worker),
        "decisions": number_text(worker.decisions),
    }


def _breaker(worker: Health) -> str:
    down = ", ".join(f"{shown(server)} ({shown(reason)})" for server, reason in worker.down.items())
    breaker = gettext("open: %s") % down if down else gettext("closed")
    if not worker.errors:
        return breaker
    reasons = ", ".join(shown(reason) for reason in worker.errors)
    return gettext("%(breaker)s; errors: %(reasons)s") % {"breaker": breaker, "reasons": reasons}


def errors(workers: Sequence[Health]) -> list[str]:
    """A sentence for each kind of error that no breaker shows, with the message of one worker."""
    counts = Counter(reason for worker in workers for reason in worker.errors)
    messages = {reason: message for worker in workers for reason, message in worker.errors.items()}
    return [
        _error_text(reason, count) % {"count": count, "reason": shown(reason), "message": shown(messages[reason])}
        for reason, count in counts.most_common()
    ]


def _error_text(reason: str, count: int) -> str:
    if reason not in NO_BREAKER:
        return ngettext(
            "In the last minute at %(count)d worker: %(message)s",
            "In the last minute at %(count)d workers: %(message)s",
            count,
        )
    return ngettext(
        "In the last minute on_error decided requests at %(count)d worker (%(reason)s): %(message)s",
        "In the last minute on_error decided requests at %(count)d workers (%(reason)s): %(message)s",
        count,
    )


def latency(workers: Sequence[Health]) -> dict[str, Any]:
    """Decisions of the last minute, all workers together, and those that Redis did not give."""
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


def servers(infos: dict[str, dict[str, str]]) -> list[dict[str, Any]]:
    """A row for each server, by what it says of itself."""
    return [_server(name, info) for name, info in infos.items()]


def _server(name: str, info: dict[str, str]) -> dict[str, Any]:
    product, version = server_version(info)
    # Not every server tells all of it.
    limit, used, up = (_whole(info.get(key)) for key in ("maxmemory", "used_memory", "uptime_in_seconds"))
    policy, evicted = info.get("maxmemory_policy", ""), _whole(info.get("evicted_keys"))
    return {
        "name": shown(name),
        "version": shown(f"{product} {version}"),
        "up": "–" if up is None else uptime(up),
        "memory": "–" if used is None else filesizeformat(used),
        "limit": filesizeformat(limit) if limit else gettext("no limit"),
        "policy": shown(policy) or "–",
        "evicted": "–" if evicted is None else number_text(evicted),
        "loses": bool(evicted),
    }


def _whole(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None
