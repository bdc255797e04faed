"""Policies as operators work on them: in the list, on their own page, in the tables of plans and endpoints."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from django_ratequota.models import Endpoint, PolicyChange, RatePolicy

from .desk import Desks
from .pages import PAGES
from .scene import MARKUP, Scene

#: What writes, or leads to a page that writes, in the content of a page.
_WRITES = ", ".join(
    f"#content {one}"
    for one in (
        "form[method=post] :is(input:not([type=hidden]), select, textarea, button:not(.ratequota-estimate *))",
        "a:is(.addlink, .deletelink)",
        "a[href*='/add/']",
    )
)


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


def test_a_full_table_takes_new_rows_and_then_leads_to_the_list(desk: Desks, scene: Scene) -> None:
    scene.pro.policies.all().delete()
    for number in range(75):
        endpoint = Endpoint.objects.create(name=f"many-{number:03d}")
        RatePolicy.objects.create(plan=scene.pro, endpoint=endpoint, rates="7/min")
    own = desk()
    page = own.open(f"/admin/django_ratequota/plan/{scene.pro.pk}/change/")
    expect(page.locator("tr.has_original")).to_have_count(75)
    page.get_by_role("textbox", name="Rates").nth(74).fill("8/min")
    # As many new rows as the page offers: all that is sent is fewer fields than Django takes.
    add = page.get_by_role("button", name="Add another Rate policy")
    for number in range(25):
        add.click()
        added = page.locator("tr.dynamic-policies:not(.has_original)").nth(number)
        added.get_by_role("textbox", name="Rates").fill(f"{number + 1}/s")
        added.locator("select[name$=-endpoint]").evaluate(
            "(select, pk) => { select.append(new Option('', pk, true, true)); }",
            str(Endpoint.objects.create(name=f"new-{number:03d}").pk),
        )
    expect(add).to_be_hidden()
    page.get_by_label("Reason for this change").fill("Ticket 4712")
    page.get_by_role("button", name="Save and continue editing").click()
    expect(page.get_by_text("was changed successfully")).to_be_visible()
    assert scene.pro.policies.filter(rates="8/min").count() == 1
    assert scene.pro.policies.filter(endpoint__name__startswith="new-").count() == 25
    assert PolicyChange.objects.filter(reason="Ticket 4712").count() == 26
    expect(page.get_by_text("100 policies are not shown here.")).to_be_visible()
    own.look(once=True)
    page.get_by_role("link", name="Change them in the list of policies.").click()
    expect(page.locator("#changelist-form")).to_contain_text("100 rate policies")
    expect(page.get_by_role("combobox", name=re.compile("^plan .*Pro$"))).to_be_visible()


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


def test_an_error_in_a_folded_field_is_in_sight(desk: Desks, scene: Scene) -> None:
    page = desk().open(PAGES["policy"].path(scene))
    start = page.get_by_label("Starts at: Date")
    expect(start).to_be_hidden()
    page.get_by_text("Advanced").click()
    start.fill("yesterday")
    page.get_by_text("Advanced").click()
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".field-starts_at .errorlist")).to_be_visible()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_reason_stands_in_line_with_the_other_fields(desk: Desks, scene: Scene, width: int) -> None:
    page = desk().open(PAGES["plan"].path(scene))
    page.set_viewport_size({"width": width, "height": 800})
    name, reason = (page.get_by_label(label).bounding_box() for label in ("Name", "Reason for this change"))
    assert name is not None
    assert reason is not None
    assert reason["x"] == name["x"]


def test_a_policy_is_written_and_finds_its_audience(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open(PAGES["add policy"].path(scene))
    page.get_by_label("Who:", exact=True).select_option("a user")
    choose(page, "User", "ali", "alice")
    choose(page, "Endpoint", "sea", "search")
    page.get_by_label("Rates").fill("7 per second")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".field-rates .errorlist")).to_contain_text("expected")
    own.look()
    # What was chosen is still there, in the drawn field too.
    expect(page.get_by_role("combobox", name=re.compile("^User .*alice$"))).to_be_visible()
    page.get_by_label("Rates").fill("7/s")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("was added successfully")).to_be_visible()
    policy = RatePolicy.objects.get(user=scene.alice)
    assert (policy.endpoint, policy.rates) == (scene.search, "7/s")


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


@pytest.mark.parametrize("name", ["policies", "override", "plan", "endpoints", "endpoint"])
def test_viewers_are_offered_nothing_to_write(desk: Desks, scene: Scene, name: str) -> None:
    path = PAGES[name].path(scene)
    assert desk().open(path).locator(_WRITES).filter(visible=True).count() > 0
    shown = desk("viewer").open(path).locator(_WRITES).filter(visible=True)
    assert shown.evaluate_all("(elements) => elements.map((element) => element.outerHTML)") == []
