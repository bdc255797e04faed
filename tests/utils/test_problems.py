"""Problems in the log and in what ``status`` prints: no client writes lines or terminal codes there."""

from __future__ import annotations

import pytest

from django_ratequota.utils.escaping import one_line
from django_ratequota.utils.problems import forget, note_problem, recent

HOSTILE = "k\x1b[31m\n2026-01-01 ERROR all limits are off\u2028\u202e"


@pytest.fixture(autouse=True)
def no_others() -> None:
    forget()


def raised(text: str, cause: str = "", note: str = "") -> Exception:
    error = ValueError(text)
    error.add_note(note)
    try:
        raise error from LookupError(cause)
    except ValueError:
        return error


@pytest.mark.parametrize("texts", [(HOSTILE,), ("no such key", HOSTILE), ("no such key", "", HOSTILE)])
def test_text_of_clients_is_escaped_in_log_and_health(
    texts: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    note_problem("tests.key", f"tests.key failed: {texts[0]}", raised(*texts))
    assert "\x1b" not in caplog.text
    assert "\n2026-01-01" not in caplog.text
    assert "in raised\n" in caplog.text, "the traceback is there"
    assert recent()["tests.key"].isprintable()


def test_causes_of_an_error_with_lines_stay_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    note_problem("tests.key", "tests.key failed", raised("syntax error\nLINE 1: SELECT", "no such key"))
    assert "LookupError: no such key" in caplog.text
    assert "direct cause" in caplog.text


@pytest.mark.parametrize("name", ["Müller\u00a0GmbH", "👩\u200d💻 Ltd", "a\u00adb"])
def test_names_keep_characters_that_nothing_obeys(name: str) -> None:
    assert one_line(name) == name


def test_an_ordinary_error_is_logged_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError("no such key")
    error.__cause__ = error
    note_problem("tests.key", "tests.key failed: no such key", error)
    assert [record.exc_info and record.exc_info[1] for record in caplog.records] == [error]
