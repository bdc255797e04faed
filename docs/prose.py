"""Count the patterns that make these pages hard to read, per 10,000 words; CONTRIBUTING.md explains them.

python -m docs.prose                      # the figures of all pages, beside their bounds
python -m docs.prose docs/scaling.md      # of these pages
python -m docs.prose --show what docs/    # the places where a pattern occurs
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

_VERBS = """
    add admit allow answer apply ask assign avoid become begin block break bring build call cause change
    charge check choose close come compare connect contain copy count create decide delete deny differ divide
    do drop edit end enforce enter exempt expire export fail fall fill find finish follow forget free get give
    go grow handle have hide hold import include install keep know last lead learn leave let limit list log
    look lose make mark match mean measure move name need open order pass pay place poll print publish put
    raise reach read receive record recover refund refuse remain remove rename renew repeat replace reply
    report request reset resolve restore return revert run save say see select send serve set settle share
    show sign sort split start state stay stop store take tell test throw time treat try turn undo unblock
    update use wait want warn watch work write
"""
_IRREGULAR = """
    is are was were has had does did can cannot may might must shall should will would isn't aren't doesn't
    don't can't won't goes went says said sent kept left lost made met put read ran saw set shown stood took
    told wrote gave got held knew led meant
"""


def _forms(verb: str) -> Iterator[str]:
    stem = verb.removesuffix("e")
    yield from (verb, f"{verb}s", f"{verb}es", f"{stem}ed", f"{verb}{verb[-1]}ed")
    if verb.endswith("y"):
        yield from (f"{verb[:-1]}ies", f"{verb[:-1]}ied")


_A_VERB = "|".join(sorted({form for verb in _VERBS.split() for form in _forms(verb)} | set(_IRREGULAR.split())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One pattern, its bounds per 10,000 words (None = unbounded), and the advice of CONTRIBUTING.md."""

    regex: re.Pattern[str]
    advice: str
    least: float | None = None
    most: float | None = None


def _compiled(regex: str) -> re.Pattern[str]:
    return re.compile(regex, re.IGNORECASE)


PATTERNS = {
    "you": Pattern(
        regex=_compiled(r"\b(?:you|your|yours|yourself)\b"),
        least=120,
        advice="Address the reader: “you”, or a command.",
    ),
    "nothing": Pattern(
        regex=_compiled(
            r"(?:^|[.:;,(]\s+|\b(?:and|but|or|that|if|when|because|so|where|while|which|then)\s+)"
            r"(?:nothing|nobody|none|no one)\b"
            rf"|\b(?:nothing|nobody|none|no one)\s+(?:else\s+)?(?:{_A_VERB})\b"
        ),
        most=15,
        advice="Say it positively: “Exempt endpoints are never limited.”",
    ),
    "what": Pattern(
        regex=_compiled(r"\bwhat\b(?![^.?!]*\?)"), most=15, advice="Name the thing: “the caller's refusals”."
    ),
    "count": Pattern(
        regex=_compiled(
            r"(?<!the )(?<!a )(?<!its )(?<!this )(?<!each )(?<!query )(?<!call )"
            r"\bcounts?\b(?=\s*(?:[.,;:)]|$)|\s+(?:from|at|as|once|twice|only|for|in|per|until|there|too|again|towards?)\b)"
        ),
        most=3,
        advice="Give “count” an object, or write “applies”, “takes effect”, “is counted as”.",
    ),
    "colon": Pattern(
        regex=_compiled(r"[:;](?=\s+\S)"), most=110, advice="Use a conjunction: because, so, instead, however."
    ),
    "comma": Pattern(
        regex=_compiled(rf"(?<!,)(?<!, \w)\b\w+\)?,\s+(?:and|or)\s+(?:then\s+|also\s+|not\s+)?(?:{_A_VERB})\b"),
        most=8,
        advice="Drop the comma between two verbs of one subject.",
    ),
}


def without_names(text: str) -> str:
    """Return the page's text without the line of other names, which is for the search."""
    return re.sub(r"^Also known as: .+$", "", text, flags=re.MULTILINE)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, paragraph) of a page, without its code, tables, headings, generated parts and targets of links."""
    blank = lambda found: "\n" * found[0].count("\n")  # noqa: E731 - keeps the numbers of lines
    text = without_names(text)
    text = re.sub(r"^( *)(```+|~~~+).*?^\1\2 *$", blank, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!-- generated.*?<!-- end -->|<!--.*?-->|<[^<>]+>", blank, text, flags=re.DOTALL)
    line = 1
    for block in re.split(r"(\n[ \t]*\n)", text):
        begin, line = line, line + block.count("\n")
        for item in re.split(r"\n(?=\s*(?:[-*]|\d+\.)\s)", block.strip("\n")):
            at = begin + block[: block.find(item)].count("\n")
            if item.strip() and not re.match(r"\s*[#|]|    ", item):
                yield at, _plain(item)


def _plain(item: str) -> str:
    item = re.sub(
        r"^\s*(?:[-*]|\d+\.)\s+(?:(?:\*\*[^*]+\*\*|`[^`]+`)(?:,? (?:and |or )?)?)*:\s", "", item
    )  # a term and its text
    item = re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", item)
    item = re.sub(r"``.+?``|`[^`]+`", "code", item, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"\*+", "", item)).strip()


def pages(names: list[str]) -> list[Path]:
    """Return these pages, and those in these folders; all where none is named."""
    named = [Path(name) for name in names] or [
        ROOT / "docs",
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    ]
    found = [page for path in named for page in (sorted(path.rglob("*.md")) if path.is_dir() else [path])]
    return [page for page in found if "_build" not in page.parts]


def measure(paths: list[Path]) -> dict[str, float]:
    """Return the hits of each pattern per 10,000 words of these pages."""
    paragraphs = [text for page in paths for _, text in prose(page.read_text())]
    words = sum(len(text.split()) for text in paragraphs) or 1
    return {
        name: sum(len(pattern.regex.findall(text)) for text in paragraphs) / words * 10_000
        for name, pattern in PATTERNS.items()
    }


def exceeded(figures: dict[str, float]) -> list[str]:
    """Return a line for each figure out of its bounds."""
    return [
        f"{name}: {figure:.1f} per 10,000 words, {bound}. {pattern.advice}"
        for (name, pattern), figure in zip(PATTERNS.items(), figures.values(), strict=True)
        if (bound := _broken(pattern, figure))
    ]


def _broken(pattern: Pattern, figure: float) -> str:
    if pattern.least is not None and figure < pattern.least:
        return f"at least {pattern.least:g} wanted"
    if pattern.most is not None and figure > pattern.most:
        return f"at most {pattern.most:g} wanted"
    return ""


def main() -> None:
    """Print the figures, or the places where a pattern occurs."""
    parser = argparse.ArgumentParser(prog="python -m docs.prose", description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="pages or folders; all pages where none is named")
    parser.add_argument("--show", choices=PATTERNS, help="print the places where a pattern occurs")
    options = parser.parse_args()
    paths = pages(options.pages)
    if options.show:
        for page in paths:
            for line, text in prose(page.read_text()):
                for hit in PATTERNS[options.show].regex.finditer(text):
                    print(f"{page}:{line}: …{text[max(0, hit.start() - 50) : hit.end() + 50]}…")
        return
    figures = measure(paths)
    for name, figure in figures.items():
        pattern = PATTERNS[name]
        bound = f">= {pattern.least:g}" if pattern.least is not None else f"<= {pattern.most:g}"
        print(f"{name:8} {figure:7.1f}  {bound}")
    sys.exit("\n".join(broken) if (broken := exceeded(figures)) else 0)


if __name__ == "__main__":
    main()
