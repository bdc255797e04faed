"""A customer complains of refusals: support finds out why, and raises all that refused them for two hours."""

from __future__ import annotations

from playwright.sync_api import expect

from django_ratequota.models import RatePolicy
from django_ratequota.monitoring.collector import collector
from tests.browser.desk import Desk, Desks
from tests.browser.pages import PAGES
from tests.browser.scene import Scene
from tests.browser.test_enforcement import ask


def refuse_carol(desk: Desks, scene: Scene) -> Desk:
    """Open a desk, after carol was refused at search."""
    scene.free_search.rates = "10/hour"  # by the minute, units would come back while the pages are checked
    scene.free_search.save()
    own = desk()
    assert [ask(own.page, "carol").status for _ in range(3)] == [200, 200, 429]
    collector.flush()
    return own


def test_all_that_refused_a_customer_is_raised_for_two_hours(desk: Desks, scene: Scene) -> None:
    own = refuse_carol(desk, scene)
    page = own.open(PAGES["explain"].path(scene))
    with own.task(clicks=4, pages=3):
        page.get_by_label("Customer or refusal").fill("carol")
        page.get_by_label("Customer or refusal").press("Enter")
        recent = page.locator("section").filter(has_text="Refused in the last 24 hours")
        expect(recent.get_by_role("row").filter(has_text="GET search")).to_contain_text("search: 10/hour")
        recent.get_by_role("link", name="Boost all").click()
        page.get_by_role("radio", name="for 2 hours").check()
        page.get_by_label("Reason").fill("Ticket 4714")
        page.get_by_role("button", name="Yes, grant them").click()
        expect(page.locator(".messagelist .success")).to_contain_text("20/hour until")
    assert [ask(page, "carol").status for _ in range(3)] == [200, 200, 429]
    boost = RatePolicy.objects.get(user=scene.carol)
    assert (boost.rates, boost.reason, boost.ends_at is None) == ("20/hour", "Ticket 4714", False)
