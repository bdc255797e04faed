"""Halve a limit, see whom that would have hit, save it, then undo the save: nine actions."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.browser.desk import Desks
from tests.browser.pages import PAGES
from tests.browser.scene import Scene


def test_a_limit_is_halved_and_the_save_is_undone(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open(PAGES["home"].path(scene))
    with own.task(actions=9):
        page.locator("#content").get_by_role("link", name="Rate policies", exact=True).click()
        page.locator("#result_list tr", has_text="10/min").filter(has_text="Free").locator("th a").click()
        page.get_by_label("Rates").fill("5/min")
        page.get_by_role("button", name="Estimate impact").click()
        expect(page.locator("#ratequota-impact").get_by_role("link", name="user dave")).to_be_visible()
        page.get_by_role("button", name="Save", exact=True).click()
        expect(page.locator(".messagelist .success")).to_contain_text("was changed successfully")
        scene.free_search.refresh_from_db()
        assert scene.free_search.rates == "5/min"
        page.get_by_role("navigation", name="Rate quotas").get_by_role("link", name="History").click()
        page.locator("#result_list tbody tr").first.locator("th a").click()
        expect(page.locator("#content-main")).to_contain_text("5/min")
        page.get_by_role("link", name="Undo this change…").click()
        page.get_by_role("button", name="Undo this change").click()
        expect(page.locator(".messagelist .success")).to_be_visible()
    scene.free_search.refresh_from_db()
    assert scene.free_search.rates == "10/min"
