"""Lines of pasted text and of files."""

from __future__ import annotations

import tracemalloc
from datetime import UTC, datetime

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from django_ratequota.models import ListMember
from django_ratequota.operations.pasted_lines import MAX_LINES, Line, lines_of, read_lines

#: Where ``str.splitlines`` ends a line, and no editor or spreadsheet does.
_NO_ENDS = "\v\f\x1c\x1d\x1e\x85\u2028\u2029"


@pytest.mark.parametrize("character", _NO_ENDS)
@pytest.mark.parametrize("columns", [True, False])
def test_a_strange_character_in_a_line_begins_no_other_line(character: str, columns: bool) -> None:
    separator = ",," if columns else " # "
    text = f"203.0.113.7{separator}see{character}0.0.0.0/1\n203.0.113.8"
    assert [line.who for line in lines_of(text, columns)] == ["203.0.113.7", "203.0.113.8"]


@pytest.mark.parametrize("columns", [True, False])
def test_lines_end_as_on_every_system(columns: bool) -> None:
    lines = lines_of("10.0.0.1\n10.0.0.2\r\n\r10.0.0.3\r10.0.0.4", columns)
    assert lines == [Line(at, f"10.0.0.{host}") for at, host in ((1, 1), (2, 2), (4, 3), (5, 4))]


def test_a_line_is_split_at_its_first_marks() -> None:
    text = "a # b # c until d\ne until f until g\nh until\nuser"
    found = [(line.who, line.until, line.reason) for line in lines_of(text)]
    assert found == [("a", "", "b # c until d"), ("e", "f until g", ""), ("h", "?", ""), ("user", "", "")]


def test_a_row_of_a_file_is_no_head_and_may_be_a_comment() -> None:
    assert [line.who for line in lines_of("#,a,b\n10.0.0.1,,\nuser,,\n", columns=True)] == ["10.0.0.1", "user"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("E-Mail;Name;Ends_at\na@b.example;Alice;2999-12-31\n", ("a@b.example", "2999-12-31", "")),
        ("id,email,username\n1,a@b.example,alice\n", ("alice", "", "")),
        ("reason,customer\nContract,tenant:acme\n", ("tenant:acme", "", "Contract")),
        ("email,plan,Valid until\na@b.example,pro,2999-12-31\n", ("a@b.example", "2999-12-31", "")),
        ("login,expires_at\nalice,2999-12-31\n", ("alice", "2999-12-31", "")),
        ("\n# Customers\nemail,reason\na@b.example,Contract\n", ("a@b.example", "", "Contract")),
        ("tenant:acme,2999-12-31,Contract\n", ("tenant:acme", "2999-12-31", "Contract")),
        ("tenant:acme\n", ("tenant:acme", "", "")),
    ],
)
def test_the_first_line_of_a_file_names_its_columns(text: str, expected: tuple[str, str, str]) -> None:
    [line] = lines_of(text, columns=True)
    assert (line.who, line.until, line.reason) == expected


def test_a_first_line_without_a_column_of_customers_is_one_error() -> None:
    """Regression: each of 201 lines had an error, as the second column was taken for an end."""
    with pytest.raises(ValidationError) as caught:
        lines_of("Account,Plan\n" + "tenant:acme,Pro\n" * 200, columns=True)
    [text] = caught.value.messages
    assert "no column that is known: Account, Plan. Name the one with customers who, " in text


def test_an_end_is_in_the_operators_time_zone_unless_it_names_another() -> None:
    ends = [("2999-12-31 18:00", 9), ("2999-12-31T18:00+02:00", 16), ("2999-12-31", 15)]
    with timezone.override("Asia/Tokyo"):
        found = [read_lines(ListMember, [Line(1, "10.0.0.1", until)]).values() for until, _hour in ends]
    assert [row.ends_at for [(_line, row)] in found] == [datetime(2999, 12, 31, hour, tzinfo=UTC) for _, hour in ends]


@pytest.mark.parametrize("head", ["", "member,end,reason\n"])
def test_as_many_lines_as_allowed_are_read(head: str) -> None:
    assert len(lines_of(head + "10.0.0.1\n" * MAX_LINES, columns=True)) == MAX_LINES


@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("line", ["10.0.0.1\n", "#\n"])
def test_a_file_that_is_too_long_is_refused_without_reading_it_all(line: str, columns: bool) -> None:
    text = line * (3_000_000 // len(line))
    tracemalloc.start()
    try:
        with pytest.raises(ValidationError, match="There are more than 25,000 lines"):
            lines_of(text, columns)
        assert tracemalloc.get_traced_memory()[1] < 25_000_000
    finally:
        tracemalloc.stop()
