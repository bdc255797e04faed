"""The Quotas page: who has used how much of a calendar limit in the window that runs now, and the list as CSV."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import QuotaWindow, RatePolicy
from ..operations.counters import is_shared
from ..operations.near import AFTER, LEVELS, Chosen, Row, all_near, current_periods, near_rows
from ..operations.subjects import subjects_named
from ..policies.facts import to_us
from ..runtime import process
from .formatting import clock_and_wait, shown
from .ledger_pages import LedgerPage, choice, csv_response, share
from .names import caller_names, caller_text, endpoint_text, explain_url
from .pages import is_id
from .permissions import may

_LEVEL = "80"  # chosen at first: near the limit, with or without room left
_HEADS = (
    *(_("customer"), _("name"), "id", _("policy"), _("endpoint"), _("rate"), _("used"), _("limit")),
    *(_("percent"), _("resets at")),
)


class QuotasPage(LedgerPage):
    """The customers near a limit, the fullest first; with ``csv`` in the URL all of them, as a file."""

    name = "quotas"

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the link from a policy to those who are near its limits."""
        return [(self.url(query={"policy": str(obj.pk), "level": str(LEVELS[0])}), _("Quotas"))]

    def view(self, request: Any) -> Any:
        """Return the page, or the file."""
        periods = {period: QuotaWindow.Period(period).label for period in current_periods()}
        some = gettext("at least %(share)s %% used")
        levels = {str(level): some % {"share": level} for level in LEVELS}
        levels = {"0": gettext("any"), **levels, "100": gettext("used up")}
        checks = {"window": periods.__contains__, "level": levels.__contains__, "policy": is_id}
        query = self.known_parameters(request, {**checks, "start": re.compile(AFTER).fullmatch})
        period = query["window"] = query["window"] or next(iter(periods), "")
        query["level"], query["q"] = query["level"] or _LEVEL, self.text(request, "q")
        chosen = self._chosen(request, query)
        if "csv" in request.GET:
            batches = all_near(period, chosen) if period else iter(())
            return csv_response(f"ratequota-quotas-{period or 'none'}-{query['level']}", _HEADS, _lines(batches))
        if not period:
            return self.render(request, "quotas.html", {"title": gettext("Quotas")})
        rows, following = near_rows(period, chosen, query["start"], self.page_size)
        users = caller_names(row.bucket.subject for row in rows)
        now_us, boosts = process.limiter().now_us, may(request.user, "add", override=True)
        choices = [
            choice("window", gettext("Period"), periods, period),
            choice("level", gettext("Used"), levels, query["level"]),
        ]
        if pk := query["policy"]:
            text = {row.policy.pk: shown(row.policy) for row in rows}.get(int(pk), gettext("policy %s") % pk)
            choices.append(choice("policy", gettext("Policy"), {"": gettext("all policies"), pk: text}, pk))
        context = {
            "title": gettext("Quotas: %s") % periods[period],
            "rows": [self._row(row, users, now_us, boosts, period) for row in rows],
            "lower": LEVELS[0] if int(query["level"]) > LEVELS[0] else None,
            **self.around(query, choices, ("q", gettext("User or subject")), following),
        }
        return self.render(request, "quotas.html", context)

    def _chosen(self, request: Any, query: Mapping[str, str]) -> Chosen:
        """Return which counters are selected, of policies that the operator may see."""
        policies, text = self.visible(request), query["q"]
        if query["policy"]:
            policies = (RatePolicy.objects.all() if policies is None else policies).filter(pk=query["policy"])
        return Chosen(
            level=int(query["level"]),
            policies=policies,
            subjects=frozenset((text, *subjects_named(text))) if text else None,
        )

    def _row(self, row: Row, users: Mapping[str, str], now_us: int, boosts: bool, period: str) -> dict[str, Any]:
        bucket, policy = row.bucket, row.policy
        shared = is_shared(bucket.counted_per, bucket.subject)
        explain = "" if shared else explain_url(self.site, bucket.subject, bucket.scope)
        boost = explain.replace(self.admin.page_url("explain"), self.admin.page_url("boost"), 1)
        past = {"subject": bucket.subject, "period": period}
        return {
            "name": caller_text(bucket.subject, users),
            "policy": shown(f"{policy.audience} × {endpoint_text(policy.endpoint)}"),
            "policy_url": self.admin.page_url("change", policy.pk),
            "rate": str(bucket.rate),
            "logs": bucket.mode == "log",
            **share(row.used, row.limit),
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
                *(bucket.subject, caller_text(bucket.subject, users), row.policy.pk, row.policy, bucket.scope),
                *(bucket.rate, row.used, row.limit, row.percent, row.ends_at.astimezone(UTC).isoformat()),
            ]
