"""Every page, by every kind of operator and in other languages: answered, accessible, no wider than the window."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from .desk import Desks
from .pages import PAGES
from .scene import Scene

#: Rates, subjects, addresses and routes with a character that is drawn left of the one before, in the same line.
_REVERSED = r"""
() => {
  const wanted = [
    /\d[\d,.]*\/\d*(?:s|min|hour|day|week|month)\b/g,
    /\b(?:ip|user|tenant):[\w.:\/]*\w/g,
    /\d+\.\d+\.\d+\.\d+(?:\/\d+)?/g,
    /(?<![\w.:\/*\u200f])\/[a-z*][\w*-]*(?:\/[\w*-]*)*/g,
  ];
  const at = (node, index) => {
    const range = document.createRange();
    range.setStart(node, index);
    range.setEnd(node, index + 1);
    return range.getBoundingClientRect();
  };
  const found = [];
  const walker = document.createTreeWalker(document.querySelector("#content"), NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (node.parentElement.closest("option, datalist, script, textarea")) continue;
    for (const pattern of wanted) {
      for (const match of node.data.matchAll(pattern)) {
        for (let index = match.index; index < match.index + match[0].length - 1; index += 1) {
          const [here, next] = [at(node, index), at(node, index + 1)];
          if (here.width && next.width && Math.abs(here.top - next.top) < 2 && next.left < here.left) {
            found.push(`${match[0]} in: ${node.data.trim().slice(0, 80)}`);
            break;
          }
        }
      }
    }
  }
  // Sentences without a translation, and numbers before them: their full stop or number stays where it was written.
  for (const part of document.querySelectorAll("#content :is(.description, td div)")) {
    if (!part.querySelector("div") && getComputedStyle(part).unicodeBidi !== "plaintext") {
      found.push(part.outerHTML.slice(0, 80));
    }
  }
  for (const button of document.querySelectorAll("#content input[type=submit]")) {
    if (getComputedStyle(button).textAlign === "right") found.push(`button ${button.value}`);
  }
  for (const field of document.querySelectorAll("#content :is(input[type=text], textarea)")) {
    const style = getComputedStyle(field);
    if (style.direction !== "ltr" && style.unicodeBidi !== "plaintext") found.push(`field ${field.name}`);
  }
  return found;
}
"""
#: Places that scroll sideways although the page does not.
_SCROLLING = """
() => [...document.querySelectorAll("#content :is(.results, #policies-group, #policies-group .tabular)")]
  .filter((place) => place.scrollWidth > place.clientWidth + 1)
  .map((place) => `${place.className || place.id}: ${place.scrollWidth} > ${place.clientWidth}`)
"""


@pytest.fixture
def language(request: pytest.FixtureRequest, settings: Any) -> str:
    """The language of the project."""
    settings.LANGUAGE_CODE = request.param
    return str(request.param)


@pytest.mark.parametrize("name", PAGES)
def test_superusers_see_every_page(desk: Desks, scene: Scene, name: str) -> None:
    own = desk("superuser")
    own.open(PAGES[name].path(scene))
    own.look()


@pytest.mark.parametrize("name", PAGES)
def test_others_see_what_they_may(desk: Desks, scene: Scene, name: str) -> None:
    viewers = desk("viewer")
    viewers.open(PAGES[name].path(scene), PAGES[name].viewer)
    if PAGES[name].viewer == 200:
        viewers.look(once=True)


# --- In other languages. ---


@pytest.mark.parametrize("name", PAGES)
def test_other_languages_are_not_reversed_and_fit(desk: Desks, scene: Scene, settings: Any, name: str) -> None:
    own = desk()
    settings.LANGUAGE_CODE = "ar"
    page = own.open(PAGES[name].path(scene))
    assert page.locator("html").get_attribute("dir") == "rtl"
    assert page.evaluate(_REVERSED) == []
    own.fit()
    settings.LANGUAGE_CODE = "de"
    page = own.open(PAGES[name].path(scene))
    assert page.locator("html").get_attribute("lang") == "de"
    own.fit()
    page.set_viewport_size({"width": 1280, "height": 800})
    assert page.evaluate(_SCROLLING) == []


def visible_columns(page: Page) -> list[str]:
    """Return the names of the columns of the list that need no scrolling."""
    return page.locator("#result_list tbody tr:first-child :is(th, td)").evaluate_all(
        """(cells) => cells.filter((cell) => {
          const box = cell.getBoundingClientRect();
          const place = cell.closest(".results, .overflow-x-auto, body").getBoundingClientRect();
          return box.width && box.left >= place.left - 1 && box.right <= place.right + 1;
        }).map((cell) => (cell.className.match(/field-([\\w]+)/) || [])[1])"""
    )


@pytest.mark.parametrize("language", ["en-us", "de", "ar"], indirect=True)
@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("policies", {"audience", "endpoint_name", "rates", "mode"}),
        ("history", {"at", "saved", "what_changed", "reason_text"}),
    ],
)
def test_the_main_columns_are_in_sight_on_a_telephone(
    desk: Desks, scene: Scene, language: str, name: str, columns: set[str]
) -> None:
    page = desk().open(PAGES[name].path(scene))
    page.set_viewport_size({"width": 390, "height": 800})
    assert columns <= set(visible_columns(page))


@pytest.mark.parametrize("language", ["en-us", "de", "ar"], indirect=True)
def test_a_plans_rates_and_modes_are_in_sight_on_a_telephone(desk: Desks, scene: Scene, language: str) -> None:
    page = desk().open(PAGES["plan"].path(scene))
    page.set_viewport_size({"width": 390, "height": 800})
    for name in ("rates", "mode"):
        box = page.locator(f"#policies-group tr.has_original .field-{name} :is(input, select)").first.bounding_box()
        assert box is not None
        assert box["x"] >= 0, name
        assert box["x"] + box["width"] <= 390, name
