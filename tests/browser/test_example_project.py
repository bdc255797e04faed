"""The page of ``make demo``, served by a demo of its own: it sends requests, and shows what limits make of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.package.test_example_project import Demo, Place

from .desk import Desk


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    place = Place(tmp_path_factory.mktemp("demo"))
    demo = Demo(place)
    try:
        demo.ready()
        yield demo
        assert demo.stop(by=signal.SIGINT, everyone=True)[0] == 0
    finally:
        place.end()


@pytest.fixture
def own(demo: Demo, browser: Browser, request: pytest.FixtureRequest) -> Iterator[Desk]:
    """A browser on the demo; in the end no page may have complained about anything."""
    # Not by new_context, whose paths begin at the live server.
    context = browser.new_context(
        base_url=demo.address, viewport={"width": 1280, "height": 800}, reduced_motion="reduce"
    )
    desk = Desk(context, demo.address, write_images=request.config.getoption("--screenshots"))
    yield desk
    complaints = desk.close()
    assert not complaints, "\n".join(complaints)


def send(page: Page, scope: str, *, burst: bool = False) -> Locator:
    """Click, wait for all responses, and return the newest entry."""
    name = f"Burst: send 20 requests to {scope} at once" if burst else f"Send one request to {scope}"
    before = page.locator("#said").text_content()
    page.get_by_role("button", name=name).click()
    expect(page.get_by_role("status")).not_to_have_text(before or "")
    return page.locator("#log > li").first


def limit(page: Page, policy: str) -> Locator:
    return page.get_by_role("row", name=policy).first


def test_a_burst_is_drawn_and_a_refusal_explained(own: Desk) -> None:
    page = own.open("/")
    page.get_by_role("radio", name="alice plan Free").check()
    expect(page.get_by_role("heading", name="4. See what is left for alice")).to_be_visible()
    expect(limit(page, "exports: 3/hour")).to_contain_text("3 of 3")
    entry = send(page, "search")
    expect(entry).to_contain_text("200")
    expect(entry).to_contain_text("15 of 20 left")
    expect(limit(page, "search: ")).to_contain_text("of 50")
    own.expect_status("/api/exports/", 429)
    entry = send(page, "exports", burst=True)
    expect(entry.get_by_role("img", name="3 admitted, 17 refused")).to_be_visible()
    assert [entry.locator(f".strip [data-kind={kind}]").count() for kind in ("admitted", "refused")] == [3, 17]
    expect(page.get_by_role("status")).to_have_text("exports as alice: 3 admitted, 17 refused")
    expect(limit(page, "exports: 3/hour")).to_contain_text("0 of 3")
    own.look()
    own.shoot("example", page.locator("main"))
    entry.get_by_text("Headers and body").click()
    expect(entry.locator("pre")).to_contain_text('ratelimit: "all/min";r=')
    expect(entry.locator("pre")).to_contain_text("Too many requests. Try again in")
    own.look()

    entry.get_by_role("link", name="Why? Explain").click()
    sign_in_to_the_admin(page)
    expect(page.locator(".ratequota-verdict").first).to_contain_text("Refused by exports: 3/hour")
    page.goto("/admin/django_ratequota/ratepolicy/traffic/?span=day")
    expect(page.get_by_role("img", name="Requests per 15 minutes")).to_be_visible()
    own.shoot("traffic")
    page.goto("/admin/django_ratequota/")
    expect(page.locator(".ratequota-home")).to_contain_text("All changes are live.")
    own.shoot("home")


def sign_in_to_the_admin(page: Page) -> None:
    page.get_by_label("Username").fill("admin")
    page.get_by_label("Password").fill("admin")
    page.get_by_role("button", name="Log in").click()


def test_who_is_signed_in_sees_their_own_limits(own: Desk) -> None:
    page = own.open("/")
    page.get_by_role("button", name="sign in as bob").click()
    expect(page.get_by_role("radio", name="bob signed in here")).to_be_checked()
    expect(page.get_by_role("heading", name="4. See what is left for bob")).to_be_visible()
    expect(limit(page, "exports: 30/min")).to_contain_text("30 of 30")
    own.look()
    expect(send(page, "exports")).to_contain_text("29 of 30 left")
    # A plain view knows the session, and so its user.
    expect(send(page, "status")).to_contain_text("19 of 20 left")
    expect(limit(page, "exports: 30/min")).to_contain_text("30 of 30")  # they are read again while they refill
    page.get_by_role("radio", name="anonymous").check()
    own.expect_status("/api/exports/", 401)
    expect(send(page, "exports")).to_contain_text("Needs a user")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("button", name="sign in as bob")).to_be_visible()
