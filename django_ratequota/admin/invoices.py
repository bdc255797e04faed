"""The Invoices page: what each customer has used of calendar limits in a month, by plan, and the list as CSV."""

from __future__ import annotations

import re
from typing import Any

from django import forms
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import Endpoint, Plan
from ..operations.invoices import (
    HEADS,
    InvoiceLine,
    Invoices,
    cells,
    is_recorded,
    previous_month,
    similar_subjects,
)
from .csv_file import csv_response
from .formatting import moment, number_text, shown
from .names import caller_text
from .pages import AdminPage

#: Counters of a page.
_PAGE = 50
_MONTH = re.compile("[12][0-9]{3}-(0[1-9]|1[0-2])")
#: Period of a rate -> what was used of its limit; of all its days or weeks together, as each has the limit.
_USED = {
    "month": _("%(used)s of %(limit)s %(units)s"),
    "week": _("%(used)s %(units)s (%(limit)s each week)"),
    "day": _("%(used)s %(units)s (%(limit)s each day)"),
}


class InvoicesPage(AdminPage):
    """What each customer has used in a month; with ``csv`` in the address all lines, as a file."""

    path, name = "invoices/", "invoices"
    media = forms.Media(
        css={"all": ["django_ratequota/usage.css", "django_ratequota/quotas.css"]},
        js=["django_ratequota/subjects.js"],
    )

    def view(self, request: Any) -> Any:
        """Return the page, or the file; both are read from the database alone."""
        sees_all = self.admin.sees_all_policies(request)
        # Others see overrides only, which are of no plan.
        models: dict[str, Any] = {"plan": Plan, "endpoint": Endpoint} if sees_all else {"endpoint": Endpoint}
        choices = {field: dict(model.objects.values_list("pk", "name")) for field, model in models.items()}
        checks = {field: set(map(str, known)).__contains__ for field, known in choices.items()}
        query = self.known_parameters(request, {"month": _MONTH.fullmatch, **checks})
        query["month"] = query["month"] or previous_month()
        query["subject"] = _text(request, "subject")
        invoices = Invoices(
            month=query["month"],
            subject=query["subject"],
            **{field: int(query[field]) for field in choices if query[field]},
            policies=None if sees_all else self.admin.get_queryset(request),
        )
        if "csv" in request.GET:
            return csv_response(f"ratequota-invoices-{invoices.month}", HEADS, map(cells, invoices.lines()))
        start = _text(request, "start")
        lines, following = invoices.page(start, _PAGE)
        query = {name: value for name, value in query.items() if value}
        unknown = bool(invoices.subject) and not lines and not is_recorded(invoices.subject)
        similar = similar_subjects(invoices.subject) if unknown and sees_all else []
        labels = {"plan": gettext("Plan"), "endpoint": gettext("Endpoint")}
        context = {
            "title": gettext("Invoices: %s") % invoices.month,
            "invoices": invoices,
            "subjects": self.admin.page_url("subjects"),
            "choices": [
                (field, labels[field], [(pk, shown(name), str(pk) == query.get(field)) for pk, name in known.items()])
                for field, known in choices.items()
            ],
            "lines": [self._line(line) for line in lines],
            "unknown": unknown,
            "similar": [(shown(one), self.url(query={**query, "subject": one})) for one in similar],
            "chosen": len(query) > 1,
            "first": self.url(query=query) if start else "",
            "next": self.url(query={**query, "start": following}) if following else "",
            "csv": self.url(query={**query, "csv": "1"}),
        }
        return self.render(request, "invoices.html", context)

    def _line(self, line: InvoiceLine) -> dict[str, Any]:
        units = gettext("requests") if line.unit == "requests" else gettext("units")
        figures = {"used": number_text(line.used), "limit": number_text(line.limit), "units": units}
        return {
            "line": line,
            "caller": caller_text(line.subject, {line.subject: shown(line.name)} if line.name else {}),
            "past": self.admin.page_url("quota_history", query={"subject": line.subject}),
            "plan": shown(line.plan),
            "endpoint": gettext("all endpoints") if line.endpoint is None else shown(line.endpoint),
            "used": _USED[line.period] % figures,
            "over": number_text(line.over) if line.over else "",
            "changed": moment(line.changed_at),
        }


def _text(request: Any, name: str) -> str:
    return str(request.GET.get(name, "")).replace("\x00", "").strip()[:250]
