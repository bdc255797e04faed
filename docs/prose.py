"""Count the patterns that make texts hard to read, per 10,000 words; CONTRIBUTING.md explains them.

python -m docs.prose                      # the figures of the pages and of the package, with their bounds
python -m docs.prose docs/scaling.md      # of these pages, or modules
python -m docs.prose --show what docs/    # the places where a pattern occurs

Of a module, its docstrings and log texts are read.
"""

from __future__ import annotations

import argparse
import ast
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
    """One pattern, its bounds per 10,000 words and the advice of CONTRIBUTING.md."""

    regex: re.Pattern[str]
    advice: str
    #: Of the pages.
    least: float | None = None
    most: float | None = None
    #: Of the docstrings and log texts of the package.
    most_in_code: float | None = None

    def bound(self, code: bool) -> str:
        """Return the bound in words; "" without one."""
        if code:
            return "" if self.most_in_code is None else f"at most {self.most_in_code:g}"
        return f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"

    def breaks(self, figure: float, code: bool) -> bool:
        """Whether the figure is out of the bound."""
        most = self.most_in_code if code else self.most
        return (most is not None and figure > most) or (not code and self.least is not None and figure < self.least)


def _compiled(regex: str) -> re.Pattern[str]:
    return re.compile(regex, re.IGNORECASE)


PATTERNS = {
    "you": Pattern(
        regex=_compiled(r"\b(?:you|your|yours|yourself)\b"),
        least=200,
        advice="Address the reader: “you”, or a command.",
    ),
    "nothing": Pattern(
        regex=_compiled(
            r"(?:^|[.:;,(]\s+|\b(?:and|but|or|that|if|when|because|so|where|while|which|then)\s+)"
            r"(?:nothing|nobody|none|no one)\b"
            rf"|\b(?:nothing|nobody|none|no one)\s+(?:else\s+)?(?:{_A_VERB})\b"
        ),
        most=3,
        most_in_code=58,
        advice="Say it positively: “Exempt endpoints are never limited.”",
    ),
    "what": Pattern(
        regex=_compiled(r"\bwhat\b(?![^.?!]*\?)"),
        most=8,
        most_in_code=90,
        advice="Name the thing: “the caller's refusals”.",
    ),
    "count": Pattern(
        regex=_compiled(
            r"(?<!the )(?<!a )(?<!its )(?<!this )(?<!each )(?<!query )(?<!call )"
            r"\bcounts?\b(?=\s*(?:[.,;:)]|$)|\s+(?:from|at|as|once|twice|only|for|in|per|until|there|too|again|towards?)\b)"
        ),
        most=3,
        most_in_code=12,
        advice="Give “count” an object, or write “applies”, “takes effect”, “is counted as”.",
    ),
    "colon": Pattern(
        regex=_compiled(r"[:;](?=\s+\S)"),
        most=25,
        most_in_code=320,
        advice="Use a conjunction: so, which, instead, however.",
    ),
    "comma": Pattern(
        regex=_compiled(rf"(?<!,)(?<!, \w)\b\w+\)?,\s+(?:and|or)\s+(?:then\s+|also\s+|not\s+)?(?:{_A_VERB})\b"),
        most=4,
        most_in_code=38,
        advice="Drop the comma between two verbs of one subject.",
    ),
    "because": Pattern(
        regex=_compiled(r"\bbecause\b"),
        most=20,
        most_in_code=15,
        advice="Join the sentences by their thought: so, which, by doing.",
    ),
    "all": Pattern(
        regex=_compiled(r"\b(?:all|each|every)\b"),
        most=93,
        most_in_code=125,
        advice="Leave the quantifier out, or name the things in the plural.",
    ),
    "others": Pattern(
        regex=_compiled(r"\bothers?\b"),
        most=42,
        most_in_code=35,
        advice="Name the things, or write “the rest”.",
    ),
    "own": Pattern(
        regex=_compiled(r"\bof (?:its|their|your|my|his|her|our|one's) own\b"),
        most=5,
        most_in_code=5,
        advice="Write “its own”, “separate” or “new”.",
    ),
    "decides": Pattern(
        regex=_compiled(r"\bdecides?\b"),
        most=3,
        most_in_code=4,
        advice="A limiter checks, a policy applies, a worker admits.",
    ),
    "whose": Pattern(
        regex=_compiled(r"\bwhose\b"),
        most=2,
        most_in_code=11,
        advice="Write “with”, or begin a second sentence.",
    ),
    "still": Pattern(
        regex=_compiled(r"\bstill\b"),
        most=4,
        most_in_code=5,
        advice="Leave it out, or say until when.",
    ),
    "short": Pattern(
        regex=re.compile(r"(?:(?<=^)|(?<=[.!?] ))[A-Z“](?:[^\s.!?]+ ){0,4}[^\s.!?]*[.!?](?= |$)"),
        most=42,
        most_in_code=50,
        advice="Join sentences of fewer than six words with their neighbours.",
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
    item = re.sub(r"^\*\*[^*]+[.?:!]\*\*\s", "", item)  # a heading in the line
    item = re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", item)
    item = re.sub(r"``.+?``|`[^`]+`", "code", item, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"\*+", "", item)).strip()


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the docstrings and log texts of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                if paragraph.strip() and not paragraph.startswith("    "):
                    yield node.body[0].lineno, _plain(paragraph)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            logged = node.args[1 if node.func.attr == "log" else 0 :]
            if getattr(node.func.value, "id", "") == "logger" and logged and isinstance(logged[0], ast.Constant):
                yield node.lineno, _plain(str(logged[0].value))


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of a page or of a module."""
    return (docstrings if path.suffix == ".py" else prose)(path.read_text())


def pages(names: list[str]) -> list[Path]:
    """Return these pages and modules, and those in these folders; the pages where none is named."""
    named = [Path(name) for name in names] or [
        ROOT / "docs",
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    ]
    found = [page for path in named for page in (sorted(_within(path)) if path.is_dir() else [path])]
    return [page for page in found if "_build" not in page.parts]


def _within(folder: Path) -> Iterator[Path]:
    return folder.rglob("*.py" if (folder / "__init__.py").exists() else "*.md")


def modules() -> list[Path]:
    """Return the modules of the package."""
    return sorted((ROOT / "django_ratequota").rglob("*.py"))


def measure(paths: list[Path]) -> dict[str, float]:
    """Return the hits of each pattern per 10,000 words of these pages or modules."""
    paragraphs = [text for path in paths for _, text in texts(path)]
    words = sum(len(text.split()) for text in paragraphs) or 1
    return {
        name: sum(len(pattern.regex.findall(text)) for text in paragraphs) / words * 10_000
        for name, pattern in PATTERNS.items()
    }


def exceeded(figures: dict[str, float], *, code: bool = False) -> list[str]:
    """Return a line for each figure out of its bounds: those of the pages, or of the package's ``code``."""
    return [
        f"{name}: {figure:.1f} per 10,000 words, {bound} wanted. {pattern.advice}"
        for (name, pattern), figure in zip(PATTERNS.items(), figures.values(), strict=True)
        if (bound := pattern.bound(code)) and pattern.breaks(figure, code)
    ]


def main() -> None:
    """Print the figures, or the places where a pattern occurs."""
    parser = argparse.ArgumentParser(prog="python -m docs.prose", description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="pages, modules or folders; all where none is named")
    parser.add_argument("--show", choices=PATTERNS, help="print the places where a pattern occurs")
    options = parser.parse_args()
    paths = pages(options.pages) + ([] if options.pages else modules())
    if options.show:
        for path in paths:
            for line, text in texts(path):
                for hit in PATTERNS[options.show].regex.finditer(text):
                    print(f"{path}:{line}: …{text[max(0, hit.start() - 50) : hit.end() + 50]}…")
        return
    broken = []
    for code in (False, True):
        if chosen := [path for path in paths if (path.suffix == ".py") == code]:
            figures = measure(chosen)
            print("docstrings and log texts" if code else "pages")
            for name, figure in figures.items():
                print(f"  {name:8} {figure:7.1f}  {PATTERNS[name].bound(code)}")
            broken += exceeded(figures, code=code)
    sys.exit("\n".join(broken) if broken else 0)


if __name__ == "__main__":
    main()
