"""YAML as people edit it: read with line numbers, written for diffs. Knows nothing of policies.

Nothing is constructed from what a file says. Mappings, lists and scalars are read; all else (aliases, tags, a
second document) is refused. JSON is YAML, so the same code reads it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
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
#: libyaml reads ten times as fast, where PyYAML was built with it.
_FAST: Any = getattr(yaml, "CSafeLoader", None)
#: Text that needs no quotes, unless it is a word that YAML takes for something else.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./@-]*(?::[A-Za-z0-9_./@-]+)*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
#: Longer keys are not written behind their dash, nor with a colon alone.
_SIMPLE_KEY = 100
#: Entries of a list that are written at a time.
_PIECE = 500


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


#: Takes each entry of a list of the document: the list's name, the entry, and its position.
Taker = Callable[[str, "Node", int], None]


def read(text: str, takers: Callable[[], Taker] | None = None) -> tuple[Node, list[FileProblem]]:
    """The document, and the problems that hide none of it; raises ``InvalidFile`` where reading must stop.

    With ``takers``, entries of lists are handed to the taker that it makes, and are no part of what is returned: so
    a file of 100,000 entries is never in memory as nodes. When reading begins again, another taker is made.
    """
    text = _without_tabs(text)
    if _FAST is not None:
        try:
            return _read(_FAST, text, takers and takers())
        except (yaml.YAMLError, ValueError, OverflowError):
            pass  # it reads fewer escapes, and its messages are other ones
    try:
        return _read(yaml.SafeLoader, text, takers and takers())
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = FileProblem(line, "", f"write the character U+{error.character:04X} as an escape")
        raise InvalidFile([problem]) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = one_line(" ".join(part for part in (error.context, error.problem) if part))
        raise InvalidFile([FileProblem(mark.line + 1 if mark else 1, "", f"this is no YAML: {what}")]) from error


def _read(loaders: Any, text: str, taker: Taker | None) -> tuple[Node, list[FileProblem]]:
    loader = loaders(_Slices(text) if loaders is _FAST else text)
    builder = _Builder(loader, taker)
    try:
        while loader.check_event():
            builder.take(loader.get_event())
    except (ValueError, OverflowError) as error:  # \UFFFFFFFF, or a version of 5000 digits
        if loaders is _FAST:
            raise
        raise InvalidFile([FileProblem(loader.line + 1, "", f"this is no YAML: {error}")]) from error
    if builder.root is None:
        raise InvalidFile([FileProblem(1, "", "the file is empty")])
    return builder.root, builder.problems


class _Slices:
    """A text as a stream: libyaml would copy a whole one."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def read(self, size: int) -> str:
        """The next characters."""
        self._at += size
        return self._text[self._at - size : self._at]


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

    def __init__(self, loader: Any, taker: Taker | None) -> None:
        self.root: Node | None = None
        self.problems: list[FileProblem] = []
        self._kind = lru_cache(4096)(self._resolved)
        self._loader = loader
        self._taker = taker
        #: Entries that the open list of the document has had, and where they go.
        self._taken = 0
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
            closed = self._open.pop()
            self._keys.pop()
            if self._taker is not None and len(self._open) == 2 and self._open[1].kind == "a list":
                self._hand_over(closed)
            elif len(self._open) == 1:
                self._taken = 0
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
        node = self._place(line, self._kind(text) if event.implicit[0] else "text", text)
        if self._taker is not None and len(self._open) == 2 and self._open[1].kind == "a list":
            self._hand_over(node)

    def _resolved(self, text: str) -> str:
        tag = self._loader.resolve(yaml.ScalarNode, text, (True, False))
        return _KINDS.get(tag.removeprefix(_TAG), "text")

    def _hand_over(self, node: Node) -> None:
        """Give an entry of one of the document's lists to the taker."""
        section = self._open[1]
        section.items.clear()
        self._taken += 1
        if self._taker is not None:
            self._taker(section.path, node, self._taken - 1)

    def _place(self, line: int, kind: str, text: str = "") -> Node:
        """A new node, put where the document stands."""
        if not self._open:
            self.root = Node(line, "", kind, text)
            return self.root
        parent = self._open[-1]
        if parent.kind == "a list":
            number = len(parent.items) + (self._taken if len(self._open) == 2 else 0)
            node = Node(line, f"{parent.path}[{number}]", kind, text)
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


def write_yaml(document: dict[str, Any]) -> str:
    """The document as YAML, a blank line between its sections."""
    return "".join(yaml_pieces(document.items()))


def yaml_pieces(sections: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """The text of ``write_yaml`` in pieces; lists may be any iterables of mappings."""
    for number, (name, value) in enumerate(sections):
        yield "\n" if number else ""
        if isinstance(value, str | int):
            yield _dump({name: value})
            continue
        lines = [_dump({name: [0]}).partition("\n")[0] + "\n"]
        empty = True
        for entry in value:
            empty = False
            lines.append(_entry(entry))
            if len(lines) > _PIECE:
                yield "".join(lines)
                lines.clear()
        yield _dump({name: []}) if empty else "".join(lines)


def _entry(entry: dict[str, Any]) -> str:
    """A mapping as an entry of a list of the document: by hand where each value stands on its key's line."""
    lines = []
    for key, value in entry.items():
        name, text = _scalar(key), _scalar(value) if isinstance(value, str) else _other(value)
        if name is None or text is None or len(name) > _SIMPLE_KEY:
            return _dump({"_": [entry]}).partition("\n")[2]
        lines.append(f"    {name}: {text}\n")
    return f"  - {''.join(lines)[4:]}" if lines else "  - {}\n"


@lru_cache(4096)
def _scalar(text: str) -> str | None:
    """The text as it stands behind its key; None where it takes more than that line."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    written = _dump({"_": text})[3:-1]
    return None if "\n" in written or not written else written


def _other(value: Any) -> str | None:
    """The same of what is no text; None for lists."""
    if isinstance(value, datetime):
        return moment(value)
    return str(value) if type(value) is int else None


def _dump(document: Any) -> str:
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)
    return text


def write_json(document: dict[str, Any]) -> str:
    """The document as JSON."""
    return "".join(json_pieces(document.items()))


def json_pieces(sections: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """The text of ``write_json`` in pieces; lists may be any iterables of mappings."""
    encoder = json.JSONEncoder(indent=2, default=moment)
    for number, (name, value) in enumerate(sections):
        yield f"{',' if number else '{'}\n  {encoder.encode(name)}: "
        if isinstance(value, str | int):
            yield encoder.encode(value)
            continue
        count = -1
        for count, entry in enumerate(value):
            yield ("," if count else "[") + "\n    " + encoder.encode(entry).replace("\n", "\n    ")
        yield "[]" if count < 0 else "\n  ]"
    yield "\n}\n"


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
