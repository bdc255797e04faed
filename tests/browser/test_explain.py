"""From a refusal to its reason, and to more for that caller: what support does while the customer waits."""

from __future__ import annotations

from playwright.sync_api import expect

from django_ratequota.models import RatePolicy
from django_ratequota.monitoring.collector import collector

from .desk import Desks
from .pages import PAGES
from .scene import Scene
from .test_enforcement import ask


def test_a_refusal_leads_to_its_reason_and_to_a_boost(desk: Desks, scene: Scene) -> None:
    scene.free_search.rates = "10/hour"  # by the minute, units would come back while the pages are checked
    scene.free_search.save()
    own = desk()
    page = own.page
    answers = [ask(page, "carol") for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    collector.flush()
    reference = answers[-1].headers["x-ratelimit-refusal"]

    own.open(PAGES["explain"].path(scene))
    page.get_by_label("Customer or refusal").fill(reference)
    page.get_by_label("Customer or refusal").press("Enter")
    expect(page.get_by_role("heading", name=f"Refusal {reference}")).to_be_visible()
    expect(page.locator(".ratequota-verdict").first).to_contain_text("Refused by search: 10/hour")
    own.look()
    own.shoot("explain-refusal")

    counter = page.locator(".ratequota-standing .ratequota-counter").filter(has_text="search: 10/hour").first
    expect(counter).to_contain_text("10 of 10 used, 0 left.")
    counter.get_by_role("link", name="Boost…").click()
    page.get_by_label("Rates instead of").fill("20/hour")
    page.get_by_role("radio", name="for 1 hour").check()
    page.get_by_label("Reason").fill("Ticket 4714")
    own.look()
    assert ask(page, "carol").status == 429
    page.get_by_role("button", name="Yes, grant them").click()
    expect(page.locator(".messagelist .success")).to_be_visible()
    assert [ask(page, "carol").status for _ in range(3)] == [200, 200, 429]
    boost = RatePolicy.objects.get(user=scene.carol)
    assert (boost.rates, boost.reason, boost.ends_at is None) == ("20/hour", "Ticket 4714", False)
