"""YAML as people edit it: read with line numbers, written for diffs. Knows nothing of policies.

Nothing is constructed from what a file says. Mappings, lists and scalars are read; all else (aliases, tags, a
second document) is refused. JSON is YAML, so the same code reads it.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import yaml

from ..exceptions import FileProblem, InvalidFile

#: Larger files are refused unread: they would be some 200,000 policies.
MAX_BYTES = 20 * 10**6
#: Deeper nesting than any file of ours has.
_MAX_DEPTH = 10
_TAG = "tag:yaml.org,2002:"
_KINDS = {
    "null": "nothing",
    "bool": "true or false",
    "int": "a number",
    "float": "a number",
    "timestamp": "a date",
}
#: Text that other readers of YAML take for a number or a truth, though this one does not.
_AMBIGUOUS = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|0o[0-7]+|[yYnN]")


@dataclass(slots=True)
class Node:
    """One value of a file, and where it stands: a value of a mapping at its key's line."""

    line: int
    #: Such as ``policies[3].rates``; "" for the whole document.
    path: str
    #: ``a mapping``, ``a list``, ``text``, or what YAML takes unquoted text for: ``a number``, ``nothing`` ...
    kind: str
    #: A scalar without its quotes; "" for mappings and lists.
    text: str = ""
    entries: dict[str, Node] = field(default_factory=dict)
    items: list[Node] = field(default_factory=list)

    def problem(self, text: object) -> FileProblem:
        """What is wrong with this value."""
        return FileProblem(self.line, self.path, one_line(str(text)))


def one_line(text: str) -> str:
    """The text with whatever does not print (breaks, terminal codes, marks that turn text around) as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def decode(raw: bytes) -> str:
    """The text of a file: UTF-8, or UTF-16 with its mark, as PowerShell writes it; raises ``InvalidFile``."""
    if len(raw) > MAX_BYTES:
        raise InvalidFile([FileProblem(1, "", f"the file has more than {MAX_BYTES // 10**6} MB")])
    try:
        return raw.decode("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InvalidFile([FileProblem(line, "", f"this is no {error.encoding.upper()} text")]) from error


def read(text: str) -> tuple[Node, list[FileProblem]]:
    """The document, and the problems that hide none of it; raises ``InvalidFile`` where reading must stop."""
    try:
        loader = yaml.SafeLoader(_without_tabs(text))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = FileProblem(line, "", f"write the character U+{error.character:04X} as an escape")
        raise InvalidFile([problem]) from error
    builder = _Builder(loader)
    try:
        while loader.check_event():
            builder.take(loader.get_event())  # type: ignore[no-untyped-call]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = one_line(" ".join(part for part in (error.context, error.problem) if part))
        raise InvalidFile([FileProblem(mark.line + 1 if mark else 1, "", f"this is no YAML: {what}")]) from error
    except (ValueError, OverflowError) as error:  # \UFFFFFFFF, or a version of 5000 digits
        raise InvalidFile([FileProblem(loader.line + 1, "", f"this is no YAML: {error}")]) from error
    if builder.root is None:
        raise InvalidFile([FileProblem(1, "", "the file is empty")])
    return builder.root, builder.problems


def _without_tabs(text: str) -> str:
    """JSON may be indented with tabs, YAML may not; in JSON all tabs are between values."""
    if "\t" in text and text.lstrip().startswith("{"):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return text
        return text.replace("\t", " ")
    return text


class _Builder:
    """Makes nodes of the parser's events; unlike PyYAML's composer it does not recurse, and follows no alias."""

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self.root: Node | None = None
        self.problems: list[FileProblem] = []
        self._loader = loader
        self._open: list[Node] = []
        #: The key whose value comes next, for each open node; None where a key comes next.
        self._keys: list[tuple[str, int] | None] = []

    def take(self, event: Any) -> None:
        """Add what the event says."""
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise InvalidFile([FileProblem(line, "", "anchors and aliases (& and *) are not read: write it out")])
        if getattr(event, "tag", None) is not None:
            raise InvalidFile([FileProblem(line, "", f"tags such as {event.tag[:30]} are not read: leave it out")])
        if isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            raise InvalidFile([FileProblem(line, "", "a second document begins here: one file is one document")])
        if isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._open.pop()
            self._keys.pop()
        elif isinstance(event, yaml.ScalarEvent):
            self._scalar(event, line)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            node = self._place(line, "a mapping" if isinstance(event, yaml.MappingStartEvent) else "a list")
            self._open.append(node)
            self._keys.append(None)
            if len(self._open) > _MAX_DEPTH:
                raise InvalidFile([FileProblem(line, "", "this is nested too deeply")])

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        text = _whole(event.value, line)
        if self._open and self._open[-1].kind == "a mapping" and self._keys[-1] is None:
            self._keys[-1] = (text, line)
            return
        kind = "text"
        if event.implicit[0]:
            tag = self._loader.resolve(yaml.ScalarNode, text, event.implicit)  # type: ignore[no-untyped-call]
            kind = _KINDS.get(tag.removeprefix(_TAG), "text")
        self._place(line, kind, text)

    def _place(self, line: int, kind: str, text: str = "") -> Node:
        """A new node, put where the document stands."""
        if not self._open:
            self.root = Node(line, "", kind, text)
            return self.root
        parent = self._open[-1]
        if parent.kind == "a list":
            node = Node(line, f"{parent.path}[{len(parent.items)}]", kind, text)
            parent.items.append(node)
            return node
        if self._keys[-1] is None:
            raise InvalidFile([FileProblem(line, parent.path, f"a key is a word, not {kind}")])
        key, line = self._keys[-1]
        self._keys[-1] = None
        node = Node(line, f"{parent.path}.{one_line(key[:40])}".lstrip("."), kind, text)
        if key in parent.entries:
            self.problems.append(node.problem(f"is said already at line {parent.entries[key].line}"))
        else:
            parent.entries[key] = node
        return node


def _whole(text: str, line: int) -> str:
    """The text with the two halves of a character that JSON escapes brought together."""
    try:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError as error:
        raise InvalidFile([FileProblem(line, "", "half a character (a surrogate) stands alone here")]) from error
    if "\x00" in text:
        raise InvalidFile([FileProblem(line, "", "text has no NUL characters")])
    return text


def write_yaml(sections: dict[str, Any]) -> str:
    """The sections as YAML, a blank line between them."""
    return "\n".join(
        yaml.dump({name: value}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)
        for name, value in sections.items()
    )


def write_json(sections: dict[str, Any]) -> str:
    """The sections as JSON."""
    return json.dumps(sections, indent=2, default=moment) + "\n"


def moment(at: datetime) -> str:
    """ISO 8601 in UTC: ``2026-01-31T12:00:00Z``."""
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


class _Dumper(yaml.SafeDumper):
    """Lists indented, nothing folded, nothing shared, and what does not print as escapes."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def write_double_quoted(self, text: str, split: bool = True) -> None:
        self.allow_unicode = False
        super().write_double_quoted(text, False)
        self.allow_unicode = True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    # Blanks at a line's end are not seen in a block, and for breaks at its end PyYAML ends the document.
    if not text.replace("\n", "").isprintable() or re.search(r" (\n|\Z)|(\A|\n)\n\Z", text):
        style = '"'
    elif "\n" in text:
        style = "|"
    elif _AMBIGUOUS.fullmatch(text):
        style = "'"
    return dumper.represent_scalar(f"{_TAG}str", text, style=style)


def _represent_moment(dumper: yaml.SafeDumper, at: datetime) -> yaml.ScalarNode:
    return dumper.represent_scalar(f"{_TAG}timestamp", moment(at))


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(datetime, _represent_moment)
