"""CSV downloads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from django.http import StreamingHttpResponse

from ..utils.csv_lines import csv_lines

#: Without this byte order mark, Excel reads UTF-8 as the machine's old code page.
_BYTE_ORDER_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"


def csv_response(name: str, heads: Sequence[Any], rows: Iterable[Sequence[Any]]) -> StreamingHttpResponse:
    """Return the table as a download; ``name`` is ASCII, without ``.csv``."""
    lines = chain([_BYTE_ORDER_MARK], csv_lines(heads, rows))
    response = StreamingHttpResponse(lines, content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="{name}.csv"'
    response["Cache-Control"] = "no-store"
    return response
