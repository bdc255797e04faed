"""A subject's past windows: what it has used of each calendar rate, as bars and as CSV."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from typing import Any

from django import forms
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import Endpoint, QuotaWindow, RatePolicy
from ..monitoring.ledger_rows import stored_subject
from ..operations.ledger import time_us
from ..operations.past_windows import Past, local_date, past_of
from ..policies.facts import to_datetime
from .charts import Plot, Series
from .csv_file import csv_response
from .formatting import isolated, shown
from .names import caller_names, caller_text, deleted
from .pages import AdminPage, is_id
from .usage.labels import explain_url

#: Counters of a page.
_PAGE = 8
#: Period -> windows shown of each counter, and days to look back for them.
_SHOWN = {"month": (24, 24 * 31), "week": (26, 26 * 7), "day": (31, 31)}
_HEADS = (
    *(_("subject"), _("name"), _("from"), _("until"), _("endpoint"), _("rate"), _("policy"), _("used")),
    *(_("limit"), _("percent")),
)


class QuotaHistoryPage(AdminPage):
    """The past windows of a subject, one chart per rate; with ``csv`` in the address all of them, as a file."""

    path, name = "quotas/history/", "quota_history"
    media = forms.Media(
        css={"all": ["django_ratequota/plots.css", "django_ratequota/usage.css", "django_ratequota/quotas.css"]},
        js=["django_ratequota/subjects.js"],
    )

    def view(self, request: Any) -> Any:
        """Return the page, which is read from the database alone."""
        subject = request.GET.get("subject", "").replace("\x00", "").strip()[:250]
        windows: Any = QuotaWindow.objects.filter(subject=stored_subject(subject))
        if not self.admin.sees_all_policies(request):
            windows = windows.filter(policy_id__in=self.admin.get_queryset(request).order_by().values("pk"))
        users = caller_names([subject])
        if "csv" in request.GET:
            return csv_response("ratequota-past-quotas", _HEADS, _lines(windows, caller_text(subject, users)))
        found = set(windows.values_list("period", flat=True).distinct().order_by())
        periods = [period for period in reversed(QuotaWindow.Period.values) if period in found]
        period = request.GET.get("period", "")
        if period not in periods:
            period = next(iter(periods), "")
        start = request.GET.get("start", "")
        first = int(start) if is_id(start) else 0
        past = _past(windows.filter(period=period), period) if period else []
        rows = past[first : first + _PAGE]
        query = {"subject": subject, "period": period}
        further = first + _PAGE < len(past)
        context = {
            "title": gettext("Past quotas: %s") % caller_text(subject, users) if subject else gettext("Past quotas"),
            "subject": subject,
            "subjects": self.admin.page_url("subjects"),
            "known": bool(periods),
            "periods": [(one, QuotaWindow.Period(one).label, one == period) for one in periods],
            "plots": self._plots(request, rows),
            "explain": explain_url(self.site, subject),
            "first": self.url(query=query) if first else "",
            "next": self.url(query={**query, "start": str(first + _PAGE)}) if further else "",
            "csv": self.url(query={"subject": subject, "csv": "1"}),
        }
        return self.render(request, "quota_history.html", context)

    def _plots(self, request: Any, rows: list[Past]) -> list[tuple[Any, str, str]]:
        """Return for each counter its chart, and the text and address of its policy."""
        endpoints = dict(Endpoint.objects.filter(pk__in={row.endpoint_id for row in rows}).values_list("pk", "name"))
        related = RatePolicy.objects.select_related("user", "subject_list", "plan", "endpoint")
        policies = related.in_bulk({row.policy_id for row in rows if row.policy_id})
        found = []
        for row in rows:
            policy = policies.get(row.policy_id or 0)
            text = deleted(row.policy_id) if policy is None else shown(policy)
            url = "" if policy is None else self.admin.page_url("change", policy.pk)
            found.append((_chart(row, endpoints), text, url))
        return found


def _past(windows: Any, period: str) -> list[Past]:
    most, days = _SHOWN[period]
    now_us = time_us()
    since = to_datetime(now_us - days * 86_400 * 10**6)
    return past_of(windows.filter(starts_at__gte=since), most, local_date(to_datetime(now_us)))


def _chart(row: Past, endpoints: dict[int, str]) -> Any:
    if row.endpoint_id is None:
        endpoint = gettext("all endpoints")
    else:
        endpoint = shown(endpoints.get(row.endpoint_id) or deleted(row.endpoint_id))
    used = [used for _day, used, _limit in row.windows]
    left = [max(0, limit - used) for _day, used, limit in row.windows]
    return Plot(
        title=gettext("%(rate)s: %(endpoint)s, policy %(policy)s")
        % {"rate": isolated(row.rate), "endpoint": endpoint, "policy": row.policy_id},
        labels=[_label(day, row) for day, _used, _limit in row.windows],
        series=[Series(gettext("used"), "admitted", used), Series(gettext("left"), "left", left)],
        empty=gettext("Nothing was used."),
    )


def _label(day: date, row: Past) -> str:
    """Return the first day of a window, or the month where all windows are calendar months."""
    whole = row.rate.endswith("/month") and all(day.day == 1 for day, _used, _limit in row.windows)
    return f"{day:%Y-%m}" if whole else f"{day:%Y-%m-%d}"


def _lines(windows: Any, name: str) -> Iterator[list[Any]]:
    endpoints = dict(Endpoint.objects.values_list("pk", "name"))
    for window in windows.order_by("-starts_at", "counter").iterator(chunk_size=2000):
        pk = window.endpoint_id
        yield [
            window.subject,
            name,
            window.starts_at.isoformat(),
            window.ends_at.isoformat(),
            "" if pk is None else endpoints.get(pk, f"#{pk}"),
            window.rate,
            "" if window.policy_id is None else window.policy_id,
            window.used,
            window.limit,
            window.percent,
        ]
