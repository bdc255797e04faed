"""Undo yesterday's edit: all objects of a save by three clicks from the history."""

from __future__ import annotations

from playwright.sync_api import expect

from django_ratequota.changes.writer import changed_by
from django_ratequota.models import RatePolicy
from tests.browser.desk import Desks
from tests.browser.scene import Scene


def edit(scene: Scene) -> None:
    """One save that edits the policies of the plan Free, creates a policy and deletes another."""
    with changed_by(scene.operators["superuser"], "Ticket 4711 of the fair"):
        RatePolicy.objects.filter(plan=scene.free).update(rates="1/min", mode="log")
        RatePolicy.objects.create(plan=scene.pro, endpoint=scene.reports, rates="3/min")
        scene.override.delete()


def test_a_save_of_several_objects_is_undone(desk: Desks, scene: Scene) -> None:
    before = sorted(RatePolicy.objects.values_list("pk", "rates", "mode"))
    edit(scene)
    own = desk()
    page = own.open("/admin/django_ratequota/policychange/")
    own.look(once=True)
    with own.task(clicks=3, pages=3):
        row = page.locator("#result_list tbody tr").filter(has_text="Ticket 4711 of the fair")
        row.locator("th a").click()
        expect(page.get_by_role("cell", name="log only").first).to_be_visible()
        page.get_by_role("link", name="Undo this save…").click()
        expect(page.get_by_text("It will be created again with its old id")).to_be_visible()
        page.get_by_role("button", name="Undo this save").click()
        expect(page.get_by_text("5 objects were restored.")).to_be_visible()
    assert sorted(RatePolicy.objects.values_list("pk", "rates", "mode")) == before
