"""Quotas as operators read them: who is near the monthly one, past windows, and files for the bookkeeper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import expect

from django_ratequota.models import Endpoint, PlanAssignment, QuotaWindow, RatePolicy
from django_ratequota.monitoring.ledger import flush
from tests.browser.desk import Desks
from tests.browser.scene import Scene
from tests.support.requests import check_from


def a_month(scene: Scene) -> None:
    """A monthly quota of which carol has used 90 %, mallory all, and dave half."""
    exports = Endpoint.objects.create(name="exports")
    RatePolicy.objects.create(endpoint=exports, rates="10/month", reason="Exports are expensive.")
    for user, times in ((scene.carol, 9), (scene.mallory, 12), (scene.dave, 5)):
        for _ in range(times):
            check_from(user, scope="exports", cost=1)
    flush()


def test_who_is_near_the_monthly_quota(desk: Desks, scene: Scene, tmp_path: Path) -> None:
    a_month(scene)
    own = desk()
    page = own.open("/admin/django_ratequota/")
    page.get_by_role("link", name="Quotas").first.click()
    expect(page.get_by_role("heading", name="Quotas: month")).to_be_visible()
    rows = page.get_by_role("region", name="Table of quotas").locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(1)).to_contain_text("user carol")
    expect(rows.nth(1)).to_contain_text("9 of 10")
    own.look()
    page.get_by_label("Used", exact=True).select_option("50")
    page.get_by_label("User or subject").fill("DAVE")
    page.get_by_role("button", name="Show").click()
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("user dave")
    with page.expect_download() as download:
        page.get_by_role("link", name="All rows as CSV").click()
    assert download.value.suggested_filename == "ratequota-quotas-month-50.csv"
    download.value.save_as(tmp_path / "quotas.csv")
    assert f'"user:{scene.dave.pk}","user dave"' in (tmp_path / "quotas.csv").read_text("utf-8-sig")


def test_a_row_leads_to_past_windows_and_on_to_explain(desk: Desks, scene: Scene) -> None:
    own = desk()
    page = own.open("/admin/django_ratequota/ratepolicy/quotas/?level=0")
    page.get_by_role("link", name="Past quotas of").first.click()
    expect(page.get_by_role("heading", name="Past quotas")).to_be_visible()
    rows = page.get_by_role("region", name="Table of periods").locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(1)).to_contain_text("130,000")
    own.look()
    page.locator("#content-main").get_by_role("link", name="Explain", exact=True).click()
    page.get_by_role("link", name="Past quotas").click()
    expect(rows).to_have_count(3)


def organisations(_subjects: list[str]) -> dict[str, str]:
    """Stand for a project's SUBJECT_NAMES."""
    return {"tenant:acme": "Acme GmbH", "tenant:globex": "Globex AG", "tenant:initech": "Initech Ltd"}


def test_organisations_are_listed_by_their_names(desk: Desks, scene: Scene, settings: Any) -> None:
    path = "tests.browser.test_quotas.organisations"
    settings.RATEQUOTA = {**settings.RATEQUOTA, "SUBJECT_NAMES": path}
    QuotaWindow.objects.all().delete()
    quota = RatePolicy.objects.create(plan=scene.pro, counted_per="tenant", rates="1000000/month")
    used = {
        "acme": (310_000, 420_500, 395_000, 610_000, 702_000, 885_200, 940_000),
        "globex": (1_020_000, 990_000, 1_000_000),
        "initech": (0, 120_000, 512_000),
    }
    for tenant, months in used.items():
        PlanAssignment.objects.create(subject=f"tenant:{tenant}", plan=scene.pro)
        scene.months(f"tenant:{tenant}", quota, 1_000_000, months)
    own = desk()
    page = own.open("/admin/django_ratequota/ratepolicy/quotas/?level=0")
    rows = page.get_by_role("region", name="Table of quotas").locator("tbody tr")
    expect(rows).to_have_count(3)
    for row, (name, share) in enumerate((("Globex AG", "100 %"), ("Acme GmbH", "94 %"), ("Initech Ltd", "51 %"))):
        expect(rows.nth(row)).to_contain_text(name)
        expect(rows.nth(row)).to_contain_text(share)
    own.shoot("quotas")
    page.get_by_role("link", name="Past quotas of Acme GmbH").click()
    expect(page.get_by_role("heading", name="Past quotas: Acme GmbH")).to_be_visible()
    expect(page.get_by_role("region", name="Table of periods").locator("tbody tr")).to_have_count(7)
    own.shoot("past-quotas")
