"""Quotas as operators read them: organisations by their names, and their past windows."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect

from django_ratequota.models import PlanAssignment, QuotaWindow, RatePolicy
from tests.browser.desk import Desks
from tests.browser.scene import Scene


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
