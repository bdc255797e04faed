"""The snippets of Markdown pages, each with the reason why it cannot run, if there is one."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
#: The line above a fence that gives the reason why its snippet cannot run.
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>[^>]+?) -->\n\s*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """One fenced block of a page."""

    page: Path
    #: Of its first line, counted from 1.
    line: int
    language: str
    text: str
    #: Why it cannot run; "" = it can.
    not_run: str

    @property
    def file(self) -> str:
        """The file that its first line names, such as ``# mysite/urls.py``; "" = run it instead of importing it."""
        named = re.match(r"(?:#|<!--|\{#) ((?:\w+/)*\w+\.(?:py|html))(?: -->| #\})?$", self.text, re.MULTILINE)
        return named[1] if named else ""

    @property
    def padded(self) -> str:
        """Its text at the line numbers of the page, so that tracebacks point there."""
        return "\n" * (self.line - 1) + self.text


def snippets(page: Path) -> list[Snippet]:
    """Return the page's snippets in their order."""
    text = page.read_text()
    found = []
    for fence in _FENCE.finditer(text):
        before = text[: fence.start()]
        marker = _NOT_RUN.search(before)
        found.append(
            Snippet(
                page=page,
                line=before.count("\n") + 2,
                language=fence["language"],
                text=textwrap.dedent(fence["text"]),
                not_run=marker["reason"] if marker else "",
            )
        )
    return found


def snippet(page: Path, file: str) -> str:
    """Return the text of the page's snippet for this file."""
    return next(one.text for one in snippets(page) if one.file == file)


def links(page: Path) -> list[str]:
    """Return the targets of the page's links and pictures, except for other sites and the page itself."""
    text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = [
        one for pair in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text) for one in pair if one
    ]
    return [target.partition("#")[0] for target in targets if not re.match(r"\w+:|#", target)]
