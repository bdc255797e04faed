"""Organisations are found by their names, and their limits are raised for all of their people."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from django_ratequota import check_request
from django_ratequota.models import Plan, PlanAssignment, RatePolicy
from django_ratequota.monitoring.collector import collector
from tests.browser.desk import Desks
from tests.browser.pages import PAGES
from tests.browser.scene import MARKUP, Scene
from tests.project.views import request_from

NAMES = {"tenant:acme": "Acme GmbH", "tenant:acme-labs": f"{MARKUP} Labs"}


def names_of(subjects: list[str]) -> dict[str, str]:
    """Stand for a project's SUBJECT_NAMES."""
    return {subject: NAMES[subject] for subject in subjects if subject in NAMES}


@pytest.fixture
def traffic() -> bool:
    return False


@pytest.fixture
def refused(settings: Any, scene: Scene) -> None:
    """Acme and acme-labs are on Pro, which gives each tenant 2 reports; the people of acme have been refused."""
    path = "tests.browser.test_subject_names.names_of"
    settings.RATEQUOTA = {**settings.RATEQUOTA, "SUBJECT_NAMES": path}
    pro = Plan.objects.get(slug="pro")
    for subject in ("tenant:acme", "tenant:acme-labs"):
        PlanAssignment.objects.create(subject=subject, plan=pro)
    RatePolicy.objects.create(endpoint=scene.reports, counted_per="tenant", rates="2/hour")
    assert [ask(user) for user in (scene.carol, scene.carol, scene.bob, scene.carol)] == [True, True, False, False]
    collector.flush()


def ask(user: Any) -> bool:
    return check_request(request_from(user, headers={"X-Api-Key": "acme"}), scope="reports").allowed


def options(page: Page) -> list[tuple[str | None, str]]:
    """Return what the focused field offers: (value, text)."""
    found: list[tuple[str | None, str]] = page.evaluate(
        "[...(document.activeElement.list?.options ?? [])].map((one) => [one.value, one.text])"
    )
    return [(value, text) for value, text in found]


@pytest.mark.usefixtures("refused")
def test_an_organisation_is_found_explained_and_boosted(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open("/admin/django_ratequota/")
    field = page.get_by_label("Customer or refusal")
    field.press_sequentially("tenant:ac")
    expect(page.locator("datalist option")).to_have_count(2)
    assert options(page) == [("tenant:acme", "Acme GmbH"), ("tenant:acme-labs", f"{MARKUP} Labs")]
    field.fill("tenant:acme")
    field.press("Enter")
    recent = page.locator("section").filter(has_text="Refusals in the last 24 hours: Acme GmbH (tenant:acme)")
    row = recent.get_by_role("row").filter(has_text="GET reports")
    expect(row).to_contain_text("reports: 2/hour per tenant")
    expect(row).to_contain_text("user bob")
    recent.get_by_role("link", name="Boost all").click()
    page.get_by_role("radio", name="for 2 hours").check()
    expect(page.get_by_role("row").filter(has_text="Acme GmbH (tenant:acme)")).to_be_visible()
    page.get_by_label("Reason").fill("Ticket 4714")
    page.get_by_role("button", name="Yes, boost").click()
    expect(page.locator(".messagelist .success")).to_contain_text("4/hour until")
    boost = RatePolicy.objects.get(reason="Ticket 4714")
    assert (boost.subject, boost.rates, boost.counted_per) == ("tenant:acme", "4/hour", "tenant")
    assert [ask(scene.bob), ask(scene.carol), ask(scene.bob)] == [True, True, False]


@pytest.mark.usefixtures("refused")
def test_the_pages_are_fit_for_everybody(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open(f"{PAGES['explain'].path(scene)}?identifier_tenant=acme")
    expect(page.get_by_text("Acme GmbH (tenant:acme)").first).to_be_visible()
    page.locator("#id_identifier_tenant").fill("acme-l")
    expect(page.locator("datalist option")).to_have_count(1)
    assert options(page) == [("acme-labs", f"{MARKUP} Labs")]
    own.look()
    page.get_by_role("link", name="Boost all").click()
    own.look()
    own.open("/admin/django_ratequota/planassignment/")
    own.look()


@pytest.mark.usefixtures("refused")
def test_the_field_of_a_policy_completes_a_value_to_its_subject(desk: Desks, scene: Scene) -> None:
    page = desk().open("/admin/django_ratequota/ratepolicy/add/")
    page.get_by_label("Who:", exact=True).select_option("a subject")
    field = page.get_by_label("Subject:")
    field.press_sequentially("acme-")
    expect(page.locator("datalist option")).to_have_count(1)
    assert [value for value, _text in options(page)] == ["tenant:acme-labs"]
    expect(page.get_by_role("combobox", name="Subject:")).to_be_focused()
