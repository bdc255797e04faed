"""How the pages, docstrings and log texts read: ``docs.prose``, and its bounds."""

from __future__ import annotations

from docs import prose
from tests.support.snippets import ROOT

#: Long enough to look something up, and not to be read.
LONGEST = 1500


def test_the_pages_keep_the_bounds() -> None:
    assert prose.exceeded(prose.measure(prose.pages([]))) == []


def test_the_docstrings_and_log_texts_keep_the_bounds() -> None:
    assert prose.exceeded(prose.measure(prose.modules()), code=True) == []


def test_the_texts_of_a_module_are_its_docstrings_and_log_texts() -> None:
    source = '''"""Of the module."""
def check(logger):
    """Check ``it``.

        no prose

    More of it.
    """
    logger.error("it is %s", "no text of the log")
    logger.log(10, "it is logged")
    print("printed")
'''
    assert [text for _, text in prose.docstrings(source)] == [
        "Of the module.",
        "Check code.",
        "More of it.",
        "it is %s",
        "it is logged",
    ]


def test_no_page_is_too_long_but_the_reference() -> None:
    pages = [page for page in prose.pages([]) if "reference" not in page.parts]
    words = {str(page.relative_to(ROOT)): len(prose.without_names(page.read_text()).split()) for page in pages}
    assert {page: length for page, length in words.items() if length > LONGEST} == {}
