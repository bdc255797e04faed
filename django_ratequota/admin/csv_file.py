"""CSV downloads. No cell can run as a formula in a spreadsheet."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.http import StreamingHttpResponse

#: Where a spreadsheet may read a formula: a character that starts one (the wide forms are East Asian), at the start
#: of the cell or after a separator of some locale, with spaces and quotes between.
_FORMULA = re.compile(r"""((?:^|[;,\t\r\n])[\s"']*)(?=[=+\-@＝＋－＠])""")
#: Without this byte order mark, Excel reads UTF-8 as the machine's old code page.
_BYTE_ORDER_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"


def csv_response(name: str, heads: Sequence[Any], rows: Iterable[Sequence[Any]]) -> StreamingHttpResponse:
    """Return the table as a download; ``name`` is ASCII, without ``.csv``."""
    response = StreamingHttpResponse(_lines(heads, rows), content_type="text/csv; charset=utf-8")
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
