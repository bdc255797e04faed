"""The Invoices page: what each customer has used of calendar limits in a month, by plan, and the list as CSV."""

from __future__ import annotations

import re
from typing import Any

from django.utils.formats import date_format
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..operations.past_windows import HEADS, InvoiceLine, Invoices, cells, is_recorded, month_of, previous_month
from .formatting import day_text, moment, number_text, shown
from .ledger_pages import LedgerPage, csv_response
from .names import caller_text

_MONTH = re.compile("[12][0-9]{3}-(0[1-9]|1[0-2])")
#: Period of a rate -> what was used of its limit; of all its days or weeks together, as each has the limit.
_USED = {
    "month": _("%(used)s of %(limit)s %(units)s"),
    "week": _("%(used)s %(units)s (%(limit)s each week)"),
    "day": _("%(used)s %(units)s (%(limit)s each day)"),
}


class InvoicesPage(LedgerPage):
    """The usage of each customer in a month; with ``csv`` in the URL all lines, as a file."""

    name = "invoices"

    def view(self, request: Any) -> Any:
        """Return the page, or the file."""
        query = self.known_parameters(request, {"month": _MONTH.fullmatch})
        query |= {name: self.text(request, name) for name in ("subject", "start")}
        query["month"] = query["month"] or previous_month()
        invoices = Invoices(month=query["month"], subject=query["subject"], policies=self.visible(request))
        if "csv" in request.GET:
            return csv_response(f"ratequota-invoices-{invoices.month}", HEADS, map(cells, invoices.lines()))
        lines, following = invoices.page(query["start"], self.page_size)
        context = {
            "title": gettext("Invoices: %s") % date_format(month_of(invoices.month)[0], "YEAR_MONTH_FORMAT"),
            "month": invoices.month,
            "lines": [self._line(line) for line in lines],
            "unknown": bool(invoices.subject) and not lines and not is_recorded(invoices.subject),
            **self.around(query, [], ("subject", gettext("Subject")), following),
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
            "reason": shown(line.reason),
            "endpoint": gettext("all endpoints") if line.endpoint is None else shown(line.endpoint),
            "used": _USED[line.period] % figures,
            "over": number_text(line.over) if line.over else "",
            "begins": day_text(line.begins),
            "ends": day_text(line.ends),
            "days": " – ".join(dict.fromkeys(day_text(day) for day in (line.first_day, line.last_day) if day)),
            "changed": moment(line.changed_at),
        }
