"""Read YAML with line numbers. Knows nothing of policies.

No Python object is constructed from tags. Mappings, lists and scalars are read; aliases, tags and a second document
are refused. JSON is YAML, so the same code reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import yaml

from ..exceptions import FileProblem, InvalidFile

#: Larger files are refused unread: they would be some 200,000 policies.
MAX_BYTES = 20 * 10**6
#: A policy file has four levels.
_MAX_DEPTH = 10
_KINDS = {"null": "nothing", "bool": "true or false", "int": "a number", "float": "a number", "timestamp": "a date"}
#: libyaml reads ten times as fast, where PyYAML was built with it.
_FAST: Any = getattr(yaml, "CSafeLoader", None)


@dataclass(slots=True)
class Node:
    """One value of a file and its line; a value of a mapping has the line of its key."""

    line: int
    #: Such as ``policies[3].rates``; "" for the whole document.
    path: str
    #: ``a mapping``, ``a list``, ``text``, or how YAML reads unquoted text: ``a number``, ``nothing`` ...
    kind: str
    #: A scalar without its quotes; "" for mappings and lists.
    text: str = ""
    entries: dict[str, Node] = field(default_factory=dict)
    items: list[Node] = field(default_factory=list)

    def problem(self, text: object) -> FileProblem:
        """Return a problem at this value's line."""
        return FileProblem(self.line, self.path, one_line(str(text)))


#: Receives one entry of a list of the document: the list's name, the entry, and its position.
EntryHandler = Callable[[str, Node, int], None]


def one_line(text: str) -> str:
    """Escape unprintable characters: line breaks, terminal codes, direction marks."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def decode(raw: bytes) -> str:
    """Decode UTF-8, or UTF-16 with a byte order mark, as PowerShell writes it; raises ``InvalidFile``."""
    if len(raw) > MAX_BYTES:
        raise _refused(1, f"the file has more than {MAX_BYTES // 10**6} MB")
    try:
        return raw.decode("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _refused(line, f"this is not {error.encoding.upper()} text") from error


def read(text: str, new_handler: Callable[[], EntryHandler] | None = None) -> tuple[Node, list[FileProblem]]:
    """Return the document and its minor problems; raises ``InvalidFile`` where reading must stop.

    With ``new_handler``, entries of top-level lists go to the handler that it makes and are left out of the document:
    a file of 100,000 entries is never in memory as nodes. If the fast loader fails, a second handler starts over.
    """
    text = _without_tabs(text)
    if _FAST is not None:
        try:
            return _read(_FAST, text, new_handler and new_handler())
        except (yaml.YAMLError, ValueError, OverflowError):
            pass  # PyYAML reads more escapes, and its messages are the tested ones
    try:
        return _read(yaml.SafeLoader, text, new_handler and new_handler())
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _refused(line, f"write the character U+{error.character:04X} as an escape") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = one_line(" ".join(part for part in (error.context, error.problem) if part))
        raise _refused(mark.line + 1 if mark else 1, f"this is not valid YAML: {what}") from error


def _read(loaders: Any, text: str, handler: EntryHandler | None) -> tuple[Node, list[FileProblem]]:
    loader = loaders(_Stream(text) if loaders is _FAST else text)
    builder = _NodeBuilder(loader, handler)
    try:
        while loader.check_event():
            builder.add(loader.get_event())
    except (ValueError, OverflowError) as error:  # \UFFFFFFFF, or a version of 5000 digits
        if loaders is _FAST:
            raise
        raise _refused(loader.line + 1, f"this is not valid YAML: {error}") from error
    if builder.root is None:
        raise _refused(1, "the file is empty")
    return builder.root, builder.problems


class _Stream:
    """A text as a stream, because libyaml would copy a whole one."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def read(self, size: int) -> str:
        """Return the next ``size`` characters."""
        self._at += size
        return self._text[self._at - size : self._at]


def _without_tabs(text: str) -> str:
    """Replace the tabs of JSON by spaces: there they are only between values, and YAML refuses them."""
    if "\t" in text and text.lstrip().startswith("{"):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return text
        return text.replace("\t", " ")
    return text


class _NodeBuilder:
    """Builds nodes from parser events; unlike PyYAML's composer it does not recurse and follows no alias."""

    def __init__(self, loader: Any, handler: EntryHandler | None) -> None:
        self.root: Node | None = None
        self.problems: list[FileProblem] = []
        self._kind = lru_cache(4096)(self._resolve_kind)
        self._loader = loader
        self._handler = handler
        #: Entries of the open top-level list that went to the handler.
        self._handled = 0
        self._open: list[Node] = []
        #: The key whose value comes next, for each open node; None where a key comes next.
        self._keys: list[tuple[str, int] | None] = []

    def add(self, event: Any) -> None:
        """Add one parser event; raises ``InvalidFile``."""
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _refused(line, "anchors and aliases (& and *) are not supported: repeat the value")
        if getattr(event, "tag", None) is not None:
            raise _refused(line, f"tags such as {event.tag[:30]} are not supported: remove it")
        if isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            raise _refused(line, "a second document begins here: one file is one document")
        if isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            closed = self._open.pop()
            self._keys.pop()
            if self._handler is not None and len(self._open) == 2 and self._open[1].kind == "a list":
                self._handle(closed)
            elif len(self._open) == 1:
                self._handled = 0
        elif isinstance(event, yaml.ScalarEvent):
            self._add_scalar(event, line)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            node = self._new_node(line, "a mapping" if isinstance(event, yaml.MappingStartEvent) else "a list")
            self._open.append(node)
            self._keys.append(None)
            if len(self._open) > _MAX_DEPTH:
                raise _refused(line, "this is nested too deeply")

    def _add_scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        text = _join_surrogates(event.value, line)
        if self._open and self._open[-1].kind == "a mapping" and self._keys[-1] is None:
            self._keys[-1] = (text, line)
            return
        node = self._new_node(line, self._kind(text) if event.implicit[0] else "text", text)
        if self._handler is not None and len(self._open) == 2 and self._open[1].kind == "a list":
            self._handle(node)

    def _resolve_kind(self, text: str) -> str:
        tag = self._loader.resolve(yaml.ScalarNode, text, (True, False))
        return _KINDS.get(tag.removeprefix("tag:yaml.org,2002:"), "text")

    def _handle(self, node: Node) -> None:
        """Pass an entry of a top-level list to the handler."""
        section = self._open[1]
        section.items.clear()
        self._handled += 1
        if self._handler is not None:
            self._handler(section.path, node, self._handled - 1)

    def _new_node(self, line: int, kind: str, text: str = "") -> Node:
        """Add a node to the innermost open mapping or list."""
        if not self._open:
            self.root = Node(line, "", kind, text)
            return self.root
        parent = self._open[-1]
        if parent.kind == "a list":
            number = len(parent.items) + (self._handled if len(self._open) == 2 else 0)
            node = Node(line, f"{parent.path}[{number}]", kind, text)
            parent.items.append(node)
            return node
        if self._keys[-1] is None:
            raise _refused(line, f"a key must be a word, not {kind}", parent.path)
        key, line = self._keys[-1]
        self._keys[-1] = None
        node = Node(line, f"{parent.path}.{one_line(key[:40])}".lstrip("."), kind, text)
        if key in parent.entries:
            self.problems.append(node.problem(f"is already set at line {parent.entries[key].line}"))
        else:
            parent.entries[key] = node
        return node


def _join_surrogates(text: str, line: int) -> str:
    """Join the surrogate pairs that JSON escapes leave; raises ``InvalidFile`` on a lone one and on NUL."""
    try:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError as error:
        raise _refused(line, "half a character (a lone surrogate) stands here") from error
    if "\x00" in text:
        raise _refused(line, "text must not contain NUL characters")
    return text


def _refused(line: int, text: str, path: str = "") -> InvalidFile:
    return InvalidFile([FileProblem(line, path, text)])
