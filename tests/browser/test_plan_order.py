"""Plans are moved in their list by drag and by keys."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from django_ratequota.models import Plan, PolicyChange
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


def test_a_plan_is_dragged_and_saved_with_a_reason(desk: Desks, scene: Scene, plans: list[Plan]) -> None:
    own = desk()
    page = own.open(LIST)
    own.look()
    page.get_by_role("button", name="Move Enterprise").hover()
    page.mouse.down()
    box = page.get_by_role("row").filter(has_text="free").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 40, box["y"] + box["height"] / 2, steps=6)
    page.mouse.up()
    expect(page.locator("input[data-move]").nth(0)).to_have_attribute("data-move", "Move Enterprise")
    page.get_by_label("Reason for this change").fill("Sales")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("1 plan was changed successfully.")).to_be_visible()
    assert order() == ["Enterprise", "Free", "Pro"]
    change = PolicyChange.objects.order_by("-pk")[0]
    assert (change.object_text, change.reason) == ("Enterprise", "Sales")


def test_a_plan_is_moved_by_arrow_keys(desk: Desks, scene: Scene, plans: list[Plan]) -> None:
    Plan.objects.update(position=0)  # by name: Enterprise, Free, Pro
    own = desk()
    page = own.open(LIST)
    move = page.get_by_role("button", name="Move Enterprise")
    move.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(move).to_be_focused()
    expect(page.get_by_text("Move Enterprise: 3 / 3")).to_be_visible()
    page.keyboard.press("ArrowUp")
    own.look(once=True)
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("changed successfully")).to_be_visible()
    assert order() == ["Free", "Enterprise", "Pro"]
