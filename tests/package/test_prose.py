"""How the pages read: ``docs.prose``, and its bounds."""

from __future__ import annotations

import pytest

from docs import prose
from tests.support.snippets import ROOT

#: Long enough to look something up, and not to be read.
LONGEST = 1500


def hits(pattern: str, text: str) -> int:
    return sum(len(prose.PATTERNS[pattern].regex.findall(paragraph)) for _, paragraph in prose.prose(text))


@pytest.mark.parametrize(
    ("pattern", "written", "instead"),
    [
        ("you", "The limit is raised.", "You raise your limit."),
        ("nothing", "Nothing limits it, and nobody waits.", "It has no limit. Write nothing there."),
        ("what", "This is what refused the caller.", "These are the caller's refusals. What is a plan?"),
        ("count", "Changes count from the next request.", "It counts requests. The count at noon is 3."),
        ("colon", "It is off: turn it on; then wait.", "- **Off**: turn it on.\n\nTurn it on:\n\n    code: 1"),
        (
            "comma",
            "It adds headers, and enforces limits.",
            "It adds headers, and you set limits, plans and dates.",
        ),
    ],
)
def test_a_pattern_is_found(pattern: str, written: str, instead: str) -> None:
    found, left = (instead, written) if pattern == "you" else (written, instead)
    assert hits(pattern, found) == {"count": 1, "comma": 1, "what": 1}.get(pattern, 2)
    assert hits(pattern, left) == 0


def test_code_tables_and_targets_of_links_are_no_prose() -> None:
    page = "# You\n\n| you | what |\n|---|---|\n\n```python\nyou = 1\n```\n\nSee `you` and\n[the page](you.md).\n"
    assert list(prose.prose(page)) == [(10, "See code and the page.")]


def test_the_pages_keep_the_bounds() -> None:
    assert prose.exceeded(prose.measure(prose.pages([]))) == []


def test_no_page_is_too_long_but_the_reference() -> None:
    pages = [page for page in prose.pages([]) if "reference" not in page.parts]
    words = {str(page.relative_to(ROOT)): len(page.read_text().split()) for page in pages}
    assert {page: length for page, length in words.items() if length > LONGEST} == {}
