"""The snippets of Markdown pages: found in their fences, each with what the page says about running it."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
#: Right above a fence: why its snippet cannot run as it stands.
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
        """The file that its first line names, ``# limits.py`` say; "" = it is to be run, not imported."""
        named = re.match(r"# (\w+\.py)$", self.text, re.MULTILINE)
        return named[1] if named else ""

    @property
    def padded(self) -> str:
        """Its text on the lines that it has in the page, so that tracebacks point there."""
        return "\n" * (self.line - 1) + self.text


def snippets(page: Path) -> list[Snippet]:
    """The page's snippets in their order."""
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
    """The snippet of the page that is this file."""
    return next(one.text for one in snippets(page) if one.file == file)


def links(page: Path) -> list[str]:
    """Where the page's links and pictures lead, but for other sites and places on the page itself."""
    text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = [
        one for pair in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text) for one in pair if one
    ]
    return [target.partition("#")[0] for target in targets if not re.match(r"\w+:|#", target)]
