"""A network abuses the service: from a refusal in Traffic, it is blocked with two clicks, and opened again."""

from __future__ import annotations

from playwright.sync_api import expect

from django_ratequota.models import RatePolicy
from tests.browser.desk import Desks
from tests.browser.pages import PAGES
from tests.browser.scene import Scene


def test_a_network_is_blocked_from_a_refusal(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open(PAGES["traffic"].path(scene))
    refusals = page.locator("section").filter(has=page.get_by_role("heading", name="Newest refusals"))
    row = refusals.get_by_role("row").filter(has_text="dave").first
    with own.task(clicks=2, pages=2):
        row.get_by_role("link", name="Block…").click()
        # The narrowest choice has the focus: arrow keys move on to the address, and to its network.
        expect(page.get_by_role("radio", name="(dave)")).to_be_focused()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        expect(page.get_by_role("radio", name="/24")).to_be_checked()
        page.get_by_label("Reason").fill("Ticket 4716")
        page.get_by_role("button", name="Yes, block").click()
        expect(page.locator(".messagelist .success")).to_contain_text("/24: Blocked until")
    block = RatePolicy.objects.get(rates="blocked")
    assert (block.subject.endswith("/24"), block.reason, block.ends_at is None) == (True, "Ticket 4716", False)
    with own.task(clicks=2, pages=2):
        row.get_by_role("link", name="End it…").click()
        page.get_by_role("button", name="End it", exact=True).click()
        expect(page.locator(".messagelist .success")).to_contain_text("is not blocked any more.")
    expect(row.get_by_role("link", name="Block…")).to_be_visible()
