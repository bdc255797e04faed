"""A subject's past windows: what it has used of each calendar rate, as bars and by the day, and both as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from typing import Any

from django import forms
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..conf import settings
from ..models import Endpoint, PolicyChange, QuotaWindow, RatePolicy
from ..monitoring.ledger_rows import NOTHING, Totals, stored_subject
from ..operations.ledger import time_us
from ..operations.past_days import Month, by_day, given_back
from ..operations.past_windows import Past, local_date, past_of
from ..policies.facts import to_datetime
from .charts import Plot, Series
from .csv_file import csv_response
from .formatting import isolated, moment, number_text, shown, when
from .names import caller_names, caller_text, deleted
from .pages import AdminPage, is_id
from .usage.labels import explain_url

_Named = dict[int, tuple[str, str, str]]
#: Counters of a page.
_PAGE = 8
#: Period -> windows shown of each counter, and days to look back for them.
_SHOWN = {"month": (24, 24 * 31), "week": (26, 26 * 7), "day": (31, 31)}
_HEADS = (
    *(_("subject"), _("name"), _("from"), _("until"), _("endpoint"), _("rate"), _("policy"), _("used")),
    *(_("limit"), _("percent")),
)
_DAY_HEADS = (
    *(_("subject"), _("name"), _("day"), _("endpoint"), _("rate"), _("policy"), _("charged"), _("refunded")),
    _("used"),
)


class QuotaHistoryPage(AdminPage):
    """The past windows of a subject, one chart per rate, or a month by its days; with ``csv``, the same as a file."""

    path, name = "quotas/history/", "quota_history"
    media = forms.Media(
        css={"all": ["django_ratequota/plots.css", "django_ratequota/usage.css", "django_ratequota/quotas.css"]},
        js=["django_ratequota/subjects.js"],
    )

    def view(self, request: Any) -> Any:
        """Return the page, which is read from the database alone, or the file."""
        subject = request.GET.get("subject", "").replace("\x00", "").strip()[:250]
        windows: Any = QuotaWindow.objects.filter(subject=stored_subject(subject))
        if not self.admin.sees_all_policies(request):
            windows = windows.filter(policy_id__in=self.admin.get_queryset(request).order_by().values("pk"))
        name = caller_text(subject, caller_names([subject]))
        periods, months = _choices(windows)
        # A period, or the first day of a month.
        period = request.GET.get("period", "")
        if period not in (*periods, *months):
            period = next(iter(periods), "")
        if "csv" in request.GET and period not in months:
            return csv_response("ratequota-past-quotas", _HEADS, _lines(windows, name))
        rows: list[Any] = by_day(windows, date.fromisoformat(period)) if period in months else _past(windows, period)
        if "csv" in request.GET:
            return csv_response(f"ratequota-past-quotas-{period}", _DAY_HEADS, _day_lines(rows, name))
        start = request.GET.get("start", "")
        first = int(start) if is_id(start) else 0
        query = {"subject": subject, "period": period}
        further = first + _PAGE < len(rows)
        context = {
            "title": gettext("Past quotas: %s") % name if subject else gettext("Past quotas"),
            "subject": subject,
            "subjects": self.admin.page_url("subjects"),
            "periods": [(value, text, value == period) for value, text in periods.items()],
            "months": [(value, text, value == period) for value, text in months.items()],
            "explain": explain_url(self.site, subject),
            "first": self.url(query=query) if first else "",
            "next": self.url(query={**query, "start": str(first + _PAGE)}) if further else "",
            "csv": self.url(query={**query, "csv": "1"}),
        }
        part = rows[first : first + _PAGE]
        named = self._named([row.window for row in (rows if period in months else part)])
        if period in months:
            context |= _days(part, named) | {"returns": self._returns(request, rows, named)}
        else:
            context["plots"] = [(_chart(row, named[row.window.pk][0]), *named[row.window.pk][1:]) for row in part]
        return self.render(request, "quota_history.html", context)

    def _returns(self, request: Any, months: list[Month], named: _Named) -> list[tuple[str, ...]]:
        """Return what operators gave back: when, the entry's address, by whom, how, of what, how much, and why."""
        return [
            (
                *(moment(change.at, seconds=True), self.object_url(request, PolicyChange, change.pk)),
                *(shown(change.actor or gettext("code or a command")), change.get_action_display()),
                *(named[window.pk][0], window.rate, number_text(units), shown(change.reason)),
            )
            for change, window, units in given_back(months)
        ]

    def _named(self, windows: list[QuotaWindow]) -> _Named:
        """Return window id -> the text of its endpoint, and the text and address of its policy."""
        endpoints = _endpoint_names(pk__in={window.endpoint_id for window in windows})
        related = RatePolicy.objects.select_related("user", "subject_list", "plan", "endpoint")
        policies = related.in_bulk({window.policy_id for window in windows if window.policy_id})
        found = {}
        for window in windows:
            pk, policy = window.endpoint_id, policies.get(window.policy_id or 0)
            endpoint = gettext("all endpoints") if pk is None else shown(endpoints.get(pk) or deleted(pk))
            text = deleted(window.policy_id) if policy is None else shown(policy)
            url = "" if policy is None else self.admin.page_url("change", policy.pk)
            found[window.pk] = endpoint, text, url
        return found


def _choices(windows: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the periods, the longest first, and the first days of months, the newest first, each with its text."""
    found = set(windows.values_list("period", flat=True).distinct().order_by())
    months = windows.filter(period="month").values_list("first_day", flat=True).distinct().order_by("-first_day")
    days = list(months)
    periods = {one.value: one.label for one in reversed(QuotaWindow.Period) if one in found}
    return periods, dict(zip(map(str, days), _labels(days, "month"), strict=True))


def _past(windows: Any, period: str) -> list[Past]:
    if not period:
        return []
    most, days = _SHOWN[period]
    now_us = time_us()
    since = to_datetime(now_us - days * 86_400 * 10**6)
    return past_of(windows.filter(period=period, starts_at__gte=since), most, local_date(to_datetime(now_us)))


def _chart(row: Past, endpoint: str) -> Any:
    days, used, limits = zip(*row.windows, strict=True)
    left = [max(0, limit - units) for units, limit in zip(used, limits, strict=True)]
    return Plot(
        title=gettext("%(rate)s: %(endpoint)s, policy %(policy)s")
        % {"rate": isolated(row.window.rate), "endpoint": endpoint, "policy": row.window.policy_id},
        labels=_labels(days, row.window.period),
        series=[Series(gettext("used"), "admitted", used), Series(gettext("left"), "left", left)],
        empty=gettext("Nothing was used."),
    )


def _labels(days: Sequence[date], period: str) -> list[str]:
    """Return the first days of windows, or the months where all are calendar months."""
    whole = period == "month" and all(day.day == 1 for day in days)
    return [f"{day:%Y-%m}" if whole else f"{day:%Y-%m-%d}" for day in days]


def _days(months: list[Month], named: _Named) -> dict[str, Any]:
    """Return the table of days: one row for each, and three columns for each counter."""
    days = sorted({day for month in months for day in month.days}, key=lambda day: day or date.min)
    return {
        "span": when(months[0].window) if months else "",
        "counters": [
            (one.window.rate, moment(one.window.written_at, seconds=True), *named[one.window.pk]) for one in months
        ],
        "days": [
            (str(day or gettext("earlier days")), _texts(month.days.get(day, NOTHING) for month in months))
            for day in days
        ],
        "total": _texts(month.total for month in months),
        "kept_days": settings.keep_quota_days if None in days else None,
    }


def _figures(totals: Totals) -> tuple[int, int, int]:
    """Return what was charged, refunded, and used."""
    return *totals, totals.charged - totals.refunded


def _texts(cells: Iterable[Totals]) -> list[str]:
    return [number_text(figure) for totals in cells for figure in _figures(totals)]


def _endpoint_names(**which: Any) -> dict[int, str]:
    return dict(Endpoint.objects.filter(**which).values_list("pk", "name"))


def _limited_by(window: QuotaWindow, endpoints: dict[int, str]) -> tuple[Any, ...]:
    """Return the cells with the window's endpoint, rate and policy."""
    pk = window.endpoint_id
    endpoint = "" if pk is None else endpoints.get(pk, f"#{pk}")
    return endpoint, window.rate, "" if window.policy_id is None else window.policy_id


def _lines(windows: Any, name: str) -> Iterator[list[Any]]:
    endpoints = _endpoint_names()
    for window in windows.order_by("-starts_at", "counter").iterator(chunk_size=2000):
        yield [
            *(window.subject, name, window.starts_at.isoformat(), window.ends_at.isoformat()),
            *_limited_by(window, endpoints),
            *(window.used, window.limit, window.percent),
        ]


def _day_lines(months: list[Month], name: str) -> Iterator[list[Any]]:
    endpoints = _endpoint_names()
    for month in months:
        for day, totals in month.days.items():
            window = month.window
            yield [window.subject, name, day or "", *_limited_by(window, endpoints), *_figures(totals)]
