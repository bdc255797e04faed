"""Two operators in two browsers edit the same policy: neither loses anything that was typed."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from .desk import Desks
from .pages import PAGES
from .scene import Scene


def test_edits_of_different_fields_both_stay(desk: Desks, scene: Scene) -> None:
    anna, ben = (desk().open(PAGES["policy"].path(scene)) for _ in range(2))
    anna.get_by_label("Rates").fill("11/min")
    ben.get_by_label("Mode").select_option("log")
    for page in (anna, ben):
        page.get_by_role("button", name="Save", exact=True).click()
        expect(page.get_by_text("was changed successfully")).to_be_visible()
    scene.free_search.refresh_from_db()
    assert (scene.free_search.rates, scene.free_search.mode) == ("11/min", "log")


def test_the_second_edit_of_a_field_is_told_of_the_first_and_stays_typed(desk: Desks, scene: Scene) -> None:
    anna, own = desk().open(PAGES["policy"].path(scene)), desk()
    ben = own.open(PAGES["policy"].path(scene))
    anna.get_by_label("Rates").fill("11/min")
    anna.get_by_role("button", name="Save", exact=True).click()
    expect(anna.get_by_text("was changed successfully")).to_be_visible()
    typed = {"Rates": "12/min", "Note": "The contract", "Reason for this change": "Ticket 4721"}
    for label, text in typed.items():
        ben.get_by_label(label).fill(text)
    ben.get_by_role("button", name="Save", exact=True).click()
    expect(ben.locator(".field-rates .errorlist")).to_contain_text(
        re.compile(r"superuser changed rates from 10/min to 11/min at .*\. Save again to overwrite that\.")
    )
    for label, text in typed.items():
        expect(ben.get_by_label(label)).to_have_value(text)
    own.look()
    ben.get_by_role("button", name="Save", exact=True).click()
    expect(ben.get_by_text("was changed successfully")).to_be_visible()
    scene.free_search.refresh_from_db()
    assert (scene.free_search.rates, scene.free_search.reason) == ("12/min", "The contract")
    assert scene.last_change().reason == "Ticket 4721"
