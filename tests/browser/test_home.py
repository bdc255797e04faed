"""The operators' home: from the app's index to what was refused, and to what was changed."""

from __future__ import annotations

from playwright.sync_api import expect

from django_ratequota.changes.writer import changed_by
from django_ratequota.models import PolicyChange
from django_ratequota.monitoring import health

from .desk import Desks
from .pages import PAGES
from .scene import Scene


def test_the_home_leads_to_a_refused_caller_and_to_the_newest_change(desk: Desks, scene: Scene) -> None:
    with changed_by(scene.operators["superuser"], "Ticket 4711"):
        scene.free_search.rates = "12/min"
        scene.free_search.save()
    health.report()
    own = desk()
    page = own.open(PAGES["home"].path(scene))
    home = page.locator(".ratequota-home")
    expect(home).to_contain_text("All changes are live.")
    expect(home).to_contain_text("10/min → 12/min")
    own.look()
    with own.task(actions=1):
        home.get_by_role("link", name="user dave").click()
        expect(page.get_by_role("heading", name="Explain", exact=True)).to_be_visible()
    own.open(PAGES["home"].path(scene))
    with own.task(actions=1):
        home.get_by_role("link", name="plan Free × search: 12/min").click()
        expect(page.locator("#content")).to_contain_text("Ticket 4711")
    assert PolicyChange.objects.filter(reason="Ticket 4711").count() == 1
