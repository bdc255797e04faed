"""Open pages, and note the time, size and queries of each."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from html.parser import HTMLParser
from statistics import median
from typing import Any

from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from benchmarks.measure import Table
from benchmarks.scale.pages import BASE, Page

#: What every page has to reach.
MOST_SECONDS, MOST_BYTES = 1.0, 300_000


@dataclass(frozen=True, slots=True)
class Opened:
    """What a page took."""

    #: Median of the times, in seconds.
    seconds: float
    bytes: int
    queries: int


def open_pages(pages: dict[str, Page], times: int = 5) -> dict[str, Opened]:
    """Open each page once for its size and queries, and then ``times`` times for its time."""
    clients: dict[str, Client] = {}
    for name in {page.operator for page in pages.values()}:
        clients[name] = Client()
        clients[name].force_login(User.objects.get(username=name))
    found = {}
    for name, page in pages.items():
        client = clients[page.operator]
        sent = _sent(page, client, 0)
        with CaptureQueriesContext(connection) as queries:
            response = _open(page, client, sent)
        if response.status_code != (302 if page.form == page.path else 200):
            raise RuntimeError(f"{name}: status {response.status_code} of {page.path}")
        number, size = len(queries), len(response.body)
        spent = []
        for turn in range(1, times + 1):
            sent = _sent(page, client, turn)
            begun = time.perf_counter()
            _open(page, client, sent)
            spent.append(time.perf_counter() - begun)
        sys.stderr.write(f"{median(spent) * 1000:8.0f} ms {size / 1000:6.0f} kB {number:4} queries  {name}\n")
        found[name] = Opened(median(spent), size, number)
    return found


def _sent(page: Page, client: Client, turn: int) -> dict[str, Any] | None:
    """Return what is posted; None = nothing."""
    if not page.form:
        return page.data
    fields = _Fields()
    fields.feed(client.get(page.form).content.decode())
    return {**fields.found, **{name: values[turn % 2] for name, values in page.edits.items()}}


class _Fields(HTMLParser):
    """The fields of a page's form for saving, as a browser would send them; buttons are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Any] = {}
        self._inside = False
        self._name = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        given = dict(attrs)
        name, value = given.get("name") or "", given.get("value") or ""
        if tag == "form":
            self._inside = given.get("method") == "post" and given.get("id") != "logout-form"
        elif not self._inside:
            return
        elif tag in ("select", "textarea"):
            self._name, self.found[name] = name, ""
        elif tag == "option" and "selected" in given:
            self.found[self._name] = value
        elif tag == "input" and given.get("type") not in ("submit", "file"):
            self.found |= {name: value} if name and (given.get("type") != "checkbox" or "checked" in given) else {}

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._inside = False
        elif tag in ("select", "textarea"):
            self._name = ""

    def handle_data(self, data: str) -> None:
        if self._name and self.lasttag == "textarea":
            self.found[self._name] += data


def _open(page: Page, client: Client, sent: dict[str, Any] | None) -> Any:
    """Return the response, its whole content in ``body``."""
    response: Any = client.get(page.path) if sent is None else client.post(page.path, sent)
    response.body = b"".join(response.streaming_content) if response.streaming else response.content
    return response


def table(title: str, opened: dict[str, Opened]) -> Table:
    """Return the table of a database; times beside those of Django's own list of users."""
    base = opened[BASE].seconds
    rows = [
        (name, one.seconds * 1000, one.seconds / base, round(one.bytes / 1000), one.queries, _missed(name, one))
        for name, one in opened.items()
    ]
    missed = sum(bool(row[-1]) for row in rows)
    return Table(
        title,
        ("page", "ms", "× users", "kB", "queries", "not reached"),
        rows,
        f"{missed} of {len(rows) - 1} pages take more than 1 s or 300 kB.",
    )


def _missed(name: str, one: Opened) -> str:
    over = [
        text
        for text, value, most in (("1 s", one.seconds, MOST_SECONDS), ("300 kB", one.bytes, MOST_BYTES))
        if value > most
    ]
    return "" if name == BASE else ", ".join(over)
