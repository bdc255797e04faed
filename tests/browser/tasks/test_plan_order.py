"""The task: sell a plan Team between Pro and Enterprise."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from django_ratequota.models import Plan
from tests.browser.desk import Desks
from tests.browser.scene import Scene

LIST = "/admin/django_ratequota/plan/"


@pytest.fixture
def plans(scene: Scene) -> list[Plan]:
    """Free, Pro and Enterprise, ten apart."""
    Plan.objects.exclude(pk__in=[scene.free.pk, scene.pro.pk]).delete()
    rows = [scene.free, scene.pro, Plan(name="Enterprise", slug="enterprise")]
    for number, plan in enumerate(rows, 1):
        plan.position = number * 10
        plan.save()
    return rows


def order() -> list[str]:
    return list(Plan.objects.values_list("name", flat=True))


def test_a_plan_team_between_pro_and_enterprise(desk: Desks, scene: Scene, plans: list[Plan]) -> None:
    own = desk()
    page = own.open(LIST)
    with own.task(clicks=3, pages=3):
        page.get_by_role("link", name="Pro", exact=True).click()
        page.get_by_role("link", name="Copy plan").click()
        page.wait_for_url("**/copy/")
        # The name has the focus, and its text is replaced.
        page.keyboard.press("ControlOrMeta+a")
        page.keyboard.type("Team")
        expect(page.get_by_label("Slug")).to_have_value("team")
        page.get_by_role("button", name="Copy").click()
        expect(page.get_by_text("Team: Copied from Pro, with 2 policies.")).to_be_visible()
    assert order() == ["Free", "Pro", "Team", "Enterprise"]
    assert Plan.objects.get(slug="team").policies.count() == 2
