"""Copy a plan with limits half as high again, then move two hundred customers to it: twelve actions."""

from __future__ import annotations

from django.contrib.auth.models import User
from playwright.sync_api import expect

from django_ratequota.models import Plan, PolicyChange
from tests.browser.desk import Desks
from tests.browser.pages import PAGES
from tests.browser.scene import Scene


def test_a_plan_is_copied_with_higher_limits_and_given_to_many(desk: Desks, scene: Scene) -> None:
    User.objects.bulk_create([User(username=f"customer{number}") for number in range(200)])
    own = desk()
    page = own.open(PAGES["home"].path(scene))
    with own.task(actions=12):
        page.locator("#content").get_by_role("link", name="Plans", exact=True).click()
        page.get_by_role("link", name="Free", exact=True).click()
        page.get_by_role("link", name="Copy plan").click()
        page.get_by_label("Name").fill("Free plus")
        page.get_by_label("Multiply all limits by").fill("1.5")
        page.get_by_role("button", name="Copy").click()
        expect(page.get_by_role("textbox", name="Rates").first).to_have_value("90/min burst 30, 1500/day")
        page.get_by_role("link", name="Assign customers").click()
        page.get_by_label("Customers, one per line").fill("\n".join(f"customer{number}" for number in range(200)))
        page.get_by_label("Reason for this change").fill("Ticket 4720")
        page.get_by_role("button", name="Assign customers").click()
        expect(page.get_by_text("200 customers were assigned.")).to_be_visible()
    assert Plan.objects.get(name="Free plus").assignments.count() == 200
    assert PolicyChange.objects.filter(reason="Ticket 4720").values("change_id").distinct().count() == 1
