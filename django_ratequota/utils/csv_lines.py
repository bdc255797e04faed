"""Tables as CSV. No cell can run as a formula in a spreadsheet."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

#: Where a spreadsheet may read a formula: a character that starts one (the wide forms are East Asian), at the start
#: of the cell or after a separator of some locale, with blanks, NULs and quotes between.
_FORMULA = re.compile(r"""((?:^|[;,\t\r\n])[\s\x00"']*)(?=[=+\-@＝＋－＠])""")


def csv_lines(heads: Sequence[Any], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Yield the lines of the table, with their ends; every cell is quoted, whichever separator the reader takes."""
    writer = csv.writer(_Echo(), quoting=csv.QUOTE_ALL)
    yield writer.writerow([cell(head) for head in heads])
    for row in rows:
        yield writer.writerow([cell(value) for value in row])


def cell(value: Any) -> Any:
    """Return a text that no spreadsheet runs; numbers stay numbers, and None is empty."""
    if value is None or isinstance(value, int | float):
        return value
    return _FORMULA.sub(r"\1'", str(value))


class _Echo:
    """A file that returns each line instead of keeping it."""

    def write(self, text: str) -> str:
        return text
