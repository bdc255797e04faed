"""Read and write documents as YAML or JSON. Knows nothing of policies.

YAML, and JSON with it, is read as PyYAML's nodes, which have line numbers. All scalars are texts, which mean
what their field takes. Tags construct no Python objects. The same content is written as the same bytes, for diffs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import yaml

from ..exceptions import FileProblem, InvalidFile
from ..utils.escaping import one_line, printable

#: Larger files are refused unread: they would be some 200,000 policies.
MAX_BYTES = 20 * 10**6
#: How JSON writes characters above U+FFFF, as 🙂: an even number of backslashes, then two escapes.
_PAIR = re.compile(r"(?<!\\)((?:\\\\)*)(\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2})", re.IGNORECASE)
_KINDS = {"scalar": "text", "sequence": "a list", "mapping": "a mapping"}
_Loader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


def decode(raw: bytes) -> str:
    """Decode UTF-8, or UTF-16 with a byte order mark, as PowerShell writes it; raises ``InvalidFile``."""
    if len(raw) > MAX_BYTES:
        raise _refused(1, f"the file has more than {MAX_BYTES // 10**6} MB")
    try:
        return raw.decode("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _refused(line, f"this is not {error.encoding.upper()} text") from error


def read(text: str) -> Any:
    """Return the root node of the document; raises ``InvalidFile``."""
    unreadable = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if unreadable:
        line = text.count("\n", 0, unreadable.start()) + 1
        raise _refused(line, f"write the character U+{ord(unreadable[0]):04X} as an escape")
    if text.lstrip().startswith("{"):
        text = _PAIR.sub(lambda pair: pair[1] + json.loads(f'"{pair[2]}"'), text)
    try:
        root = _Loader(text).get_single_node()
        # Repeated aliases make a short file have more entries than memory; without "&" there is none.
        events = yaml.parse(text, _Loader) if "&" in text else ()
        alias = next((event for event in events if isinstance(event, yaml.AliasEvent)), None)
    except RecursionError as error:  # by the loader that is written in Python
        raise _refused(1, "this is nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        what = " ".join(part for part in (error.context, error.problem) if part)
        mark = error.problem_mark or error.context_mark
        raise _refused(mark.line + 1 if mark else 1, f"this is not valid YAML: {what}") from error
    if alias is not None:
        raise _refused(line_of(alias), f"*{alias.anchor} repeats another part of the file. Write that part out here")
    if root is None:
        raise _refused(1, "the file is empty")
    return root


def kind_of(node: Any) -> str:
    """Return ``a mapping``, ``a list``, ``text``, or ``nothing`` for a null."""
    is_null = node.id == "scalar" and not node.style and node.value.lower() in ("", "~", "null")
    return "nothing" if is_null else _KINDS[node.id]


def line_of(node: Any) -> int:
    """Return the line where the node or event begins, from 1."""
    return int(node.start_mark.line) + 1


def _refused(line: int, text: str) -> InvalidFile:
    return InvalidFile([FileProblem(line, "", one_line(text))])


def yaml_chunks(document: dict[str, Any]) -> Iterator[str]:
    """Yield YAML in chunks, a blank line between sections; a document holds scalars and lists of mappings."""
    for number, (name, value) in enumerate(document.items()):
        yield "\n" if number else ""
        if not value or not isinstance(value, list):
            yield _dump({name: value})
            continue
        # PyYAML does not indent lists. "  - " begins a line only of a list within an entry, as other text of an entry
        # is below its key.
        text = re.sub("^  - ", "    - ", _dump(value), flags=re.MULTILINE)
        yield f"{name}:\n" + re.sub("^(?=.)", "  ", text, flags=re.MULTILINE)


def json_chunks(document: dict[str, Any]) -> Iterator[str]:
    """Yield JSON in chunks."""
    yield from json.JSONEncoder(indent=2, default=isoformat_utc).iterencode(document)
    yield "\n"


#: What writes each format.
FORMATS = {"yaml": yaml_chunks, "json": json_chunks}


def isoformat_utc(at: datetime) -> str:
    """Return the time in ISO 8601 and UTC: ``2026-01-31T12:00:00Z``."""
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _dump(document: Any) -> str:
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**9)
    # Characters that are not printable are in double quotes.
    return "\n".join(map(printable, text.split("\n")))


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    # Spaces at the end of a line are invisible in a block, and PyYAML ends the document after trailing breaks.
    if not text.replace("\n", "").isprintable() or re.search(r" (\n|\Z)|(\A|\n)\n\Z", text):
        style = '"'
    elif "\n" in text:
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_time(dumper: yaml.SafeDumper, at: datetime) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:timestamp", isoformat_utc(at))


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(datetime, _represent_time)
