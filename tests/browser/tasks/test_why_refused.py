"""Why was this customer refused, and what to tell them: three actions, or two with the id of the refusal."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from django_ratequota.monitoring.collector import collector
from tests.browser.desk import Desks
from tests.browser.pages import PAGES
from tests.browser.scene import Scene
from tests.browser.test_enforcement import ask


def test_a_refused_customer_is_told_why(desk: Desks, scene: Scene) -> None:
    scene.free_search.rates = "10/hour"  # by the minute, units would come back while the pages are checked
    scene.free_search.save()
    own = desk()
    page = own.page
    answers = [ask(page, "carol") for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    collector.flush()
    reference = answers[-1].headers["x-ratelimit-refusal"]
    sentence = page.locator(".ratequota-tell q")
    told = re.compile(r"Your plan Free allows 10 units per hour for search\. You had used 10\. .* is possible at .*:")
    own.open(PAGES["home"].path(scene))
    with own.task(actions=3):
        page.get_by_label("Customer or refusal").fill("carol")
        page.get_by_label("Customer or refusal").press("Enter")
        recent = page.locator("section").filter(has_text="Refusals in the last 24 hours")
        expect(recent.get_by_role("row").filter(has_text="GET search")).to_contain_text("search: 10/hour")
        recent.get_by_role("link", name="GET search").click()
        expect(sentence).to_have_text(told)
    own.open(PAGES["home"].path(scene))
    with own.task(actions=2):
        page.get_by_label("Customer or refusal").fill(reference)
        page.get_by_label("Customer or refusal").press("Enter")
        expect(sentence).to_have_text(told)
    expect(page.get_by_role("heading", name=f"Refusal {reference}")).to_be_visible()
    own.look()
    own.shoot("explain-refusal")
