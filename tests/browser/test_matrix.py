"""Plans × endpoints on one page, and a plan made of another."""

from __future__ import annotations

from playwright.sync_api import expect

from django_ratequota.models import Endpoint, Plan, RatePolicy

from .desk import Desks
from .pages import PAGES
from .scene import Scene


def test_a_cell_is_a_click_from_its_policy(desk: Desks, scene: Scene) -> None:
    Plan.objects.filter(pk=scene.hostile_plan.pk).delete()
    scene.hostile_endpoint.delete()
    own = desk()
    page = own.open(PAGES["matrix"].path(scene))
    own.shoot("matrix")
    page.locator(".ratequota-matrix a", has_text="10/min, Free for search").click()
    expect(page.get_by_label("Rates")).to_have_value("10/min")


def test_inherited_cells_have_a_colour_and_names_stay_in_sight(desk: Desks, scene: Scene) -> None:
    Plan.objects.bulk_create([Plan(name=f"Reseller {n:02}", slug=f"r{n}") for n in range(40)])
    Endpoint.objects.bulk_create([Endpoint(name=f"part-{n:02}") for n in range(40)])
    shared = Endpoint.objects.get(name="part-30")
    RatePolicy.objects.create(endpoint=shared, rates="40/min")
    RatePolicy.objects.create(endpoint=shared, plan=Plan.objects.get(name="Reseller 25"), rates="41/min")
    page = desk().open(f"{PAGES['matrix'].path(scene)}?p=2&pp=2")
    inherited = page.get_by_role("link", name="40/min , Reseller 26 for part-30, inherited from everyone")
    plain = page.get_by_role("link", name="41/min , Reseller 25 for part-30", exact=True)
    colours = [one.evaluate("e => getComputedStyle(e.parentElement).backgroundColor") for one in (inherited, plain)]
    assert colours[0] != colours[1]
    # Scrolled inside its box, the names of the row and the column stay in sight.
    page.set_viewport_size({"width": 390, "height": 800})
    inherited.evaluate("e => e.scrollIntoView({block: 'center', inline: 'center'})")
    for name in (page.get_by_role("rowheader", name="part-30"), page.get_by_role("columnheader", name="Reseller 26")):
        expect(name).to_be_in_viewport()
