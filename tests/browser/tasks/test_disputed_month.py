"""A disputed month: which days were used, what was given back, by whom: five actions."""

from __future__ import annotations

from datetime import timedelta

from playwright.sync_api import expect

from django_ratequota.models import Endpoint, QuotaWindow, RatePolicy
from tests.browser.desk import Desks
from tests.browser.pages import PAGES
from tests.browser.scene import Scene
from tests.support.windows import given_back, of_day


def test_a_disputed_month(desk: Desks, scene: Scene) -> None:
    """Acme says they did not use 900 exports."""
    exports = Endpoint.objects.create(name="exports")
    quota = RatePolicy.objects.create(subject="tenant:acme", endpoint=exports, rates="1000/month")
    scene.months("tenant:acme", quota, 1000, (900, 40))
    window = QuotaWindow.objects.filter(subject="tenant:acme").earliest("first_day")
    QuotaWindow.objects.filter(pk=window.pk).update(charged=1100, refunded=200)
    of_day(window, window.first_day + timedelta(days=19), 200, 200)
    at = window.starts_at + timedelta(days=19, hours=9)
    given_back(window, 150, at=at, actor=scene.operators["superuser"], reason="Ticket 4711: the export was empty")
    own = desk()
    page = own.open(PAGES["home"].path(scene))
    with own.task(actions=5):
        page.get_by_label("Customer or refusal").fill("tenant:acme")
        page.keyboard.press("Enter")
        page.get_by_role("link", name="Past quotas").click()
        page.get_by_role("link", name="Days from").last.click()
        expect(page.get_by_role("row", name="Total")).to_contain_text("1,100")
    expect(page.locator(".ratequota-quotas-days tbody tr")).to_have_count(3)
    expect(page.get_by_role("row", name="Total").locator("td").last).to_have_text("900")
    entry = page.get_by_role("region", name="Refunds by operators").locator("tbody tr")
    expect(entry).to_have_count(1)
    for text in ("superuser", "exports", "150", "Ticket 4711"):
        expect(entry).to_contain_text(text)
    own.look()
    own.shoot("past-days")
