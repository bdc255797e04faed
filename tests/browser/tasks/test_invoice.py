"""What does the month's invoice say? One click from the app's index, and a file for the bookkeeper."""

from __future__ import annotations

import csv
from datetime import UTC, datetime
from pathlib import Path

from playwright.sync_api import expect

from tests.browser.desk import Desks
from tests.browser.scene import Scene


def test_the_invoice_of_a_month(desk: Desks, scene: Scene, tmp_path: Path) -> None:
    own = desk()
    page = own.open("/admin/django_ratequota/")
    with own.task(clicks=1, pages=1):
        page.get_by_role("link", name="Invoices").first.click()
        expect(page.get_by_role("heading", name="Invoices: ")).to_be_visible()
    # This month is not the one that is shown first, as it has not ended.
    this_month = f"{datetime.now(UTC):%Y-%m}"
    page.get_by_label("Month", exact=True).fill(this_month)
    page.get_by_label("Subject", exact=True).fill(f"user:{scene.mallory.pk}")
    page.get_by_role("button", name="Show").click()
    lines = page.get_by_role("region", name="Table of invoice lines").locator("tbody tr")
    expect(lines.filter(has_text="90,000 of 100,000")).to_have_count(1)
    expect(lines.first).to_contain_text("used so far")
    own.look()
    with page.expect_download() as download:
        page.get_by_role("link", name="All rows as CSV").click()
    assert download.value.suggested_filename == f"ratequota-invoices-{this_month}.csv"
    download.value.save_as(tmp_path / "invoices.csv")
    with (tmp_path / "invoices.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["subject"] for row in rows} == {f"user:{scene.mallory.pk}"}
    assert [row["used"] for row in rows if row["limit"] == "100000"] == ["90000"]
