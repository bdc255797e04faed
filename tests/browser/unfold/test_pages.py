"""Every page under django-unfold: answered, at work, and fit for everybody where it is ours alone."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.desk import Desks
from tests.browser.pages import PAGES
from tests.browser.scene import Scene
from tests.browser.test_screens import visible_columns

#: The pages that are all ours but for the frame.
OWN = "#content-main[class^=ratequota-], .ratequota-home"


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_there(desk: Desks, scene: Scene, name: str) -> None:
    own = desk()
    page = own.open(PAGES[name].path(scene))
    # unfold's frame, and within it what the page is there for
    expect(page.locator("#nav-sidebar")).to_be_attached()
    expect(page.locator("#content-main, #changelist, .ratequota-home").first).to_be_visible()
    if page.locator(OWN).count():
        own.look_at(OWN)
    own.fit()


@pytest.mark.parametrize("name", ["explain", "traffic", "health", "quotas", "past quotas", "matrix", "copy", "boost"])
def test_own_pages_have_their_title(desk: Desks, scene: Scene, name: str) -> None:
    page = desk().open(PAGES[name].path(scene))
    title = page.locator(".ratequota-title")
    expect(title).to_be_visible()
    assert page.title().startswith(title.inner_text())


@pytest.mark.parametrize("name", ["plans", "policies", "home", "quotas"])
def test_the_tool_bar_is_above_every_page(desk: Desks, scene: Scene, name: str) -> None:
    own = desk()
    page = own.open(PAGES[name].path(scene))
    expect(page.locator(".ratequota-tools li")).to_have_count(7)
    own.look_at(".ratequota-tools")
    page.set_viewport_size({"width": 390, "height": 800})
    tools = page.locator(".ratequota-tools").bounding_box()
    assert tools is not None
    assert tools["height"] < 66, "more than two lines"


def test_fields_begin_at_the_same_place(desk: Desks, scene: Scene) -> None:
    page = desk().open(PAGES["endpoint"].path(scene))
    fields = page.locator("#endpoint_form .field-line :is(input[type=text], input[type=number], textarea)")
    assert fields.count() > 4
    assert len(set(fields.evaluate_all("(fields) => fields.map((one) => one.getBoundingClientRect().left)"))) == 1


def test_who_a_policy_is_for_stands_among_its_fields(desk: Desks, scene: Scene) -> None:
    page = desk().open(PAGES["add policy"].path(scene))
    who, rates = (page.locator(f"#{name}").bounding_box() for name in ("ratequota-who-kind", "id_rates"))
    assert who is not None
    assert rates is not None
    assert abs(who["x"] - rates["x"]) < 8
    expect(page.locator("#ratequota-who-help")).to_be_hidden()


@pytest.mark.parametrize("name", ["plans", "policies", "lists"])
def test_a_list_leads_to_the_page_that_adds(desk: Desks, scene: Scene, name: str) -> None:
    page = desk().open(PAGES[name].path(scene))
    page.locator("a.addlink").filter(visible=True).click()
    expect(page).to_have_url(re.compile("/add/$"))


@pytest.mark.parametrize(
    ("name", "columns"),
    [("policies", {"audience", "endpoint_name", "rates", "mode"}), ("lists", {"shown_name", "member_count"})],
)
def test_the_main_columns_are_in_sight_on_a_telephone(
    desk: Desks, scene: Scene, name: str, columns: set[str]
) -> None:
    page = desk().open(PAGES[name].path(scene))
    page.set_viewport_size({"width": 390, "height": 800})
    assert columns <= set(visible_columns(page))


def test_a_save_in_the_history_is_whole_on_a_telephone(desk: Desks, scene: Scene) -> None:
    page = desk().open(PAGES["history"].path(scene))
    page.set_viewport_size({"width": 390, "height": 800})
    cut_off = page.locator("#result_list tbody :is(th, td)").evaluate_all(
        "(cells) => cells.filter((cell) => cell.scrollHeight > cell.clientHeight + 1).map((cell) => cell.innerText)"
    )
    assert cut_off == []


def test_icons_of_a_date_and_of_a_time_are_beside_their_fields(desk: Desks, scene: Scene) -> None:
    page = desk().open(PAGES["policy"].path(scene))
    for field, icon in (("#id_ends_at_0", "#calendarlink0"), ("#id_ends_at_1", "#clocklink0")):
        inner, outer = page.locator(field).bounding_box(), page.locator(icon).bounding_box()
        assert inner is not None
        assert outer is not None
        assert abs(outer["x"] - inner["x"] - inner["width"]) < 40, icon
        assert abs(outer["y"] + outer["height"] / 2 - inner["y"] - inner["height"] / 2) < 12, icon
        page.locator(icon).click(trial=True)


def test_buttons_and_errors_look_like_it(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open(PAGES["policy"].path(scene))
    button = page.get_by_role("button", name="Estimate impact")
    expect(button).not_to_have_css("background-color", "rgba(0, 0, 0, 0)")
    own.look_at(".ratequota-estimate-ask")
    page = own.open(PAGES["hostile explained"].path(scene))
    expect(page.locator(".ratequota-field .errorlist")).to_have_css("color", "rgb(185, 28, 28)")
    page = own.open(PAGES["boost"].path(scene))
    expect(page.locator("a.closelink")).not_to_have_css("background-color", "rgba(0, 0, 0, 0)")


@pytest.mark.parametrize("width", [1280, 390])
def test_the_policies_of_a_plan_are_in_sight(desk: Desks, scene: Scene, width: int) -> None:
    page = desk().open(PAGES["plan"].path(scene))
    page.set_viewport_size({"width": width, "height": 800})
    rates = page.locator("#policies-group .field-rates input").filter(visible=True)
    expect(rates).to_have_count(3)
    box = rates.first.bounding_box()
    assert box is not None
    assert 0 <= box["x"] <= width - box["width"]


def test_the_list_is_filtered_and_edited(desk: Desks, scene: Scene) -> None:
    page = desk().open(f"{PAGES['policies'].path(scene)}?audience=plan")
    page.locator(".filter-open-button").click()
    page.get_by_role("combobox", name="endpoint").click()
    page.locator(".select2-container--open").get_by_role("searchbox").fill("rep")
    page.get_by_role("option", name="reports", exact=True).click()
    page.locator(".ratequota-filter").last.get_by_role("button", name="Filter").click()
    rows = page.locator("#result_list tbody tr")
    expect(rows).to_have_count(1)
    rows.locator("select").select_option("log")
    page.get_by_label("Reason for this change").fill("Ticket 4712")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("1 rate policy was changed successfully.")).to_be_visible()
    assert scene.free.policies.get(endpoint=scene.reports).mode == "log"
    assert scene.last_change().reason == "Ticket 4712"
