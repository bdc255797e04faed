"""Positions of plans: gaps between them, and room after one."""

from __future__ import annotations

import pytest
from django.db import transaction

from django_ratequota.models import Plan, PolicyChange
from django_ratequota.operations.plan_order import last_position, make_room_after

pytestmark = pytest.mark.django_db(transaction=True)


def plans(*positions: int) -> list[Plan]:
    return [Plan.objects.create(name=f"p{at}", slug=f"p{at}", position=to) for at, to in enumerate(positions)]


def test_a_new_plan_comes_after_all_others() -> None:
    assert last_position() == 0
    plans(40, 7)
    assert last_position() == 50


@pytest.mark.parametrize(
    ("positions", "after", "room", "then"),
    [
        ((0, 10, 20), 1, 15, [0, 10, 20]),
        ((0, 10, 500), 1, 20, [0, 10, 500]),
        ((0, 10, 20), 2, 30, [0, 10, 20]),
        ((0, 10, 11, 12, 90), 1, 20, [0, 10, 30, 40, 90]),
        ((0, 0, 0), 0, 10, [0, 20, 30]),
        ((0, 0, 0), 1, 10, [0, 0, 20]),
        ((3,), 0, 13, [3]),
    ],
)
def test_room_is_made_directly_after_a_plan(
    positions: tuple[int, ...], after: int, room: int, then: list[int]
) -> None:
    rows = plans(*positions)
    before = PolicyChange.objects.count()
    with transaction.atomic():
        assert make_room_after(rows[after]) == room
    stored = [Plan.objects.get(pk=plan.pk).position for plan in rows]
    assert stored == then
    moved = sum(a != b for a, b in zip(positions, then, strict=True))
    assert PolicyChange.objects.count() == before + moved, "only plans that move are in the history"
