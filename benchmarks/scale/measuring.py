"""Open pages, and note the time, size and queries of each."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
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
        with CaptureQueriesContext(connection) as queries:
            response = _open(page, client)
        if response.status_code != 200:
            raise RuntimeError(f"{name}: status {response.status_code} of {page.path}")
        number, size = len(queries), len(response.body)
        spent = []
        for _ in range(times):
            begun = time.perf_counter()
            _open(page, client)
            spent.append(time.perf_counter() - begun)
        sys.stderr.write(f"{median(spent) * 1000:8.0f} ms {size / 1000:6.0f} kB {number:4} queries  {name}\n")
        found[name] = Opened(median(spent), size, number)
    return found


def _open(page: Page, client: Client) -> Any:
    """Return the response, its whole content in ``body``."""
    response: Any = client.get(page.path) if page.data is None else client.post(page.path, page.data)
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
