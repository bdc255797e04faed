"""Write documents as YAML or JSON for diffs: the same content gives the same bytes. Knows nothing of policies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import yaml

from .document import one_line

#: Text that other YAML readers take for a number or a boolean, though PyYAML does not.
_AMBIGUOUS = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|0o[0-7]+|[yYnN]")


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


def isoformat_utc(at: datetime) -> str:
    """Return the time in ISO 8601 and UTC: ``2026-01-31T12:00:00Z``."""
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _dump(document: Any) -> str:
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**9)
    # Characters that are not printable are in double quotes.
    return "\n".join(line if line.isprintable() else one_line(line) for line in text.split("\n"))


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
