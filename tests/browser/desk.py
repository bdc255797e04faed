"""An operator's desk: a browser logged in to the live server, which notes whatever a page complains about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import APIResponse, BrowserContext, ConsoleMessage, Locator, Page, Request, Response

#: Django says nothing of breaches of its policy, the browser tells the page alone: onto the console with them.
_TELL_BREACHES = """
document.addEventListener("securitypolicyviolation", (event) => console.error(
  "CSP:", event.effectiveDirective, event.blockedURI, event.sourceFile, event.lineNumber, event.sample));
"""
#: An action is a click, a press of Enter, or a field filled or a choice made, with the click that leads there.
_TELL_ACTIONS = """
{
  const tell = () => console.debug("ratequota action");
  let last;
  addEventListener("pointerdown", (event) => {
    if (!event.target.closest("input:not([type=submit], [type=button]), select, textarea, label")) tell();
  }, true);
  addEventListener("keydown", (event) => event.key === "Enter" && tell(), true);
  addEventListener("input", (event) => {
    const field = event.target.name || event.target;
    if (field !== last) tell();
    last = field;
  }, true);
}
"""
Scheme = Literal["light", "dark"]
#: A laptop by day and by night, a telephone.
_LOOKS: tuple[tuple[int, Scheme], ...] = ((1280, "light"), (1280, "dark"), (390, "light"))
_SCHEMES: tuple[Scheme, ...] = ("light", "dark")
#: What stands beside the page's width where it would need a horizontal scroll bar: the elements that stick out.
_WIDER = """
() => {
  const root = document.scrollingElement;
  if (root.scrollWidth <= root.clientWidth) return [];
  const out = [...document.body.querySelectorAll("*")].filter(
    (element) => element.getBoundingClientRect().right > root.clientWidth + 1
      || element.getBoundingClientRect().left < -1);
  return [`${root.scrollWidth} > ${root.clientWidth}`, ...out.map((element) => element.outerHTML.slice(0, 120))];
}
"""
#: Colours fade over: half way they are neither the light ones nor the dark ones.
_SETTLED = "() => Promise.allSettled(document.getAnimations().map((animation) => animation.finished))"
_IMAGES = Path(__file__).parents[2] / "docs" / "images"


class Desk:
    """A page of a browser, and what it complained about."""

    def __init__(self, context: BrowserContext, base: str, *, write_images: bool) -> None:
        self._context = context
        self._base = base
        self._axe = Axe()
        self._write_images = write_images
        self._expected: set[tuple[int, str]] = set()
        self._failures: list[tuple[int, str]] = []
        self._complaints: list[str] = []
        self._actions = 0
        context.add_init_script(_TELL_BREACHES)
        context.add_init_script(_TELL_ACTIONS)
        context.on("console", self._on_console)
        context.on("weberror", lambda error: self._complaints.append(f"uncaught: {error.error}"))
        context.on("response", self._on_response)
        context.on("requestfailed", self._on_request_failed)
        self.page: Page = context.new_page()

    @contextmanager
    def task(self, *, actions: int) -> Iterator[None]:
        """Bound the actions of what an operator does inside."""
        self.page.evaluate("0")  # what the page said before this was answered has arrived
        self._actions = 0
        yield
        self.page.evaluate("0")
        assert self._actions, "no action: the page was opened by its address, or the test presses no mouse button"
        assert self._actions <= actions, f"{self._actions} actions, {actions} asked"

    def open(self, path: str, status: int = 200) -> Page:
        """Go there; the answer must have that status."""
        self.expect_status(path, status)
        response = self.page.goto(path)
        assert response is not None
        assert response.status == status, f"{path}: {response.status}"
        return self.page

    def expect_status(self, path: str, status: int) -> None:
        """A request for that path may be answered so, without being a complaint."""
        self._expected.add((status, self._base + path))

    def look(self, *, once: bool = False) -> None:
        """The page as it is now, wide and narrow, light and dark: fit for everybody, and no wider than the window.

        ``once`` = to be read in the wide light one only, where the page was looked at as another operator.
        """
        found: list[str] = []
        for width, scheme in _LOOKS:
            self._turn(width, scheme)
            if not once or (width, scheme) == _LOOKS[0]:
                found += [f"{width} px, {scheme}: {one}" for one in findings(self.page, self._axe)]
            if scheme == "light":
                found += [f"{width} px, too wide: {one}" for one in self.page.evaluate(_WIDER)]
        assert not found, "\n".join([self.page.url, *found])

    def fit(self) -> None:
        """The page as it is now is no wider than a laptop's or a telephone's window."""
        found: list[str] = []
        for width in (1280, 390):
            self._turn(width, "light")
            found += [f"{width} px, too wide: {one}" for one in self.page.evaluate(_WIDER)]
        assert not found, "\n".join([self.page.url, *found])

    def look_at(self, part: str) -> None:
        """Only what the selector finds, as the rest is another project's."""
        found = findings(self.page, self._axe, part)
        assert not found, "\n".join([self.page.url, *found])

    def shoot(self, name: str, part: Locator | None = None) -> None:
        """A picture for the docs, light and dark, where the run was asked for them (--screenshots)."""
        if not self._write_images:
            return
        _IMAGES.mkdir(parents=True, exist_ok=True)
        for scheme in _SCHEMES:
            self._turn(1280, scheme)
            (part or self.page).screenshot(path=_IMAGES / f"{name}-{scheme}.png")

    def close(self) -> list[str]:
        """Close the browser's window; what was complained about meanwhile."""
        for page in self._context.pages:
            page.evaluate("0")  # what the page said before this was answered has arrived
        self._context.close()
        unexpected = [f"{status}: {url}" for status, url in self._failures if (status, url) not in self._expected]
        return [*self._complaints, *unexpected]

    def _turn(self, width: int, scheme: Scheme) -> None:
        self.page.set_viewport_size({"width": width, "height": 800})
        self.page.emulate_media(color_scheme=scheme)
        self.page.evaluate(_SETTLED)

    def _on_console(self, message: ConsoleMessage) -> None:
        self._actions += message.type == "debug" and message.text == "ratequota action"
        # An answer that is an error is looked at by itself, with its status.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self._complaints.append(f"console: {message.text} ({message.location.get('url')})")

    def _on_response(self, response: Response) -> None:
        if response.status >= 400:
            self._failures.append((response.status, response.url))

    def _on_request_failed(self, request: Request) -> None:
        # Aborted: by the page, or because it was left, or because the answer is a download.
        if request.failure != "net::ERR_ABORTED":
            self._complaints.append(f"request failed: {request.failure} ({request.url})")


def findings(page: Page, axe: Axe, part: str | None = None) -> list[str]:
    """What axe finds, a line each."""
    # Without preload: axe would put style sheets into the page, which the policy refuses.
    violations: list[dict[str, Any]] = axe.run(page, context=part, options={"preload": False}).response["violations"]
    return [
        " ".join(f"{one['id']}: {node['target']} {node['html'][:160]} {node.get('failureSummary', '')}".split())
        for one in violations
        for node in one["nodes"]
    ]


def ask(page: Page, who: str) -> APIResponse:
    """One request of the API, by an HTTP client beside the browser."""
    return page.request.get("/search/", headers={"Authorization": f"Name {who}"})


#: Opens a desk for an operator, by name.
Desks = Callable[..., Desk]
