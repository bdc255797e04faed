"""The CSV exports of the Live usage page. No cell can run as a formula in a spreadsheet."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from django.contrib import messages
from django.http import HttpResponseRedirect, StreamingHttpResponse
from django.utils.translation import gettext_lazy as _

from ...exceptions import StoreError
from ...monitoring.timeline import Counts
from ..formatting import shown
from ..names import caller_names, caller_text
from .counts import Selection, most_refused, newest_refusals, read_timeline, top_callers
from .labels import VisibleNames
from .selection_page import SelectionPage

#: Most callers of each outcome, and most refusals in a file.
_MOST_CALLERS = 1000
_MOST_REFUSALS = 1000
#: Where a spreadsheet may read a formula: a character that starts one (the wide forms are East Asian), at the start
#: of the cell or after a separator of some locale, with spaces and quotes between.
_FORMULA = re.compile(r"""((?:^|[;,\t\r\n])[\s"']*)(?=[=+\-@＝＋－＠])""")
#: Without this byte order mark, Excel reads UTF-8 as the machine's old code page.
_BYTE_ORDER_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"
_COUNTS: tuple[Any, ...] = (_("admitted"), _("of these would be refused"), _("refused"))
_POLICY_COUNTS = (_("would be refused"), _("refused"))

Table = tuple[Sequence[Any], Iterable[Sequence[Any]]]


def csv_response(name: str, table: Table) -> StreamingHttpResponse:
    """Return the table as a download; ``name`` is ASCII, without ``.csv``."""
    response = StreamingHttpResponse(_lines(*table), content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="{name}.csv"'
    response["Cache-Control"] = "no-store"
    return response


def cell(value: Any) -> Any:
    """Return a text that no spreadsheet runs; numbers stay numbers."""
    if isinstance(value, int | float):
        return value
    return _FORMULA.sub(r"\1'", str(value))


class _Echo:
    """A file that returns each line instead of keeping it."""

    def write(self, text: str) -> str:
        return text


def _lines(heads: Sequence[Any], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    writer = csv.writer(_Echo(), quoting=csv.QUOTE_ALL)
    yield _BYTE_ORDER_MARK + writer.writerow([cell(head) for head in heads])
    for row in rows:
        yield writer.writerow([cell(value) for value in row])


def _numbers(counts: Counts) -> tuple[int, int, int]:
    return counts.admitted, counts.would_refuse, counts.refused


def _timeline(selection: Selection, names: VisibleNames) -> Table:
    timeline = read_timeline(selection)
    slots = zip(timeline.starts, timeline.total, strict=True)
    return [_("from"), *_COUNTS], ([start.isoformat(), *_numbers(counts)] for start, counts in slots)


def _endpoints(selection: Selection, names: VisibleNames) -> Table:
    found = most_refused(read_timeline(selection).endpoints)
    return ["id", _("endpoint"), *_COUNTS], [[pk, names.endpoint(pk), *_numbers(counts)] for pk, counts in found]


def _policies(selection: Selection, names: VisibleNames) -> Table:
    found = names.visible_sums(read_timeline(selection))
    # Read while the file is sent, a batch at a time, because ten thousand policies take 50 MB.
    rows = ([pk, name, *_numbers(counts)] for pk, name, counts in names.policy_rows(found))
    return ["id", _("policy"), *_COUNTS], rows


def _callers(selection: Selection, names: VisibleNames) -> Table:
    found = {top.caller: top for rows in top_callers(selection, _MOST_CALLERS).values() for top in rows}
    users = caller_names(found)
    order = sorted(found.values(), key=lambda top: (-top.counts.refused, -top.counts.admitted, top.caller))
    # What a policy admitted is not counted by caller.
    heads, left_out = (_COUNTS, 0) if selection.policy_id is None else (_POLICY_COUNTS, 1)
    rows = [[top.caller, caller_text(top.caller, users), *_numbers(top.counts)[left_out:]] for top in order]
    return [_("caller"), _("name"), *heads], rows


def _refused(selection: Selection, names: VisibleNames) -> Table:
    found = newest_refusals(selection, names.endpoints, _MOST_REFUSALS)
    users = caller_names(refusal.caller for refusal in found)
    heads = ["id", _("at"), _("refusals"), _("caller"), _("name"), _("address"), _("method"), _("scope"), _("route")]
    rows = [
        [
            refusal.id,
            refusal.at.isoformat(),
            refusal.count,
            refusal.caller,
            caller_text(refusal.caller, users),
            refusal.ip,
            refusal.method,
            refusal.scope,
            refusal.route,
            ", ".join(refusal.violated),
            refusal.error,
            refusal.revision,
        ]
        for refusal in found
    ]
    return [*heads, _("refused by"), _("error"), _("revision")], rows


#: The exports by name. They may raise ``StoreError``, but not after sending has begun.
EXPORTS: dict[str, Callable[[Selection, VisibleNames], Table]] = {
    "timeline": _timeline,
    "endpoints": _endpoints,
    "policies": _policies,
    "callers": _callers,
    "refusals": _refused,
}


class UsageExport(SelectionPage):
    """A table of the Live usage page as CSV, with all its rows."""

    path, name = "usage/csv/", "usage_csv"

    def view(self, request: Any) -> Any:
        """Return the file; redirect to the page with an error if Redis does not answer or the table is unknown."""
        selection, names = self.selection(request)
        table = request.GET.get("what", "")
        if table in EXPORTS:
            try:
                return csv_response(f"ratequota-{table}-{selection.slug}", EXPORTS[table](selection, names))
            except StoreError as error:
                text = _("Redis did not answer (%(reason)s). Nothing was exported. Try again later.")
                words = {"reason": error.reason}
        else:
            text = _("There is no export “%(what)s”. Choose one of: %(known)s.")
            words = {"what": shown(table)[:60], "known": ", ".join(EXPORTS)}
        self.admin.message_user(request, text % words, messages.ERROR)
        return HttpResponseRedirect(self.admin.page_url("usage") + selection.query())
