"""What the API decides is drawn, counted and exported, over HTTP."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from django_ratequota.monitoring import health
from django_ratequota.monitoring.collector import collector

from .desk import Desk, Desks
from .pages import PAGES
from .scene import Scene


@pytest.fixture
def traffic() -> bool:
    """Nothing was asked before: the numbers are those of ``decide``."""
    return False


def decide(own: Desk) -> None:
    """Two requests of carol's are admitted, two are refused."""
    answers = [own.page.request.get("/search/", headers={"Authorization": "Name carol"}) for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 200, 429, 429]
    collector.flush()
    health.report()


def test_what_is_decided_is_drawn_and_counted(desk: Desks, scene: Scene) -> None:
    own = desk()
    decide(own)
    page = own.open(PAGES["traffic"].path(scene))
    expect(page.get_by_role("img", name="Requests per 15 minutes")).to_be_visible()
    assert page.locator(".ratequota-plot-drawing .ratequota-plot-admitted").count() == 1
    # What log mode would refuse and what was refused have patterns, which the policy of contents must let through.
    (fill,) = {
        one.get_attribute("fill") for one in page.locator(".ratequota-plot-drawing .ratequota-plot-refused").all()
    }
    assert fill
    assert page.locator(fill.removeprefix("url(").removesuffix(")")).count() == 1
    page.get_by_text("Show as a table").click()
    table = page.locator(".ratequota-plot-data table")
    expect(table).to_be_visible()
    assert 97 <= table.locator("tbody tr").count() <= 100
    expect(table.locator("tbody tr").last).to_contain_text(re.compile(r"\d\d:\d\d\s*2\s*0\s*2"))
    own.look()
    page.get_by_role("navigation", name="Rate quotas").get_by_role("link", name="Health").click()
    expect(page.get_by_text("All changes are live.")).to_be_visible()
    own.look()
