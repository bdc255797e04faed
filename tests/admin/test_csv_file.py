"""CSV downloads: no cell is a formula, whichever separator a spreadsheet splits at."""

from __future__ import annotations

import csv
import io
import re
from itertools import product

from django_ratequota.admin.ledger_pages import csv_response
from django_ratequota.utils.csv_lines import cell


def test_no_cell_is_a_formula() -> None:
    for text in ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1", ' "=1', "'=1", "\x00=1"):
        harmless = re.sub("(?=[=+@＝-])", "'", text, count=1)
        for before in ("", "a;", "a,", "a\t", "a\r", "a\n", 'a;"\n'):
            assert cell(before + text) == before + harmless
    for value in (5, -5, 0.5, None, "a=1", "", "1-1", "a; b, c", "search/min, all/day"):
        assert cell(value) == value


def test_names_that_are_formulas() -> None:
    """A German Excel splits at semicolons, which nothing quoted: ``=cmd|'/C calc'!A0`` was a cell of its own."""
    names = ["a;=cmd|'/C calc'!A0", 'a";"=cmd', "a,=cmd", "a;\n=cmd", "=cmd", 'a;;" =cmd']
    response = csv_response("names", ["name", "same"], ([name, name] for name in names))
    assert response["Content-Disposition"] == 'attachment; filename="names.csv"'
    text = b"".join(response).decode()
    assert re.fullmatch(r'\ufeff(?:"(?:[^"]|"")*"(?:,|\r\n))+', text), "every cell is quoted"
    for delimiter, quoting in product(",;\t", (csv.QUOTE_MINIMAL, csv.QUOTE_NONE)):
        rows = csv.reader(io.StringIO(text[1:]), delimiter=delimiter, quoting=quoting)
        cells = [one.strip(' \t\r\n"') for row in rows for one in row]
        assert [one for one in cells if one.startswith(("=", "+", "-", "@"))] == []
