"""How the pages read: ``docs.prose``, and its bounds."""

from __future__ import annotations

from docs import prose
from tests.support.snippets import ROOT

#: Long enough to look something up, and not to be read.
LONGEST = 1500


def test_the_pages_keep_the_bounds() -> None:
    assert prose.exceeded(prose.measure(prose.pages([]))) == []


def test_no_page_is_too_long_but_the_reference() -> None:
    pages = [page for page in prose.pages([]) if "reference" not in page.parts]
    words = {str(page.relative_to(ROOT)): len(prose.without_names(page.read_text()).split()) for page in pages}
    assert {page: length for page, length in words.items() if length > LONGEST} == {}
