"""What a policy would do, shown before it is saved; and what was saved, taken back."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect

from django_ratequota.models import RatePolicy

from .desk import Desk
from .pages import PAGES
from .scene import Scene

Desks = Callable[..., Desk]


def test_the_preview_follows_the_form(desk: Desks, scene: Scene) -> None:
    before = RatePolicy.objects.count()
    own = desk()
    page = own.open(PAGES["add policy"].path(scene))
    panel = page.locator(".ratequota-preview-drawn")
    expect(panel).to_contain_text("Enter rates above")
    page.get_by_label("Rates").press_sequentially("10/min burst 5")
    expect(panel.locator("summary.ratequota-rates")).to_have_text("10/min burst 5")
    expect(panel.locator("svg.ratequota-plot-drawing")).to_have_count(3)
    own.look()
    own.shoot("preview", page.locator(".ratequota-preview"))
    page.get_by_label("Rates").fill("10/fortnight")
    expect(panel.locator(".errorlist")).to_contain_text("expected")
    page.get_by_label("Rates").fill("blocked")
    expect(panel.locator("svg")).to_have_count(0)
    assert RatePolicy.objects.count() == before


def test_the_impact_is_estimated_on_a_click(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open(PAGES["add policy"].path(scene))
    page.get_by_label("Rates").fill("3/hour")
    page.get_by_role("button", name="Estimate impact").click()
    expect(page.locator(".ratequota-preview-impact")).to_contain_text("would have")
    own.look()


def test_a_viewer_sees_what_a_stored_policy_does(desk: Desks, scene: Scene) -> None:
    page = desk("viewer").open(PAGES["policy"].path(scene))
    expect(page.locator("svg.ratequota-plot-drawing")).to_have_count(3)
    page.get_by_role("button", name="Estimate impact").click()
    expect(page.locator(".ratequota-preview-impact")).to_contain_text("would have")


def test_a_version_is_restored(desk: Desks, scene: Scene) -> None:
    scene.free_search.rates = "99/min"
    scene.free_search.save()
    own = desk()
    page = own.open(f"/admin/django_ratequota/policychange/{scene.last_change().pk}/change/")
    page.get_by_role("link", name="Restore the previous version").click()
    expect(page.get_by_role("row", name="Rates")).to_contain_text("10/min")
    own.look()
    page.get_by_label("Reason").fill("Ticket 4716")
    page.get_by_role("button", name="Yes, restore it").click()
    expect(page.get_by_text("was restored.")).to_be_visible()
    scene.free_search.refresh_from_db()
    assert scene.free_search.rates == "10/min"


def test_a_suggested_rate_is_filled_in(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open(PAGES["add policy"].path(scene))
    with own.task(clicks=2, pages=0):
        page.get_by_role("button", name="Suggest rates").click()
        suggested = page.locator(".ratequota-preview-suggest")
        expect(suggested).to_contain_text("Based on")
        rate = suggested.get_by_role("button").first
        text = rate.inner_text()
        rate.click()
        expect(page.get_by_label("Rates")).to_have_value(text)
        expect(page.locator(".ratequota-preview-drawn summary.ratequota-rates")).to_have_text(text)
    expect(suggested).to_contain_text("Based on")
    own.look()
    page.get_by_label("Counted per").select_option("everyone")
    expect(suggested).to_be_empty()
