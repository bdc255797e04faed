"""Text that terminals and logs show, and do not obey."""

from __future__ import annotations


def one_line(text: str) -> str:
    """Escape unprintable characters, as Python, JSON and YAML do: line breaks, terminal codes, direction marks."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    # JSON has no \x1b.
    return character.encode("unicode_escape").decode().replace("\\x", "\\u00")
