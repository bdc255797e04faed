"""Put the organisation Acme on Pro, with the day on which its months begin: three clicks from the list of plans."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.browser.desk import Desks
from tests.browser.scene import Scene


def test_an_organisation_is_put_on_a_plan_and_its_history_says_so(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open("/admin/django_ratequota/plan/")
    with own.task(clicks=3, pages=3):
        page.get_by_role("link", name="Pro", exact=True).click()
        page.get_by_role("link", name="Assign this plan").click()
        page.get_by_label("Subject:").fill("tenant:acme")
        page.get_by_label("Months begin on day:").fill("15")
        page.get_by_label("Note:").fill("Contract 7")
        page.get_by_role("button", name="Save", exact=True).click()
        row = page.locator("#result_list tr", has_text="tenant:acme")
        for text in ("Pro", "15", "Contract 7"):
            expect(row).to_contain_text(text)
    own.look()
    with own.task(clicks=2, pages=2):
        row.get_by_role("link").first.click()
        page.get_by_role("link", name="History", exact=True).click()
        expect(page.locator("#result_list tbody tr")).to_contain_text("tenant:acme: Pro")
    own.look()
    page = own.open("/admin/django_ratequota/policychange/?q=tenant:acme")
    expect(page.locator("#result_list tbody tr").first).to_contain_text("Contract 7")
