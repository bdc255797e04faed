"""What a policy would do, shown before it is saved; and what was saved, taken back."""

from __future__ import annotations

from playwright.sync_api import expect

from django_ratequota.models import RatePolicy

from .desk import Desks
from .pages import PAGES
from .scene import Scene


def test_the_impact_is_shown_on_a_click(desk: Desks, scene: Scene) -> None:
    before = RatePolicy.objects.count()
    own = desk()
    page = own.open(PAGES["add policy"].path(scene))
    impact = page.locator("#ratequota-impact")
    page.get_by_label("Rates").fill("10/min burst 5, 1000/day")
    expect(impact).to_be_empty()
    with own.task(actions=1):
        page.get_by_role("button", name="Estimate impact").click()
        expect(impact).to_contain_text("would have admitted all requests")
    own.look()
    own.shoot("estimate", page.locator(".ratequota-estimate"))
    page.get_by_label("Rates").fill("10/fortnight")
    expect(impact).to_be_empty()
    page.get_by_role("button", name="Estimate impact").click()
    expect(impact.locator(".errorlist")).to_contain_text("expected")
    assert RatePolicy.objects.count() == before
