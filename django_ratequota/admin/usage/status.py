"""Whether every worker decides by Redis and by the latest policies, and when Redis was unavailable: page Health."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.utils import timezone
from django.utils.formats import date_format, time_format
from django.utils.translation import gettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from ...conf import settings
from ...monitoring import health
from ...monitoring.health import NO_BREAKER, Health, has_late_checkpoint, is_of_another_site, state_of
from ...monitoring.rollup import KEEP_DAYS
from ...operations.outages import Away, outages
from ...operations.recorded import policies_by_id
from ...operations.texts import local_time
from ...runtime import default_limiter
from ...store.base import NEARLY_FULL, memory_ratio, server_version
from ..formatting import duration, isolated, number_text, revision_text, shown
from ..pages import AdminPage, reply, unanswered

#: The states of a worker.
STATES = {
    "live": _("up to date"),
    "idle": _("idle"),
    "fresh": _("no policies loaded yet"),
    "behind": _("behind"),
    "silent": _("not reporting"),
}
#: The problem in each of these states. In the others, a worker loads the latest policies before its next decision.
_TROUBLE = {
    "behind": _("Older policies still apply on %(workers)s. Check the log there."),
    "silent": _(
        "No reports come from %(workers)s. A worker that is not reporting has stopped, hangs or cannot reach Redis."
    ),
}
_LATE = _(
    "Quota usage on %(workers)s has been waiting for the database for up to %(age)s. It is lost if the worker is "
    "killed. Check the log there."
)
_OTHER_SITE = _(
    "Another site with another SECRET_KEY uses the same counters on %(workers)s. Give each site its own PREFIX "
    "unless the sites share their policies."
)
_AWAY = _("Redis at %(server)s is unavailable on %(workers)s (%(reason)s), so the “on error” of each policy applies.")
_UNDECIDED = _("In the last minute, “on error” was applied to requests on %(workers)s (%(reason)s): %(message)s")
_FAILED = _("In the last minute, on %(workers)s: %(message)s")
#: Workers that a sentence names.
_NAMED = 3
#: Workers and outages that are listed, policies of an outage, and those that are looked for, as some may be gone.
_MOST_LISTED, _MOST_POLICIES, _ASKED = 50, 3, 20
#: What became of requests during an outage.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of the workers as they reported it."""

    #: One sentence: the first problem, or that there is none.
    text: str
    #: good, bad, or "" where nothing is known.
    kind: str = ""
    #: Whether Redis answers.
    answered: bool = True
    #: The revision that is live.
    revision: str = ""
    #: A sentence for each cause.
    problems: list[str] = field(default_factory=list)
    #: Each worker with its state; those in trouble come first.
    workers: list[tuple[Health, str]] = field(default_factory=list)

    def rows(self) -> list[tuple[Health, Any, bool, int]]:
        """Return of each worker its state in words, whether that is bad, and the age of its report in seconds."""
        now = time.time()
        return [
            (worker, STATES[state], state in _TROUBLE, round(max(0.0, now - worker.at)))
            for worker, state in self.workers
        ]


def current_status() -> Status:
    """Return the status now."""
    found, reason = reply(lambda: (default_limiter().stored_revision(), _reports()))
    if found is None:
        text = unanswered(reason, _("The “on error” of each policy applies until it does."))
        return Status(text=text, kind="bad", answered=False, problems=[text])
    revision, reports = found
    if not reports and settings.statistics_seconds:
        return Status(text=gettext("No worker has reported in the last minute."))
    if not reports:
        return Status(text=gettext("Workers do not report, because STATISTICS_SECONDS is 0."))
    workers = [(worker, state_of(worker, revision or 0)) for worker in reports]
    workers.sort(key=lambda one: (one[1] not in _TROUBLE, one[0].process))
    problems = _problems(workers)
    live = {"revision": revision, "time": revision_text(revision)} if revision else {}
    return Status(
        text=problems[0] if problems else gettext("All changes are live."),
        kind="bad" if problems else "good",
        revision=gettext("Policy version %(revision)s, published %(time)s") % live if live else "",
        problems=problems,
        workers=workers,
    )


def _reports() -> list[Health]:
    """Return what the workers reported; of this one, whose report may be older than its last request, its state."""
    mine = health.health()
    return [mine if worker.process == mine.process else worker for worker in health.reports()]


def _problems(workers: list[tuple[Health, str]]) -> list[str]:
    """Return a sentence for each cause, with the workers that report it."""
    causes: dict[tuple[Any, str, str, str], list[Health]] = {}
    for worker, state in workers:
        found = [(_TROUBLE[state], "", "", "")] if state in _TROUBLE else []
        found += [(_LATE, "", "", "")] if has_late_checkpoint(worker) else []
        found += [(_OTHER_SITE, "", "", "")] if is_of_another_site(worker) else []
        found += [(_AWAY, reason, server, "") for server, reason in worker.down.items()]
        for reason, message in worker.errors.items():
            found.append((_UNDECIDED if reason in NO_BREAKER else _FAILED, reason, "", message))
        for cause in found:
            causes.setdefault(cause, []).append(worker)
    return [
        text
        % {
            "workers": _names(those),
            "age": duration(max(worker.checkpoint_age for worker in those)),
            "reason": shown(reason),
            "server": shown(server),
            "message": shown(message),
        }
        for (text, reason, server, message), those in causes.items()
    ]


def _names(workers: list[Health]) -> str:
    names = ", ".join(shown(worker.process) for worker in workers[:_NAMED])
    more = len(workers) - _NAMED
    return gettext("%(names)s and %(more)d more") % {"names": names, "more": more} if more > 0 else names


def outage_texts(hours: int = 24, policy_ids: Collection[int] | None = None) -> list[str]:
    """Return a sentence for each outage of the last hours; with ``policy_ids``, where one of these decided."""
    return [outage_text(one) for one in outages(timezone.now() - timedelta(hours=hours), policy_ids)]


def outage_text(away: Away) -> str:
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


class HealthPage(AdminPage):
    """Whether limits are enforced now, and when they were not."""

    name = "health"
    css = ("django_ratequota/usage.css",)

    def view(self, request: Any) -> Any:
        """Return the page; the outages are in the database, so it shows them while Redis is away."""
        status = current_status()
        infos = reply(lambda: default_limiter().store.info())[0] if status.answered else None
        problems = [text for name, info in (infos or {}).items() for text in _memory_problems(name, info)]
        rows = status.rows()
        away = outages(timezone.now() - timedelta(days=KEEP_DAYS))
        context = {
            "title": _("Health"),
            "status": status,
            "problems": [*status.problems, *problems],
            "workers": rows[:_MOST_LISTED],
            "workers_more": max(0, len(rows) - _MOST_LISTED),
            "servers": [(name, *_cells(info)) for name, info in (infos or {}).items()],
            "outages": self._outages(request, away[:_MOST_LISTED]),
            "outages_more": max(0, len(away) - _MOST_LISTED),
            "days": KEEP_DAYS,
        }
        return self.render(request, "health.html", context)

    def _outages(self, request: Any, away: list[Away]) -> list[tuple[Any, ...]]:
        """Return the outages, each with those of its policies that decided most."""
        most = [one.most(_ASKED) for one in away]
        seen = policies_by_id((pk for pks in most for pk in pks), self.admin.get_queryset(request))
        return [
            (
                *(outage_text(one), one.workers, sorted(one.reasons), max(0, len(one.policies) - _MOST_POLICIES)),
                [(seen[pk], one.policies[pk].total()) for pk in pks if pk in seen][:_MOST_POLICIES],
            )
            for one, pks in zip(away, most, strict=True)
        ]


def _cells(info: dict[str, str]) -> tuple[str, ...]:
    """Return the cells of a Redis server, from its INFO, of which managed servers leave parts out."""
    product, version = server_version(info)
    keys = ("uptime_in_days", "used_memory_human", "maxmemory_human", "evicted_keys")
    return f"{product} {version}", *(info.get(key, "–") for key in keys)


def _memory_problems(name: str, info: dict[str, str]) -> list[str]:
    """Return a sentence for each problem with a Redis server's memory."""
    found, ratio = [], memory_ratio(info) or 0
    if info.get("evicted_keys", "0") != "0":
        text = gettext(
            "%(name)s has evicted keys. Evicted counters restart at zero, so customers may have exceeded their "
            "limits. Set maxmemory-policy to noeviction."
        )
        found.append(text % {"name": shown(name)})
    if ratio >= NEARLY_FULL:
        text = gettext(
            "%(name)s uses %(percent)s %% of its maxmemory. When its memory is full, it stops counting and the “on "
            "error” of each policy applies. Raise maxmemory or move other data to another server."
        )
        found.append(text % {"name": shown(name), "percent": number_text(int(ratio * 100))})
    return found
