"""Drives the running example over HTTP, from the exhausted limit to the one raised in the admin."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from http.cookiejar import CookieJar
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, OpenerDirector, Request, build_opener

from .seed import ADMIN, PASSWORD

_TIMEOUT = 30


class Differs(Exception):
    """What was seen is not what was expected."""


def drive(address: str) -> Iterator[str]:
    """Try the whole way; yields what was seen, raises ``Differs`` at the first surprise."""
    api = _Browser(address, user="alice")
    for number in (1, 2, 3):
        seen = api.get("/api/exports/")
        _expect(f"export {number}", seen.status, 200)
    _expect("units left", seen.headers["X-RateLimit-Remaining"], "0")
    yield "exports 1-3: 200, X-RateLimit-Remaining 0"

    refused = api.get("/api/exports/")
    _expect("export 4", refused.status, 429)
    for header in ("Retry-After", "RateLimit", "RateLimit-Policy", "X-RateLimit-Reset"):
        _expect(f"{header} is there", header in refused.headers, True)
    _expect("Retry-After within the 20 minutes of 3/hour", 0 < int(refused.headers["Retry-After"]) <= 1200, True)
    yield f"export 4: 429, Retry-After {refused.headers['Retry-After']}, RateLimit {refused.headers['RateLimit']}"

    admin = _Browser(address)
    form = _form(admin.get("/admin/login/").text)
    name, password = ADMIN
    _expect("login", admin.post("/admin/login/", {**form, "username": name, "password": password}).status, 200)
    listed = admin.get("/admin/django_ratequota/ratepolicy/?q=exports")
    _expect("list of policies", listed.status, 200)
    rows = [row for row in re.findall(r"<tr.*?</tr>", listed.text, re.DOTALL) if "3/hour" in row]
    _expect("policies of 3/hour for exports", len(rows), 1)
    path = re.findall(r'href="([^"]*/change/)', rows[0])[0].partition("?")[0]
    path = path if path.startswith("/") else f"/admin/django_ratequota/ratepolicy/{path}"
    saved = admin.post(path, {**_form(admin.get(path).text), "rates": "6/hour"})
    _expect("saving 6/hour", (saved.status, "was changed successfully" in saved.text), (200, True))
    yield "admin: logged in, raised 3/hour to 6/hour"

    passed = api.get("/api/exports/")
    _expect("the next export", passed.status, 200)
    _expect("units left of 6 after 4", passed.headers["X-RateLimit-Remaining"], "2")
    yield "export 5: 200, X-RateLimit-Remaining 2: the units used before the edit still count"

    searched = api.get("/api/search/?q=report")
    _expect("search", (searched.status, 'search/min";r=45' in searched.headers["RateLimit"]), (200, True))
    yield f"search: 200, cost 5, RateLimit {searched.headers['RateLimit']}"
    answered = _Browser(address).get("/api/completions/")
    _expect("completions", (answered.status, '"remaining": 90' in answered.text), (200, True))
    yield "completions: 200, one unit at the door and nine settled afterwards: 90 of 100 left"


class _Response:
    def __init__(self, status: int, headers: Any, text: str) -> None:
        self.status, self.headers, self.text = status, headers, text


class _Browser:
    """Keeps cookies, follows redirects; as a user it sends the password with every request."""

    def __init__(self, address: str, user: str = "") -> None:
        self._address = address
        self._opener: OpenerDirector = build_opener(HTTPCookieProcessor(CookieJar()))
        token = base64.b64encode(f"{user}:{PASSWORD}".encode()).decode()
        self._headers = {"Authorization": f"Basic {token}"} if user else {}

    def get(self, path: str) -> _Response:
        return self._open(Request(self._address + path, headers=self._headers))

    def post(self, path: str, fields: dict[str, str]) -> _Response:
        headers = {**self._headers, "Referer": self._address + path}
        return self._open(Request(self._address + path, urlencode(fields).encode(), headers))

    def _open(self, request: Request) -> _Response:
        try:
            with self._opener.open(request, timeout=_TIMEOUT) as response:
                return _Response(response.status, response.headers, response.read().decode())
        except HTTPError as error:
            with error:
                return _Response(error.code, error.headers, error.read().decode())


class _FormParser(HTMLParser):
    """Collects what a browser would send for a page's fields."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: dict[str, str] = {}
        self._select = ""
        self._textarea = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        name = values.get("name", "")
        if tag == "input" and name:
            kind = values.get("type", "text")
            if kind not in ("submit", "button", "file") and (
                kind not in ("checkbox", "radio") or "checked" in values
            ):
                self.fields[name] = values.get("value", "")
        elif tag == "select":
            self._select = name
        elif tag == "option" and self._select and "selected" in values:
            self.fields[self._select] = values.get("value", "")
        elif tag == "textarea":
            self._textarea = name
            self.fields[name] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "select":
            self._select = ""
        elif tag == "textarea":
            self._textarea = ""

    def handle_data(self, data: str) -> None:
        if self._textarea:
            self.fields[self._textarea] += data


def _form(html: str) -> dict[str, str]:
    parser = _FormParser()
    parser.feed(html)
    return parser.fields


def _expect(what: str, seen: Any, wanted: Any) -> None:
    if seen != wanted:
        raise Differs(f"{what}: expected {wanted!r}, saw {seen!r}")
