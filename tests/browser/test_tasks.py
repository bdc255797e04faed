"""An operator's daily tasks, with the most actions that each may take from the app's home page."""

from __future__ import annotations

import re
from datetime import time, timedelta
from uuid import uuid4

from django.contrib.auth.models import User
from django.utils import timezone
from playwright.sync_api import expect

from django_ratequota.models import Endpoint, Outage, Plan, PolicyChange, QuotaWindow, RatePolicy
from django_ratequota.monitoring.collector import collector
from tests.browser.desk import Desks, ask
from tests.browser.pages import PAGES
from tests.browser.scene import Scene
from tests.support.windows import given_back, of_day

# --- Why was this customer refused, and what to tell them: three actions, or two with the id of the refusal. ---


def test_a_refused_customer_is_told_why(desk: Desks, scene: Scene) -> None:
    scene.free_search.rates = "10/hour"  # by the minute, units would come back while the pages are checked
    scene.free_search.save()
    own = desk()
    page = own.page
    answers = [ask(page, "carol") for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    collector.flush()
    reference = answers[-1].headers["x-ratelimit-refusal"]
    sentence = page.locator(".ratequota-tell q")
    told = re.compile(r"Your plan Free allows 10 units per hour for search\. You had used 10\. .* is possible at .*:")
    own.open(PAGES["home"].path(scene))
    with own.task(actions=3):
        page.get_by_label("Customer or refusal").fill("carol")
        page.get_by_label("Customer or refusal").press("Enter")
        recent = page.locator("section").filter(has_text="Refusals in the last 24 hours")
        expect(recent.get_by_role("row").filter(has_text="GET search")).to_contain_text("search: 10/hour")
        recent.get_by_role("link", name="GET search").click()
        expect(sentence).to_have_text(told)
    own.open(PAGES["home"].path(scene))
    with own.task(actions=2):
        page.get_by_label("Customer or refusal").fill(reference)
        page.get_by_label("Customer or refusal").press("Enter")
        expect(sentence).to_have_text(told)
    expect(page.get_by_role("heading", name=f"Refusal {reference}")).to_be_visible()
    own.look()
    own.shoot("explain-refusal")


# --- Raise this customer's limit until Friday: six actions. ---


def test_a_customers_limit_is_raised_until_friday(desk: Desks, scene: Scene) -> None:
    scene.free_search.rates = "10/hour"
    scene.free_search.save()
    today = timezone.localdate()
    friday = today + timedelta(days=(4 - today.weekday()) % 7)
    own = desk()
    page = own.open(PAGES["home"].path(scene))
    assert [ask(page, "carol").status for _ in range(3)] == [200, 200, 429]
    with own.task(actions=6):
        page.get_by_label("Customer or refusal").fill("carol")
        page.get_by_label("Customer or refusal").press("Enter")
        counter = page.locator(".ratequota-counter").filter(has_text="search: 10/hour")
        expect(counter).to_contain_text("10 of 10 used, 0 left.")
        counter.get_by_role("link", name="Boost…").click()
        expect(page.get_by_label("Rates instead of")).to_have_value("20/hour")
        page.get_by_label("Or until: Date").fill(f"{friday:%Y-%m-%d}")
        page.get_by_label("Reason").fill("Ticket 4714")
        page.get_by_role("button", name="Yes, boost").click()
        expect(page.locator(".messagelist .success")).to_contain_text("20/hour until")
    assert [ask(page, "carol").status for _ in range(3)] == [200, 200, 429]
    boost = RatePolicy.objects.get(user=scene.carol)
    assert (boost.rates, boost.reason) == ("20/hour", "Ticket 4714")
    assert boost.ends_at is not None
    end = timezone.localtime(boost.ends_at)
    assert (end.date(), end.time()) == (friday, time(23, 59, 59))
    with own.task(actions=2):
        page.get_by_role("link", name="In force until").click()
        page.get_by_role("button", name="End it").click()
        expect(page.locator(".messagelist .success")).to_contain_text("The override has ended: user carol.")
    assert ask(page, "carol").status == 429


# --- A disputed month: which days were used, what was given back, by whom: five actions. ---


def test_a_disputed_month(desk: Desks, scene: Scene) -> None:
    """Acme says they did not use 900 exports."""
    exports = Endpoint.objects.create(name="exports")
    quota = RatePolicy.objects.create(subject="tenant:acme", endpoint=exports, rates="1000/month")
    scene.months("tenant:acme", quota, 1000, (900, 40))
    window = QuotaWindow.objects.filter(subject="tenant:acme").earliest("first_day")
    QuotaWindow.objects.filter(pk=window.pk).update(charged=1100, refunded=200)
    of_day(window, window.first_day + timedelta(days=19), 200, 200)
    at = window.starts_at + timedelta(days=19, hours=9)
    given_back(window, 150, at=at, actor=scene.operators["superuser"], reason="Ticket 4711: the export was empty")
    own = desk()
    page = own.open(PAGES["home"].path(scene))
    with own.task(actions=5):
        page.get_by_label("Customer or refusal").fill("tenant:acme")
        page.keyboard.press("Enter")
        page.get_by_role("link", name="Past quotas").click()
        page.get_by_role("link", name="Days from").last.click()
        expect(page.get_by_role("row", name="Total")).to_contain_text("1,100")
    expect(page.locator(".ratequota-quotas-days tbody tr")).to_have_count(3)
    expect(page.get_by_role("row", name="Total").locator("td").last).to_have_text("900")
    entry = page.get_by_role("region", name="Refunds by operators").locator("tbody tr")
    expect(entry).to_have_count(1)
    for text in ("superuser", "exports", "150", "Ticket 4711"):
        expect(entry).to_contain_text(text)
    own.look()
    own.shoot("past-days")


# --- Block a network that abuses the service, then unblock it: six actions. ---


def test_a_network_is_blocked_and_unblocked(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open(PAGES["home"].path(scene))
    with own.task(actions=6):
        page.get_by_label("Customer or refusal").fill("203.0.113.0/24")
        page.get_by_label("Customer or refusal").press("Enter")
        page.get_by_role("link", name="Block…").click()
        page.get_by_label("Reason").fill("Ticket 4716")
        page.get_by_role("button", name="Yes, block").click()
        expect(page.locator(".messagelist .success")).to_contain_text(re.compile("Blocked until .*/24"))
        block = RatePolicy.objects.get(rates="blocked")
        assert (block.subject, block.reason, block.ends_at is None) == ("ip:203.0.113.0/24", "Ticket 4716", False)
        page.get_by_role("button", name="End it", exact=True).click()
        expect(page.locator(".messagelist .success")).to_contain_text("No longer blocked")
    expect(page.get_by_role("link", name="Block…")).to_be_visible()


def test_enter_does_not_end_a_block(desk: Desks, scene: Scene) -> None:
    block = RatePolicy.objects.create(user=scene.dave, rates="blocked", starts_at=timezone.now())
    own = desk()
    page = own.open(f"/admin/django_ratequota/ratepolicy/block/?caller=user:{scene.dave.pk}")
    page.get_by_label("Reason for this change").fill("Ticket 4717")
    page.get_by_label("Reason for this change").press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="End it")).to_be_focused()
    own.look()
    block.refresh_from_db()
    assert block.ends_at is None


# --- Halve a limit, see whom that would have hit, save it, then undo the save: nine actions. ---


def test_a_limit_is_halved_and_the_save_is_undone(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open(PAGES["home"].path(scene))
    with own.task(actions=9):
        page.locator("#content").get_by_role("link", name="Rate policies", exact=True).click()
        page.locator("#result_list tr", has_text="10/min").filter(has_text="Free").locator("th a").click()
        page.get_by_label("Rates").fill("5/min")
        page.get_by_role("button", name="Estimate impact").click()
        expect(page.locator("#ratequota-impact").get_by_role("link", name="user dave")).to_be_visible()
        page.get_by_role("button", name="Save", exact=True).click()
        expect(page.locator(".messagelist .success")).to_contain_text("was changed successfully")
        scene.free_search.refresh_from_db()
        assert scene.free_search.rates == "5/min"
        page.get_by_role("navigation", name="Rate quotas").get_by_role("link", name="History").click()
        page.locator("#result_list tbody tr").first.locator("th a").click()
        expect(page.locator("#content-main")).to_contain_text("5/min")
        page.get_by_role("link", name="Undo this change…").click()
        page.get_by_role("button", name="Undo this change").click()
        expect(page.locator(".messagelist .success")).to_be_visible()
    scene.free_search.refresh_from_db()
    assert scene.free_search.rates == "10/min"


# --- Copy a plan with limits half as high again, then move two hundred customers to it: twelve actions. ---


def test_a_plan_is_copied_with_higher_limits_and_given_to_many(desk: Desks, scene: Scene) -> None:
    User.objects.bulk_create([User(username=f"customer{number}") for number in range(200)])
    own = desk()
    page = own.open(PAGES["home"].path(scene))
    with own.task(actions=12):
        page.locator("#content").get_by_role("link", name="Plans", exact=True).click()
        page.get_by_role("link", name="Free", exact=True).click()
        page.get_by_role("link", name="Copy plan").click()
        page.get_by_label("Name").fill("Free plus")
        page.get_by_label("Multiply all limits by").fill("1.5")
        page.get_by_role("button", name="Copy").click()
        expect(page.get_by_role("textbox", name="Rates").first).to_have_value("90/min burst 30, 1500/day")
        page.get_by_role("link", name="Assign customers").click()
        page.get_by_label("Customers, one per line").fill("\n".join(f"customer{number}" for number in range(200)))
        page.get_by_label("Reason for this change").fill("Ticket 4720")
        page.get_by_role("button", name="Assign customers").click()
        expect(page.get_by_text("200 customers were assigned.")).to_be_visible()
    assert Plan.objects.get(name="Free plus").assignments.count() == 200
    assert PolicyChange.objects.filter(reason="Ticket 4720").values("change_id").distinct().count() == 1


# --- Last night's outage of Redis: when it was, and how many were admitted without limits: two actions. ---


def test_last_nights_outage(desk: Desks, scene: Scene) -> None:
    began = timezone.now().replace(second=0, microsecond=0) - timedelta(hours=8)
    ended = began + timedelta(minutes=10)
    for worker, admitted in (("web-1:7", 38), ("web-2:7", 2)):
        Outage.objects.create(
            id=uuid4(),
            worker=worker,
            began_at=began,
            ended_at=ended,
            reason="timeout",
            allow=admitted,
            deny=0,
            local=0,
            policies={str(scene.free_search.pk): {"allow": admitted}},
        )
    own = desk()
    page = own.open(PAGES["home"].path(scene))
    times = (f"{timezone.localtime(moment):%H:%M}" for moment in (began, ended))
    told = f"{'–'.join(times)} (40 requests were admitted without limits)."
    expect(page.locator(".ratequota-home")).to_contain_text(told)
    own.look()
    with own.task(actions=2):
        page.locator(".ratequota-home").get_by_role("link", name="Health").click()
        outage = page.locator(".ratequota-outages li")
        expect(outage).to_contain_text(told)
        expect(outage).to_contain_text("2 workers (timeout)")
        expect(outage.get_by_role("link", name="search")).to_be_visible()
    own.look()
