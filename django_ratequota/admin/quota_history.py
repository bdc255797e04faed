"""Past quotas: what a subject has used in each window of its calendar limits, and a month by its days."""

from __future__ import annotations

from datetime import date
from typing import Any

from django.utils.translation import gettext

from ..conf import settings
from ..models import Endpoint, PolicyChange, QuotaWindow
from ..operations.invoice_lines import sources_of
from ..operations.past_windows import Month, by_day, given_back, local_date
from ..operations.recorded import policies_by_id
from .formatting import day_text, moment, number_text, shown, when
from .ledger_pages import LedgerPage, choice, share
from .names import caller_names, caller_text, deleted, explain_url
from .pages import is_id


class QuotaHistoryPage(LedgerPage):
    """The past windows of a subject, the newest first, or one month by its days."""

    path, name = "quotas/history/", "quota_history"

    def view(self, request: Any) -> Any:
        """Return the page."""
        subject, visible = self.text(request, "subject"), self.visible(request)
        windows: Any = QuotaWindow.objects.filter(subject=subject)
        if visible is not None:
            windows = windows.filter(policy_id__in=visible.order_by().values("pk"))
        name = caller_text(subject, caller_names([subject]))
        found = set(windows.values_list("period", flat=True).distinct().order_by())
        periods = {one.value: one.label for one in reversed(QuotaWindow.Period) if one in found}
        checks = {"period": periods.__contains__, "month": _is_day, "start": is_id}
        query = self.known_parameters(request, checks) | {"subject": subject}
        query["period"] = query["period"] or next(iter(periods), "")
        first, choices = int(query["start"] or 0), []
        if query["month"]:
            rows: list[Any] = by_day(windows, date.fromisoformat(query["month"]), visible)[first:]
            context = self._days(request, rows[: self.page_size])
        else:
            newest = windows.filter(period=query["period"]).order_by("-starts_at", "counter")
            rows = list(newest[first:][: self.page_size + 1])
            context = {"rows": self._windows(rows[: self.page_size])}
            choices = [choice("period", gettext("Period"), periods, query["period"])] if periods else []
        following = str(first + self.page_size) if len(rows) > self.page_size else ""
        context |= {
            "title": gettext("Past quotas: %s") % name if subject else gettext("Past quotas"),
            "recorded": bool(periods),
            "explain": explain_url(self.site, subject),
            "refunds": self.admin.has_reset_permission(request),
            "all": self.url(query={"subject": subject}) if query["month"] else "",
            **self.around(query, choices, ("subject", gettext("Subject")), following),
        }
        return self.render(request, "quota_history.html", context)

    def _windows(self, windows: list[QuotaWindow]) -> list[dict[str, Any]]:
        named = self._named(windows)
        return [
            {
                "refund": self.admin.page_url("refund_window", window.pk),
                "begins": day_text(window.first_day),
                "ends": day_text(local_date(window.ends_at)),
                **named[window.pk],
                **share(window.used, window.limit),
                "written": moment(window.written_at),
                "days": self.url(query={"subject": window.subject, "month": str(window.first_day)})
                if window.period == QuotaWindow.Period.MONTH
                else "",
            }
            for window in windows
        ]

    def _days(self, request: Any, months: list[Month]) -> dict[str, Any]:
        """Return the tables of days, and what operators gave back."""
        named = self._named([month.window for month in months])
        sources = sources_of({day.policy for month in months for day in month.days})
        counters = [
            {
                **named[month.window.pk],
                "days": [
                    (
                        gettext("earlier days") if day is None else day_text(day),
                        *(shown(sources[policy].plan), rate, *_texts(charged, refunded)),
                    )
                    for day, policy, rate, charged, refunded in month.days
                ],
                "total": _texts(*month.total),
                "written": moment(month.window.written_at, seconds=True),
            }
            for month in months
        ]
        returns = [
            (
                *(moment(change.at, seconds=True), self.object_url(request, PolicyChange, change.pk)),
                *(shown(change.actor or gettext("code or a command")), change.get_action_display()),
                *(named[window.pk]["endpoint"], window.rate, number_text(units), shown(change.reason)),
            )
            for change, window, units in given_back(months)
        ]
        return {
            "counters": counters,
            "returns": returns,
            "span": when(months[0].window) if months else "",
            "kept_days": settings.keep_quota_days
            if any(day.day is None for month in months for day in month.days)
            else None,
        }

    def _named(self, windows: list[QuotaWindow]) -> dict[int, dict[str, Any]]:
        """Return window id -> its rate, its endpoint, and for whom its policy is, with that one's address."""
        endpoints = dict(Endpoint.objects.filter(pk__in={w.endpoint_id for w in windows}).values_list("pk", "name"))
        policies = policies_by_id(window.policy_id for window in windows)
        found = {}
        for window in windows:
            pk, policy = window.endpoint_id, policies.get(window.policy_id or 0)
            found[window.pk] = {
                "rate": window.rate,
                "endpoint": gettext("all endpoints") if pk is None else shown(endpoints.get(pk) or deleted(pk)),
                "policy": deleted(window.policy_id) if policy is None else shown(policy.audience),
                "url": "" if policy is None else self.admin.page_url("change", policy.pk),
            }
        return found


def _is_day(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False


def _texts(charged: int, refunded: int) -> list[str]:
    """Return what was charged, refunded, and used."""
    return [number_text(figure) for figure in (charged, refunded, charged - refunded)]
