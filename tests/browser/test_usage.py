"""The live usage page, filled by real requests."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect

from .desk import Desk
from .pages import PAGES
from .scene import Scene

Desks = Callable[..., Desk]


def test_what_was_decided_is_seen_and_leads_to_its_reason(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open(PAGES["usage"].path(scene))
    expect(page.locator(".ratequota-plot svg").first).to_be_visible()
    expect(page.locator(".ratequota-usage-totals").first).to_contain_text("55")
    own.shoot("usage")
    page.get_by_role("combobox", name="Endpoint").select_option("search")
    page.get_by_role("button", name="Show").click()
    expect(page.locator(".ratequota-usage-totals").first).to_contain_text("45")
    page.locator(".ratequota-usage a[href*='explain/?']").first.click()
    expect(page.get_by_role("heading", name="Explain", exact=True)).to_be_visible()


def test_numbers_behind_the_plot_are_a_table(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open(PAGES["usage"].path(scene))
    page.locator(".ratequota-plot summary").first.click()
    expect(page.locator(".ratequota-plot table").first).to_be_visible()
    own.look()


def test_a_csv_is_downloaded(desk: Desks, scene: Scene) -> None:
    page = desk("viewer").open(PAGES["usage"].path(scene))
    with page.expect_download() as download:
        page.get_by_role("link", name="Requests over time as CSV").click()
    assert download.value.suggested_filename.startswith("ratequota-timeline")


def test_it_is_drawn_anew_while_asked_to(desk: Desks, scene: Scene) -> None:
    own = desk()
    own.page.clock.install()
    page = own.open(PAGES["usage"].path(scene))
    page.get_by_label("Refresh every 10 seconds").check()
    with page.expect_request(lambda request: "refresh=1" in request.url and request.is_navigation_request()):
        page.clock.run_for(10_500)
    expect(page.get_by_label("Refresh every 10 seconds")).to_be_checked()
