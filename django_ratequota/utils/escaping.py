"""Text that terminals and logs show, and do not obey."""

from __future__ import annotations

import re

#: Control characters, line breaks, lone surrogates, and marks that change the direction of a text. Other characters
#: that Python does not call printable, such as a no-break space, belong to names.
_OBEYED = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def one_line(text: str) -> str:
    """Escape line breaks, terminal codes and direction marks, as Python, JSON and YAML do."""
    return text if text.isprintable() else _OBEYED.sub(lambda found: _escape(found[0]), text)


def printable(text: str) -> str:
    """Escape all characters that Python does not call printable, as ``one_line`` does some."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    # JSON has no \x1b.
    return character.encode("unicode_escape").decode().replace("\\x", "\\u00")
