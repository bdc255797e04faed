"""The form of a page of the admin as a browser would send it."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from tests.support.operators import text_of

#: The forms of Django's pages that save objects.
_SAVES = {"changelist-form"}
_NO_VALUES = {"submit", "button", "file", "image", "reset"}


class _Controls(HTMLParser):
    """Collects names and values of the form that saves."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, str] = {}
        self._inside = False
        self._text: str | None = None  # name of the open text area
        self._select: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        name = found.get("name") or ""
        if tag == "form":
            form = found.get("id") or ""
            self._inside = form in _SAVES or form.endswith("_form")
        if not self._inside or "form" in found or "__prefix__" in name or "disabled" in found:
            return
        if tag == "input" and name and found.get("type") not in _NO_VALUES:
            if found.get("type") not in {"checkbox", "radio"} or "checked" in found:
                self.values[name] = found.get("value") or ("on" if found.get("type") == "checkbox" else "")
        elif tag == "textarea":
            self._text, self.values[name] = name, ""
        elif tag == "select":
            self._select = name
        elif tag == "option" and self._select and (self._select not in self.values or "selected" in found):
            self.values[self._select] = found.get("value") or ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._inside = False
        elif tag == "textarea":
            self._text = None
        elif tag == "select":
            self._select = None

    def handle_data(self, data: str) -> None:
        if self._text is not None:
            # A browser drops the line end after the tag.
            self.values[self._text] += data if self.values[self._text] else data.lstrip("\r").removeprefix("\n")


def form_of(page: Any) -> dict[str, str]:
    """Return the values that the page's form would send as it stands."""
    controls = _Controls()
    controls.feed(text_of(page))
    return controls.values
