"""Roll out a limit safely: add it in log mode, see what it would have refused, enforce it."""

from __future__ import annotations

from playwright.sync_api import expect

from django_ratequota import check_request
from django_ratequota.models import RatePolicy
from django_ratequota.monitoring.collector import collector
from tests.browser.desk import Desks
from tests.browser.pages import PAGES
from tests.browser.scene import Scene
from tests.browser.test_policies import choose
from tests.project.views import request_from


def test_a_limit_is_added_in_log_mode_watched_and_enforced(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open(PAGES["policies"].path(scene))
    with own.task(clicks=7, pages=5):
        page.get_by_role("link", name="Add rate policy").click()
        choose(page, "Endpoint", "rep", "reports")
        page.get_by_label("Rates").fill("2/hour")
        page.get_by_label("Mode").select_option("log")
        page.get_by_role("button", name="Save", exact=True).click()
        expect(page.get_by_text("was added successfully")).to_be_visible()
        for _ in range(5):
            check_request(request_from(address="198.51.100.7"), scope="reports")
        collector.flush()
        row = page.get_by_role("row").filter(has_text="everyone").filter(has_text="2/hour")
        row.get_by_role("link", name="Would-be refusals").click()
        expect(page.get_by_text("would have refused 3 of them (60.0 %).")).to_be_visible()
        expect(page.get_by_role("link", name="ip:198.51.100.7").first).to_be_visible()
        page.get_by_label("Reason").fill("Ticket 4718")
        page.get_by_role("button", name="Enforce").click()
        expect(page.get_by_text("Enforced from the next request on")).to_be_visible()
    policy = RatePolicy.objects.get(rates="2/hour")
    assert policy.mode == "enforce"
    assert not check_request(request_from(address="198.51.100.7"), scope="reports").allowed
    assert scene.last_change().reason == "Ticket 4718"
    collector.flush()
    own.look()
    page.get_by_role("button", name="Log only").click()
    expect(page.get_by_text("It only logs from the next request on")).to_be_visible()
    own.look()
    assert check_request(request_from(address="198.51.100.7"), scope="reports").allowed
