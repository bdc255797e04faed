"""The Quotas page: who has used how much of a calendar limit in the window that runs now, and the list as CSV."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC
from typing import Any

from django import forms
from django.contrib.auth import get_user_model
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..conf import settings
from ..models import Endpoint, Plan, QuotaWindow, RatePolicy
from ..operations.counters import shared_reason
from ..operations.ledger import AFTER, LEVELS, Chosen, counts, current_periods, time_us
from ..operations.near import Row, all_near, near_rows
from ..policies.facts import to_us
from .csv_file import csv_response
from .formatting import clock_and_wait, number_text, shown
from .names import caller_names, caller_text, endpoint_text
from .pages import AdminPage, is_id
from .permissions import may
from .usage.labels import explain_url

_PAGE = 50
#: Users found by name, most: their subjects are searched for.
_MOST_USERS = 1_000
_LEVEL = 80  # chosen at first: near the limit, with or without room left
_HEADS = (
    *(_("caller"), _("name"), "id", _("policy"), _("endpoint"), _("rate"), _("used"), _("limit")),
    *(_("percent"), _("resets at")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What the operator selected."""

    #: One of ``QuotaWindow.Period``; "" = nothing is used of any.
    period: str = ""
    level: int = _LEVEL
    plan_id: int | None = None
    endpoint_id: int | None = None
    policy_id: int | None = None
    search: str = ""
    #: Where the page begins (see ``Rows.following``).
    start: str = ""

    def query(self, **changes: Any) -> str:
        """Return the query string of a link to this selection with ``changes``."""
        other = replace(self, **{"start": "", **changes})
        params: dict[str, Any] = {
            "window": other.period or None,
            "level": other.level,
            "plan": other.plan_id,
            "endpoint": other.endpoint_id,
            "policy": other.policy_id,
            "q": other.search or None,
            "start": other.start or None,
        }
        return "?" + urlencode({name: value for name, value in params.items() if value is not None})


class QuotasPage(AdminPage):
    """Who is near a limit now, the fullest first; with ``csv`` in the address all of them, as a file."""

    path, name = "quotas/", "quotas"
    media = forms.Media(css={"all": ["django_ratequota/usage.css", "django_ratequota/quotas.css"]})

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the link from a policy to those who are near its limits."""
        return [(self.url(query={"policy": str(obj.pk), "level": str(LEVELS[0])}), _("Quotas"))]

    def view(self, request: Any) -> Any:
        """Return the page, or the file."""
        selection, choices = self._selection(request)
        if "csv" in request.GET:
            chosen = self._chosen(request, selection)
            batches = all_near(selection.period, chosen) if selection.period else iter(())
            name = f"ratequota-quotas-{selection.period or 'none'}-{selection.level}"
            return csv_response(name, _HEADS, _lines(batches))
        context = {"title": gettext("Quotas"), "selection": selection}
        if selection.period:
            context |= self._choices(selection, choices) | self._rows(request, selection)
        return self.render(request, "quotas.html", context)

    def _selection(self, request: Any) -> tuple[Selection, dict[str, Any]]:
        """Return the selection, and what there is to choose from; warns of parameters that are ignored."""
        periods = current_periods()
        # Others see overrides only, which are of no plan.
        rows = Plan.objects.values_list("pk", "name") if self.admin.sees_all_policies(request) else ()
        plans = {pk: shown(name) for pk, name in rows}
        endpoints = {pk: shown(name) for pk, name in Endpoint.objects.order_by("name").values_list("pk", "name")}
        found = self.known_parameters(
            request,
            {
                "window": periods.__contains__,
                "level": {str(level) for level in (0, *LEVELS)}.__contains__,
                "plan": {str(pk) for pk in plans}.__contains__,
                "endpoint": {str(pk) for pk in endpoints}.__contains__,
                "policy": is_id,
                "start": re.compile(AFTER).fullmatch,
            },
        )
        numbers = {name: int(found[name]) for name in ("level", "plan", "endpoint", "policy") if found[name]}
        selection = Selection(
            period=found["window"] or next(iter(periods), ""),
            level=numbers.get("level", _LEVEL),
            plan_id=numbers.get("plan"),
            endpoint_id=numbers.get("endpoint"),
            policy_id=numbers.get("policy"),
            search=request.GET.get("q", "").replace("\x00", "").strip()[:200],
            start=found["start"],
        )
        return selection, {"periods": periods, "plans": plans, "endpoints": endpoints}

    def _chosen(self, request: Any, selection: Selection) -> Chosen:
        """Return which counters are selected, and of policies that the operator may see: one query at most."""
        sees_all = self.admin.sees_all_policies(request)
        policies: Any = RatePolicy.objects.all() if sees_all else self.admin.get_queryset(request)
        if selection.plan_id is not None:
            policies = policies.filter(plan_id=selection.plan_id)
        if selection.policy_id is not None:
            policies = policies.filter(pk=selection.policy_id)
        text = selection.search
        kinds = ("ip", *settings.identifiers)
        return Chosen(
            level=selection.level,
            endpoint_id=selection.endpoint_id,
            policies=None if sees_all and (selection.plan_id, selection.policy_id) == (None, None) else policies,
            subjects=frozenset((text, *_users_named(text))) if text else None,
            # user:4 is one user, not those whose key begins with a 4, too.
            beginnings=() if text.startswith("user:") else (text, *(f"{kind}:{text}" for kind in kinds)),
        )

    def _choices(self, selection: Selection, choices: dict[str, Any]) -> dict[str, Any]:
        chosen = {"plan": selection.plan_id, "endpoint": selection.endpoint_id}
        labels = {period: QuotaWindow.Period(period).label for period in choices["periods"]}
        return {
            "title": gettext("Quotas: %s") % labels[selection.period],
            "windows": [(period, label, period == selection.period) for period, label in labels.items()],
            "levels": [(level, _level_text(level), level == selection.level) for level in (0, *LEVELS)],
            **{
                f"{name}_choices": [(key, text, key == pk) for key, text in choices[f"{name}s"].items()]
                for name, pk in chosen.items()
            },
        }

    def _rows(self, request: Any, selection: Selection) -> dict[str, Any]:
        """Return the rows, and what leads to others."""
        chosen = self._chosen(request, selection)
        rows, following = near_rows(selection.period, chosen, selection.start, _PAGE)
        users = caller_names(row.bucket.subject for row in rows)
        policies = {row.policy.pk: shown(row.policy) for row in rows}
        if selection.policy_id is not None:
            policies.setdefault(selection.policy_id, gettext("policy %s") % selection.policy_id)
        now_us, boosts = time_us(), may(request.user, "add", override=True)
        all_are = (chosen.policies, chosen.endpoint_id, chosen.subjects) == (None, None, None)
        return {
            "rows": [self._row(row, users, now_us, boosts, selection.period) for row in rows],
            "policy_choices": [(pk, text, pk == selection.policy_id) for pk, text in policies.items()],
            "counts": [
                (_level_text(level), number_text(number), selection.query(level=level))
                for level, number in (counts(selection.period) if all_are else {}).items()
            ],
            "lower": selection.query(level=LEVELS[0]) if selection.level > LEVELS[0] else "",
            "first": selection.query() if selection.start else "",
            "next": selection.query(start=following) if following else "",
            "csv": selection.query() + "&csv=1",
        }

    def _row(self, row: Row, users: Mapping[str, str], now_us: int, boosts: bool, period: str) -> dict[str, Any]:
        bucket, policy = row.bucket, row.policy
        shared = shared_reason(bucket.counted_per, bucket.subject)
        explain = "" if shared else explain_url(self.site, bucket.subject, bucket.scope)
        boost = explain.replace(self.admin.page_url("explain"), self.admin.page_url("boost"), 1)
        past = {"subject": bucket.subject, "period": period}
        is_user = bucket.subject in users and bucket.subject.startswith("user:")
        return {
            "name": caller_text(bucket.subject, users),
            "subject": shown(bucket.subject) if is_user else "",
            "policy": shown(f"{policy.audience} × {endpoint_text(policy.endpoint)}"),
            "policy_url": self.admin.page_url("change", policy.pk),
            "rate": str(bucket.rate),
            "logs": bucket.mode == "log",
            "used": number_text(row.used),
            "limit": number_text(row.limit),
            "percent": row.percent,
            "over": row.percent >= 100,
            "share": gettext("%(share)s %%") % {"share": row.percent},
            "resets": clock_and_wait(now_us, to_us(row.ends_at) - now_us),
            "explain": explain,
            "boost": f"{boost}&policy={policy.pk}" if boost and boosts and bucket.mode == "enforce" else "",
            "past": self.admin.page_url("quota_history", query=past),
        }


def _lines(batches: Iterator[list[Row]]) -> Iterator[list[Any]]:
    for rows in batches:
        users = caller_names(row.bucket.subject for row in rows)
        for row in rows:
            bucket = row.bucket
            yield [
                bucket.subject,
                caller_text(bucket.subject, users),
                row.policy.pk,
                row.policy,
                bucket.scope,
                bucket.rate,
                row.used,
                row.limit,
                row.percent,
                row.ends_at.astimezone(UTC).isoformat(),
            ]


def _users_named(text: str) -> list[str]:
    """Return the subjects of the users whose name contains the text."""
    model: Any = get_user_model()
    found = model._default_manager.filter(**{f"{model.USERNAME_FIELD}__icontains": text})
    return [f"user:{pk}" for pk in found.values_list("pk", flat=True)[:_MOST_USERS]]


def _level_text(level: int) -> str:
    if not level:
        return gettext("any")
    return gettext("used up") if level == 100 else gettext("%(share)s %% used or more") % {"share": level}
