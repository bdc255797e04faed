"""Raise this customer's limit until Friday: six actions."""

from __future__ import annotations

from datetime import time, timedelta

from django.utils import timezone
from playwright.sync_api import expect

from django_ratequota.models import RatePolicy
from tests.browser.desk import Desks
from tests.browser.pages import PAGES
from tests.browser.scene import Scene
from tests.browser.test_enforcement import ask


def test_a_customers_limit_is_raised_until_friday(desk: Desks, scene: Scene) -> None:
    scene.free_search.rates = "10/hour"
    scene.free_search.save()
    today = timezone.localdate()
    friday = today + timedelta(days=(4 - today.weekday()) % 7)
    own = desk()
    page = own.open(PAGES["home"].path(scene))
    assert [ask(page, "carol").status for _ in range(3)] == [200, 200, 429]
    with own.task(actions=6):
        page.get_by_label("Customer or refusal").fill("carol")
        page.get_by_label("Customer or refusal").press("Enter")
        counter = page.locator(".ratequota-counter").filter(has_text="search: 10/hour")
        expect(counter).to_contain_text("10 of 10 used, 0 left.")
        counter.get_by_role("link", name="Boost…").click()
        expect(page.get_by_label("Rates instead of")).to_have_value("20/hour")
        page.get_by_label("Or until: Date").fill(f"{friday:%Y-%m-%d}")
        page.get_by_label("Reason").fill("Ticket 4714")
        page.get_by_role("button", name="Yes, boost").click()
        expect(page.locator(".messagelist .success")).to_contain_text("20/hour until")
    assert [ask(page, "carol").status for _ in range(3)] == [200, 200, 429]
    boost = RatePolicy.objects.get(user=scene.carol)
    assert (boost.rates, boost.reason) == ("20/hour", "Ticket 4714")
    assert boost.ends_at is not None
    end = timezone.localtime(boost.ends_at)
    assert (end.date(), end.time()) == (friday, time(23, 59, 59))
