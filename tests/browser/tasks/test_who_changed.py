"""Who changed Pro, and why: two clicks from the list of plans."""

from __future__ import annotations

from playwright.sync_api import expect

from django_ratequota.changes.writer import changed_by
from django_ratequota.models import PlanAssignment, RatePolicy
from tests.browser.desk import Desks
from tests.browser.scene import Scene


def test_a_plans_history_says_who_changed_its_policies_and_why(desk: Desks, scene: Scene) -> None:
    anna = scene.dave
    with changed_by(anna, "The contract of Acme"):
        RatePolicy.objects.filter(plan=scene.pro, endpoint=scene.search).update(rates="2000/min")
    PlanAssignment.objects.create(user=scene.carol, plan=scene.pro)
    own = desk()
    page = own.open("/admin/django_ratequota/plan/")
    with own.task(clicks=2, pages=2):
        page.get_by_role("link", name="Pro", exact=True).click()
        page.locator("#content").get_by_role("link", name="History", exact=True).click()
        expect(page.get_by_role("heading", name=f"History of Pro (id {scene.pro.pk})")).to_be_visible()
        row = page.locator("#result_list tbody tr").first
        for text in ("dave", "1000/min → 2000/min", "The contract of Acme"):
            expect(row).to_contain_text(text)
    own.look()
    page.get_by_role("link", name="plan assignment", exact=True).click()
    expect(page.locator("#result_list tbody tr")).to_have_count(2)
