"""The common parts of the ledger's pages: filters, permissions, links to the next part, and downloads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

from django.http import StreamingHttpResponse
from django.utils.translation import gettext

from ..utils.csv_lines import csv_lines
from .formatting import number_text
from .pages import AdminPage

#: Without this byte order mark, Excel reads UTF-8 as the machine's old code page.
_BYTE_ORDER_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"


class LedgerPage(AdminPage):
    """A page of windows, read from the database alone; with ``csv`` in the address all of them, as a file."""

    #: Counters of a page, or windows of one that has past ones.
    page_size: ClassVar[int] = 50
    css = ("django_ratequota/usage.css", "django_ratequota/quotas.css")
    js = ("django_ratequota/subjects.js",)

    def visible(self, request: Any) -> Any:
        """Return the policies whose windows the operator may see; None = all."""
        return None if self.admin.sees_all_policies(request) else self.admin.get_queryset(request)

    def text(self, request: Any, name: str) -> str:
        """Return a text of the query."""
        return str(request.GET.get(name, "")).replace("\x00", "").strip()[:250]

    def around(
        self, query: Mapping[str, str], choices: list[Any], search: tuple[str, str], following: str
    ) -> dict[str, Any]:
        """Return the context of the form, and of the links to the first part and the one ``following``.

        ``search`` is the name and label of the field for subjects.
        """
        name, label = search
        return {
            "choices": choices,
            "search": {"name": name, "label": label, "value": query[name]},
            "subjects": self.admin.page_url("subjects"),
            "start": query["start"],
            "next": following,
        }


def csv_response(name: str, heads: Sequence[Any], rows: Iterable[Sequence[Any]]) -> StreamingHttpResponse:
    """Return the table as a download; ``name`` is ASCII, without ``.csv``."""
    lines = chain([_BYTE_ORDER_MARK], csv_lines(heads, rows))
    response = StreamingHttpResponse(lines, content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="{name}.csv"'
    response["Cache-Control"] = "no-store"
    return response


def choice(name: str, label: str, options: Mapping[str, Any], chosen: str) -> dict[str, Any]:
    """Return a select element for the template."""
    listed = [(value, text, value == chosen) for value, text in options.items()]
    return {"name": name, "label": label, "options": listed}


def share(used: int, limit: int) -> dict[str, Any]:
    """Return how much of a limit is used, for ``ledger_share.html``."""
    percent = 100 * used // limit
    return {
        "used": number_text(used),
        "limit": number_text(limit),
        "percent": percent,
        "over": percent >= 100,
        "share": gettext("%(share)s %%") % {"share": percent},
    }
