"""Block a network that abuses the service, then unblock it: six actions."""

from __future__ import annotations

import re

from django.utils import timezone
from playwright.sync_api import expect

from django_ratequota.models import RatePolicy
from tests.browser.desk import Desks
from tests.browser.pages import PAGES
from tests.browser.scene import Scene


def test_a_network_is_blocked_and_unblocked(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open(PAGES["home"].path(scene))
    with own.task(actions=6):
        page.get_by_label("Customer or refusal").fill("203.0.113.0/24")
        page.get_by_label("Customer or refusal").press("Enter")
        page.get_by_role("link", name="Block…").click()
        page.get_by_label("Reason").fill("Ticket 4716")
        page.get_by_role("button", name="Yes, block").click()
        expect(page.locator(".messagelist .success")).to_contain_text(re.compile("Blocked until .*/24"))
        block = RatePolicy.objects.get(rates="blocked")
        assert (block.subject, block.reason, block.ends_at is None) == ("ip:203.0.113.0/24", "Ticket 4716", False)
        page.get_by_role("button", name="End it", exact=True).click()
        expect(page.locator(".messagelist .success")).to_contain_text("No longer blocked")
    expect(page.get_by_role("link", name="Block…")).to_be_visible()


def test_a_refusal_in_traffic_leads_to_its_block(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open(PAGES["traffic"].path(scene))
    refusals = page.locator("section").filter(has=page.get_by_role("heading", name="Latest refusals"))
    refusals.get_by_role("row").filter(has_text="dave").first.get_by_role("link", name="Block…").click()
    # The narrowest choice has the focus: arrow keys move on to the address, and to its network.
    expect(page.get_by_role("radio", name="user dave")).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("radio", name="/24")).to_be_checked()


def test_enter_does_not_end_a_block(desk: Desks, scene: Scene) -> None:
    block = RatePolicy.objects.create(user=scene.dave, rates="blocked", starts_at=timezone.now())
    own = desk()
    page = own.open(f"/admin/django_ratequota/ratepolicy/block/?caller=user:{scene.dave.pk}")
    page.get_by_label("Reason for this change").fill("Ticket 4717")
    page.get_by_label("Reason for this change").press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="End it")).to_be_focused()
    own.look()
    block.refresh_from_db()
    assert block.ends_at is None
