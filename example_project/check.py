"""Check the running example over HTTP: exhaust a limit, raise it in the admin, go on."""

from __future__ import annotations

import json
import re
import time
from base64 import b64encode
from collections.abc import Generator
from html.parser import HTMLParser
from http.client import HTTPException
from http.cookiejar import CookieJar
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlencode, urljoin
from urllib.request import HTTPCookieProcessor, ProxyHandler, Request, build_opener

from .seed import ADMIN, PASSWORD

_TIMEOUT = 30
_POLICIES = "/admin/django_ratequota/ratepolicy/"


class Differs(Exception):
    """The example did something else than expected."""


def drive(address: str) -> Generator[str, None, None]:
    """Go through the tutorial; yields a line per step, raises ``Differs`` at the first unexpected response.

    The edited policy is restored at the end, because the database may outlive the check.
    """
    admin = log_in(address)
    policy = policy_path(admin, plan="Free", endpoint="exports")
    before = set_rates(admin, policy, "3/hour")
    yield f"admin: logged in, plan Free has {before} for exports; the check wants 3/hour"
    try:
        yield from _use_up_and_raise(address, admin, policy)
    finally:
        set_rates(admin, policy, before)

    token = Browser(address).post("/api/login/", {"username": "alice", "password": PASSWORD})
    _expect("login", token.status, 200)
    searched = Browser(address, f"Token {json.loads(token.text)['token']}").get("/api/search/?q=report")
    _expect("search", (searched.status, 'search/min";r=45' in searched.headers["RateLimit"]), (200, True))
    yield f"login and search: 200, cost 5, RateLimit {searched.headers['RateLimit']}"
    answered = Browser(address).get("/api/completions/")
    _expect("completions", (answered.status, "(90 units left)" in answered.text), (200, True))
    yield "completions: 200, 20 units reserved and 10 used: 90 of 100 left"
    yield _look_at_page(address)


def _look_at_page(address: str) -> str:
    visitor = Browser(address)
    page = visitor.get("/")
    _expect("the page", (page.status, "Burst of 20" in page.text), (200, True))
    files = re.findall(r'(?:href|src)="(/(?:static|docs)/[^"]+)"', page.text)
    _expect("the page's files", [(file, visitor.get(file).status) for file in files], [(file, 200) for file in files])
    form = form_fields(page.text)
    seen = visitor.post("/", {**form, "username": "alice", "password": PASSWORD})
    _expect("signing in", (seen.status, "signed in here" in seen.text), (200, True))
    usage = visitor.get("/api/quota/usage/?scope=exports")
    titles = [limit["title"] for limit in json.loads(usage.text)["limits"]]
    _expect("her limit for exports", any(title.startswith("exports: ") for title in titles), True)
    return f"page: 200, with {len(files)} files and pages; signed in as alice, her limits are {', '.join(titles)}"


def _use_up_and_raise(address: str, admin: Browser, policy: str) -> Generator[str, None, None]:
    alice = Browser(address, basic("alice", PASSWORD))
    for number in (1, 2, 3):
        seen = alice.get("/api/exports/")
        _expect(f"export {number}", seen.status, 200)
        _expect("units left", seen.headers["X-RateLimit-Remaining"], str(3 - number))
    yield "exports 1-3: 200, X-RateLimit-Remaining 2, 1, 0"

    refused = alice.get("/api/exports/")
    _expect("export 4", refused.status, 429)
    for header in ("Retry-After", "RateLimit", "RateLimit-Policy", "X-RateLimit-Reset"):
        _expect(f"{header} is there", header in refused.headers, True)
    _expect("Retry-After within the 20 minutes of 3/hour", 0 < int(refused.headers["Retry-After"]) <= 1200, True)
    yield f"export 4: 429, Retry-After {refused.headers['Retry-After']}, RateLimit {refused.headers['RateLimit']}"
    refusal_id = refused.headers["X-RateLimit-Refusal"]
    _expect("the admin's explanation", "Refused by exports: 3/hour" in explained(admin, refusal_id), True)
    yield f"admin: Explain shows that exports: 3/hour refused {refusal_id}"

    set_rates(admin, policy, "6/hour")
    yield "admin: raised 3/hour to 6/hour"
    passed = alice.get("/api/exports/")
    _expect("the next export", passed.status, 200)
    _expect("units left of 6 after 4", passed.headers["X-RateLimit-Remaining"], "2")
    yield "export 5: 200, X-RateLimit-Remaining 2: the units used before the edit still count"


def log_in(address: str) -> Browser:
    """Return a browser that is logged in to the admin."""
    admin = Browser(address)
    name, password = ADMIN
    form = form_fields(admin.get("/admin/login/?next=/admin/").text)
    seen = admin.post("/admin/login/", {**form, "username": name, "password": password})
    _expect("admin login", (seen.status, "/admin/logout/" in seen.text), (200, True))
    return admin


def policy_path(admin: Browser, plan: str, endpoint: str) -> str:
    """Search the admin for the plan's policy and return the path of its page."""
    listed = admin.get(f"{_POLICIES}?q={endpoint}")
    _expect("list of policies", listed.status, 200)
    rows = [row for row in re.findall(r"<tr.*?</tr>", listed.text, re.DOTALL) if f"plan {plan}" in row]
    _expect(f"policies of plan {plan} for {endpoint}", len(rows), 1)
    return str(urljoin(_POLICIES, re.findall(r'href="([^"?]*/change/)', rows[0])[0]))


def set_rates(admin: Browser, path: str, rates: str) -> str:
    """Change the policy's rates in its form, and nothing else; returns the rates before."""
    form = form_fields(admin.get(path).text)
    seen = admin.post(path, {**form, "rates": rates})
    _expect(f"saving {rates}", (seen.status, "was changed successfully" in seen.text), (200, True))
    return form["rates"]


def explained(admin: Browser, refusal_id: str) -> str:
    """Return the Explain page of a refusal, once its process has sent it to Redis: about a second later."""
    deadline = time.monotonic() + _TIMEOUT
    while True:
        seen = admin.get(f"{_POLICIES}explain/?id={refusal_id}")
        _expect("Explain", seen.status, 200)
        if f"Refusal {refusal_id}" in seen.text or time.monotonic() > deadline:
            return seen.text
        time.sleep(0.1)


def basic(user: str, password: str) -> str:
    """Return the Authorization header that ``curl -u user:password`` sends."""
    return f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"


class Response(NamedTuple):
    """A response that was read."""

    status: int
    headers: Any
    text: str


class Browser:
    """Keeps cookies and follows redirects; ``authorization`` is sent with every request."""

    def __init__(self, address: str, authorization: str = "") -> None:
        self._address = address
        # No proxy from the environment, because it could not reach the loopback.
        self._opener = build_opener(ProxyHandler({}), HTTPCookieProcessor(CookieJar()))
        self._headers = {"Authorization": authorization} if authorization else {}

    def get(self, path: str) -> Response:
        """GET the path; returns any response, raises ``Differs`` without one."""
        return self._open(Request(self._address + path, headers=self._headers))

    def post(self, path: str, fields: dict[str, str]) -> Response:
        """POST the fields as a form would."""
        return self._open(Request(self._address + path, urlencode(fields).encode(), self._headers))

    def _open(self, request: Request) -> Response:
        try:
            try:
                answer = self._opener.open(request, timeout=_TIMEOUT)
            except HTTPError as error:
                answer = error
            with answer:
                return Response(answer.status, answer.headers, answer.read().decode())
        except (OSError, HTTPException) as error:
            raise Differs(f"{request.selector}: no answer, {error}") from error


class _FormParser(HTMLParser):
    """Collects the values that a browser would send for a page's fields."""

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


def form_fields(html: str) -> dict[str, str]:
    """Return the fields of the page's forms with their values, by name."""
    parser = _FormParser()
    parser.feed(html)
    return parser.fields


def _expect(what: str, seen: Any, wanted: Any) -> None:
    if seen != wanted:
        raise Differs(f"{what}: expected {wanted!r}, saw {seen!r}")
