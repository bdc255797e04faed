"""Policies as operators work on them: in the list, on their own page, in the tables of plans and endpoints."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from django_ratequota.models import PolicyChange, RatePolicy

from .desk import Desks
from .pages import PAGES
from .scene import MARKUP, Scene


def choose(page: Page, field: str, term: str, option: str) -> None:
    """Type into an autocomplete field, and take what it finds."""
    # Until the scripts have run, it is a plain select, which they hide.
    fancy = page.locator(".select2-selection")
    fancy.and_(page.get_by_role("combobox", name=re.compile(f"^{field}"))).click()
    page.locator(".select2-container--open").get_by_role("searchbox").fill(term)
    page.get_by_role("option", name=option, exact=True).click()


def test_the_list_is_filtered_by_autocomplete(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open(f"{PAGES['policies'].path(scene)}?audience=plan")
    rows = page.locator("#result_list tbody tr")
    expect(rows).to_have_count(6)
    choose(page, "endpoint", "sea", "search")
    page.locator(".ratequota-filter").filter(has_text="search").get_by_role("button", name="Filter").click()
    expect(rows).to_have_count(2)
    expect(page.get_by_role("combobox", name=re.compile("^endpoint .*search$"))).to_be_visible()
    own.look()
    choose(page, "plan", "fr", "Free")
    page.locator(".ratequota-filter").filter(has_text="Free").get_by_role("button", name="Filter").click()
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("10/min")
    own.look(once=True)


def test_whom_a_policy_is_for_is_asked_once(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open(PAGES["add policy"].path(scene))
    who = page.get_by_label("Who:", exact=True)
    assert who.evaluate("(select) => select.value") == ""
    expect(
        page.locator(".field-user, .field-subject, .field-plan, .field-subject_list").filter(visible=True)
    ).to_have_count(0)
    who.select_option("a subject")
    page.get_by_label("Subject:", exact=True).fill("ip:203.0.113.9")
    own.look(once=True)
    who.select_option("a plan")
    expect(page.locator(".field-subject")).to_be_hidden()
    choose(page, "Plan", "fr", "Free")
    choose(page, "Endpoint", "rep", "reports")
    page.get_by_text("Advanced").click()
    page.get_by_label("Counted per").select_option("ip")
    page.get_by_label("Rates").fill("70/s")
    page.get_by_role("button", name="Save and continue editing").click()
    expect(page.get_by_text("was added successfully")).to_be_visible()
    policy = RatePolicy.objects.get(rates="70/s")
    assert (policy.plan, policy.subject) == (scene.free, ""), "what was typed before is not sent"
    # What another audience had before is emptied as well.
    assert who.evaluate("(select) => select.value") == "plan"
    who.select_option("everyone")
    page.get_by_role("button", name="Save and continue editing").click()
    expect(page.get_by_text("was changed successfully")).to_be_visible()
    policy.refresh_from_db()
    assert policy.audience == "everyone"


@pytest.mark.parametrize("width", [1280, 390])
def test_the_reason_stands_in_line_with_the_other_fields(desk: Desks, scene: Scene, width: int) -> None:
    page = desk().open(PAGES["plan"].path(scene))
    page.set_viewport_size({"width": width, "height": 800})
    name, reason = (page.get_by_label(label).bounding_box() for label in ("Name", "Reason for this change"))
    assert name is not None
    assert reason is not None
    assert reason["x"] == name["x"]


def test_autocomplete_shows_hostile_names_as_they_are(desk: Desks, scene: Scene) -> None:
    page = desk().open(PAGES["add policy"].path(scene))
    page.get_by_label("Who:", exact=True).select_option("a user")
    page.get_by_role("combobox", name="User").click()
    page.locator(".select2-container--open").get_by_role("searchbox").fill("onerror")
    expect(page.locator(".select2-results").get_by_role("option")).to_contain_text([MARKUP])


def test_rows_of_a_plan_are_edited_and_added(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open(PAGES["plan"].path(scene))
    expect(page.get_by_role("textbox", name="Rates")).to_have_count(3)
    stored = page.locator("tr.has_original").filter(has_text="search")
    stored.get_by_role("textbox", name="Rates").fill("11/min")
    page.get_by_role("button", name="Add another Rate policy").click()
    added = page.locator("tr.dynamic-policies:not(.has_original)")
    # A row that came later has named fields too, the drawn one included.
    expect(added.get_by_role("combobox", name=re.compile("^Endpoint"))).to_be_visible()
    added.get_by_role("combobox", name="Counted per").select_option("ip")
    added.get_by_role("textbox", name="Rates").fill("5/s")
    page.get_by_label("Reason for this change").fill("Ticket 4712")
    own.look()
    page.get_by_role("button", name="Save and continue editing").click()
    expect(page.get_by_text("was changed successfully")).to_be_visible()
    scene.free_search.refresh_from_db()
    assert scene.free_search.rates == "11/min"
    assert scene.free.policies.get(counted_per="ip").rates == "5/s"
    assert PolicyChange.objects.filter(reason="Ticket 4712").count() == 2
    own.shoot("plan", page.locator("#policies-group"))


def test_a_click_adds_a_route(desk: Desks, scene: Scene) -> None:
    page = desk().open(PAGES["endpoint"].path(scene))
    routes = page.get_by_role("textbox", name="Routes")
    routes.fill("first")
    page.get_by_text("Routes of this project").click()
    button = page.get_by_role("button", name="/plain/", exact=True)
    button.click()
    expect(routes).to_have_value("first\n/plain/")
    button.click()
    expect(routes).to_have_value("first\n/plain/")
    expect(routes).to_be_focused()
    page.get_by_role("button", name="Save and continue editing").click()
    expect(page.locator(".field-matches li")).to_contain_text(["Views use it as their scope.", "/plain/ (plain)"])


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
