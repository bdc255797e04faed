"""Organisations are found by their names: fields for subjects complete what is typed."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from django_ratequota.models import PlanAssignment
from tests.browser.desk import Desks
from tests.browser.pages import PAGES
from tests.browser.scene import MARKUP, Scene

NAMES = {"tenant:acme": "Acme GmbH", "tenant:acme-labs": f"{MARKUP} Labs"}


def names_of(subjects: list[str]) -> dict[str, str]:
    """Stand for a project's SUBJECT_NAMES."""
    return {subject: NAMES[subject] for subject in subjects if subject in NAMES}


@pytest.fixture(autouse=True)
def organisations(settings: Any, scene: Scene) -> None:
    path = "tests.browser.test_subject_names.names_of"
    settings.RATEQUOTA = {**settings.RATEQUOTA, "SUBJECT_NAMES": path}
    for subject in NAMES:
        PlanAssignment.objects.create(subject=subject, plan=scene.pro)


def options(page: Page, count: int) -> list[tuple[str | None, str]]:
    """Return what the focused field offers: (value, text)."""
    expect(page.locator("datalist option")).to_have_count(count)
    found: list[tuple[str | None, str]] = page.evaluate(
        "[...(document.activeElement.list?.options ?? [])].map((one) => [one.value, one.text])"
    )
    return [(value, text) for value, text in found]


def test_a_customer_is_found_by_how_its_subject_begins(desk: Desks, scene: Scene) -> None:
    page = desk().open("/admin/django_ratequota/")
    field = page.get_by_label("Customer or refusal")
    field.press_sequentially("tenant:ac")
    assert options(page, 2) == list(NAMES.items())
    field.fill("tenant:acme")
    field.press("Enter")
    expect(page.get_by_text("Acme GmbH (tenant:acme)").first).to_be_visible()


def test_the_field_of_an_identifier_completes_its_value(desk: Desks, scene: Scene) -> None:
    page = desk().open(f"{PAGES['explain'].path(scene)}?identifier_tenant=acme")
    page.locator("#id_identifier_tenant").fill("acme-l")
    assert options(page, 1) == [("acme-labs", f"{MARKUP} Labs")]


def test_the_field_of_a_policy_completes_a_value_to_its_subject(desk: Desks, scene: Scene) -> None:
    page = desk().open("/admin/django_ratequota/ratepolicy/add/")
    page.get_by_label("Who:", exact=True).select_option("a subject")
    page.get_by_label("Subject:").press_sequentially("acme-")
    assert [value for value, _text in options(page, 1)] == ["tenant:acme-labs"]
    expect(page.get_by_role("combobox", name="Subject:")).to_be_focused()
