"""A browser at work on a live server. Each test has the scene, and a desk for each operator that it asks for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import django
import pytest
from django.conf import settings
from django.test import Client

from django_ratequota.monitoring import collector, health
from tests.browser.desk import Desk
from tests.browser.scene import Scene
from tests.support.threads import by_hand

#: Names the browser where it is none of these on PATH.
_VARIABLE = "RATEQUOTA_TEST_BROWSER"
_NAMES = ("chromium", "chromium-browser", "google-chrome")

# Playwright's own event loop runs in the thread of the tests, and Django takes that for an async test.
os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"


def _browser() -> str:
    found = (shutil.which(name) for name in (os.environ.get(_VARIABLE), *_NAMES) if name)
    return next((path for path in found if path), "")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that writes pictures."""
    parser.addoption("--screenshots", action="store_true", help="Write the pictures of the docs into docs/images/.")


def pytest_configure(config: pytest.Config) -> None:
    """Without a browser nothing runs, and nothing is skipped."""
    if not _browser():
        raise pytest.UsageError(
            "The browser tests need Chromium: install it (on Debian: apt-get install chromium), or name another "
            f"one's program in {_VARIABLE}."
        )


def pytest_report_header() -> str:
    """What runs here, by name."""
    return f"browser: {_browser()}; Django {django.__version__}; CSP by {settings.CSP_MIDDLEWARE}"


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args: dict[str, Any]) -> dict[str, Any]:
    """Debian's browser, which asks nobody on the network for anything."""
    arguments = ["--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        arguments.append("--no-sandbox")  # Chromium as root has none
    return {**browser_type_launch_args, "executable_path": _browser(), "args": arguments}


@pytest.fixture(scope="session")
def base_url(live_server: Any) -> str:
    """Where paths begin; stands in for pytest-base-url's, which the newest pytest warns of."""
    return str(live_server.url)


@pytest.fixture
def scene(
    live_server: Any, fresh_policies: None, checkpointing: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scene]:
    """The rows that the pages show, and what callers did so far; nothing else in Redis.

    What is counted is flushed when a test says so, not in the background once a second.
    """
    by_hand(monkeypatch, collector.counting, health.reporting)
    monkeypatch.setattr(collector, "_CHUNK_SECONDS", 0.0)  # else the first flush may be too early for them
    collector.collector.clear()
    scene = Scene()
    scene.traffic()
    yield scene
    collector.collector.clear()


@pytest.fixture
def desk(
    scene: Scene, live_server: Any, new_context: Callable[..., Any], request: pytest.FixtureRequest
) -> Iterator[Callable[[str], Desk]]:
    """Opens a browser for an operator; in the end no page may have complained about anything."""
    desks: list[Desk] = []

    def open_desk(operator: str = "superuser") -> Desk:
        client = Client()
        client.force_login(scene.operators[operator])
        cookie = client.cookies[settings.SESSION_COOKIE_NAME].value
        context = new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
        context.set_default_timeout(15_000)  # a page that takes longer never comes
        context.add_cookies([{"name": settings.SESSION_COOKIE_NAME, "value": cookie, "url": live_server.url}])
        desks.append(Desk(context, live_server.url, write_images=request.config.getoption("--screenshots")))
        return desks[-1]

    yield open_desk
    complaints = [complaint for one in desks for complaint in one.close()]
    assert not complaints, "\n".join(complaints)
