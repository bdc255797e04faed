"""The page Health: workers, Redis servers, and when Redis gave no decisions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...monitoring.rollup import KEEP_DAYS
from ...operations.outages import Away, outages
from ...operations.recorded import policies_by_id
from ...runtime import default_limiter
from ...store.base import NEARLY_FULL, memory_ratio, server_version
from ..formatting import number_text, shown
from ..pages import AdminPage, reply
from .status import current_status, outage_text

#: Workers and outages that are listed, policies of an outage, and those that are looked for, as some may be gone.
_MOST_LISTED, _MOST_POLICIES, _ASKED = 50, 3, 20


class HealthPage(AdminPage):
    """Whether limits are enforced now, and when they were not."""

    name = "health"
    css = ("django_ratequota/usage.css",)

    def view(self, request: Any) -> Any:
        """Return the page; the outages are in the database, so it shows them while Redis is away."""
        status = current_status()
        infos = reply(lambda: default_limiter().store.info())[0] if status.answered else None
        problems = [text for name, info in (infos or {}).items() for text in _problems(name, info)]
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


def _problems(name: str, info: dict[str, str]) -> list[str]:
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
