"""Write documents as YAML or JSON for diffs: the same content gives the same bytes. Knows nothing of policies."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import yaml

#: Text that other YAML readers take for a number or a boolean, though PyYAML does not.
_AMBIGUOUS = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|0o[0-7]+|[yYnN]")
#: Text that needs no quotes, unless YAML reads it as a boolean or null.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./@-]*(?::[A-Za-z0-9_./@-]+)*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
#: YAML limits keys on the line of their dash or colon; longer ones are left to PyYAML.
_SIMPLE_KEY = 100
#: Lines of list entries that are joined into one chunk.
_CHUNK = 500


def yaml_chunks(sections: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Yield YAML in chunks, a blank line between sections; lists may be any iterables of mappings."""
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
            if len(lines) > _CHUNK:
                yield "".join(lines)
                lines.clear()
        yield _dump({name: []}) if empty else "".join(lines)


def _entry(entry: dict[str, Any]) -> str:
    """Return a mapping as a list entry, without PyYAML where each value fits on its key's line."""
    lines = []
    for key, value in entry.items():
        name, text = _text_scalar(key), _text_scalar(value) if isinstance(value, str) else _scalar(value)
        if name is None or text is None or len(name) > _SIMPLE_KEY:
            return _dump({"_": [entry]}).partition("\n")[2]
        lines.append(f"    {name}: {text}\n")
    return f"  - {''.join(lines)[4:]}" if lines else "  - {}\n"


@lru_cache(4096)
def _text_scalar(text: str) -> str | None:
    """Return the text as written after its key; None where it needs more than that line."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    written = _dump({"_": text})[3:-1]
    return None if "\n" in written or not written else written


def _scalar(value: Any) -> str | None:
    """Return a number, a boolean or a time as written after its key; None for lists."""
    if isinstance(value, datetime):
        return isoformat_utc(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if type(value) is int else None


def _dump(document: Any) -> str:
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)
    return text


def json_chunks(sections: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Yield JSON in chunks; lists may be any iterables of mappings."""
    encoder = json.JSONEncoder(indent=2, default=isoformat_utc)
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


def isoformat_utc(at: datetime) -> str:
    """Return the time in ISO 8601 and UTC: ``2026-01-31T12:00:00Z``."""
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


class _Dumper(yaml.SafeDumper):
    """Indents lists, folds and shares nothing, and escapes unprintable characters."""

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
    # Spaces at the end of a line are invisible in a block, and PyYAML ends the document after trailing breaks.
    if not text.replace("\n", "").isprintable() or re.search(r" (\n|\Z)|(\A|\n)\n\Z", text):
        style = '"'
    elif "\n" in text:
        style = "|"
    elif _AMBIGUOUS.fullmatch(text):
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_time(dumper: yaml.SafeDumper, at: datetime) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:timestamp", isoformat_utc(at))


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(datetime, _represent_time)
