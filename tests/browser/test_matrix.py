"""Plans × endpoints on one page, and a plan made of another."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect

from django_ratequota.models import Plan, RatePolicy

from .desk import Desk
from .pages import PAGES
from .scene import Scene

Desks = Callable[..., Desk]


def test_a_cell_is_a_click_from_its_policy(desk: Desks, scene: Scene) -> None:
    Plan.objects.filter(pk=scene.hostile_plan.pk).delete()
    scene.hostile_endpoint.delete()
    own = desk()
    page = own.open(PAGES["matrix"].path(scene))
    own.shoot("matrix")
    page.locator(".ratequota-matrix a", has_text="10/min, Free at search").click()
    page.get_by_label("Rates").fill("12/min")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("was changed successfully")).to_be_visible()
    own.open(PAGES["matrix"].path(scene))
    expect(page.locator(".ratequota-matrix a", has_text="12/min, Free at search")).to_be_visible()
    # A place without a policy of its own leads to a new one for that place.
    page.get_by_role("link", name="Add: Pro at reports").click()
    page.get_by_label("Rates").fill("50/min")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("was added successfully")).to_be_visible()
    assert RatePolicy.objects.get(plan=scene.pro, endpoint=scene.reports).rates == "50/min"


def test_a_viewer_reads_the_matrix(desk: Desks, scene: Scene) -> None:
    page = desk("viewer").open(PAGES["matrix"].path(scene))
    expect(page.get_by_role("cell", name="10/min").first).to_be_visible()
    assert (
        page.locator("#content-main a[href*='/add/'], #content-main a[href*='ratepolicy/'][href$='/change/']").count()
        == 0
    )


def test_a_plan_is_copied(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open(PAGES["plan"].path(scene))
    page.locator(".object-tools a", has_text="Copy").click()
    page.get_by_label("Name").fill("Free 2027")
    page.get_by_label("Slug").fill("free-2027")
    page.get_by_role("button", name="Copy").click()
    expect(page.locator(".messagelist .success")).to_be_visible()
    copy = Plan.objects.get(slug="free-2027")
    assert sorted(copy.policies.values_list("rates")) == sorted(scene.free.policies.values_list("rates"))
