"""The page Health: workers, Redis servers, and when Redis gave no decisions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.template.defaultfilters import filesizeformat
from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...monitoring.rollup import KEEP_DAYS
from ...operations.outages import Away, outages
from ...policies.unreadable import find_unreadable
from ...runtime import default_limiter
from ...store.base import server_version
from ..formatting import duration, number_text, shown
from ..pages import AdminPage, reply
from .outages import sentence
from .status import current_status

#: Workers and outages that are listed, policies of an outage, and those that are looked for, as some may be gone.
_MOST_LISTED, _MOST_POLICIES, _ASKED = 50, 3, 20


class HealthPage(AdminPage):
    """Whether limits are enforced now, and when they were not."""

    path, name = "health/", "health"
    media = forms.Media(css={"all": ["django_ratequota/usage.css"]})

    def view(self, request: Any) -> Any:
        """Return the page; the outages are in the database, so it shows them while Redis is away."""
        status = current_status()
        infos = reply(lambda: default_limiter().store.info())[0] if status.answered else None
        servers = [_server(name, info) for name, info in (infos or {}).items()]
        lost = [server["lost"] for server in servers if server["lost"]]
        rows = status.rows()
        away = outages(timezone.now() - timedelta(days=KEEP_DAYS))
        context = {
            "title": _("Health"),
            "status": status,
            "problems": [*status.problems, *lost, *self._unreadable(request)],
            "workers": rows[:_MOST_LISTED],
            "workers_more": max(0, len(rows) - _MOST_LISTED),
            "servers": servers,
            "outages": self._outages(request, away[:_MOST_LISTED]),
            "outages_more": max(0, len(away) - _MOST_LISTED),
            "days": KEEP_DAYS,
        }
        return self.render(request, "health.html", context)

    def _unreadable(self, request: Any) -> list[str]:
        """Return a sentence for each policy that the operator may see and whose rates cannot be read."""
        text = _("Policy %(id)s: the rates %(rates)s cannot be read. Its “on error” decides. Edit the policy.")
        found = find_unreadable()
        seen = self.admin.get_queryset(request).in_bulk([policy.pk for policy in found]) if found else {}
        return [text % {"id": policy.pk, "rates": shown(repr(policy.rates))} for policy in found if policy.pk in seen]

    def _outages(self, request: Any, away: list[Away]) -> list[dict[str, Any]]:
        """Return the outages, each with those of its policies that decided most."""
        most = [one.most(_ASKED) for one in away]
        policies = self.admin.get_queryset(request).select_related("user", "subject_list", "plan", "endpoint")
        seen = policies.in_bulk({pk for pks in most for pk in pks}) if away else {}
        return [
            {
                "text": sentence(one),
                "workers": len(one.workers),
                "reasons": shown(", ".join(sorted(one.reasons))),
                "policies": [
                    (shown(seen[pk]), self.admin.page_url("change", pk), number_text(one.policies[pk].total()))
                    for pk in pks
                    if pk in seen
                ][:_MOST_POLICIES],
                "more": max(0, len(one.policies) - _MOST_POLICIES),
            }
            for one, pks in zip(away, most, strict=True)
        ]


def _server(name: str, info: dict[str, str]) -> dict[str, Any]:
    """Return the row of a Redis server, from its INFO."""
    product, version = server_version(info)
    # Managed servers leave some of these out.
    limit, used, up = (_integer(info.get(key)) for key in ("maxmemory", "used_memory", "uptime_in_seconds"))
    evicted = _integer(info.get("evicted_keys"))
    memory = {"used": "–" if used is None else filesizeformat(used)}
    memory["limit"] = filesizeformat(limit) if limit else gettext("no limit")
    text = gettext(
        "%(name)s has evicted keys. Evicted counters start again at zero, so callers may have exceeded their limits. "
        "Set maxmemory-policy to noeviction."
    )
    return {
        "name": shown(name),
        "cells": [
            shown(f"{product} {version}"),
            "–" if up is None else duration(up),
            gettext("%(used)s (%(limit)s)") % memory,
            "–" if evicted is None else number_text(evicted),
        ],
        "lost": text % {"name": shown(name)} if evicted else "",
    }


def _integer(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None
