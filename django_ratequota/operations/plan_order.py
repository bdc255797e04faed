"""The order of plans: positions with gaps, so that a plan that moves between two others moves only itself."""

from __future__ import annotations

from django.db.models import Max

from ..models import Plan

#: Distance between the positions of two plans; the script of the list, plans.js, uses the same.
STEP = 10


def last_position() -> int:
    """Return the position for a plan after all others."""
    last = Plan.objects.aggregate(last=Max("position"))["last"]
    return 0 if last is None else int(last) + STEP


def make_room_after(plan: Plan) -> int:
    """Return a position directly after the plan; moves later plans on where there is none. Needs a transaction."""
    plans = list(Plan.objects.select_for_update())
    at = next((number for number, other in enumerate(plans, 1) if other.pk == plan.pk), len(plans))
    later = plans[at:]
    start = plans[at - 1].position if plans else 0
    if later and later[0].position - start > 1:
        return int(start + min(STEP, (later[0].position - start) // 2))
    moved, end = [], start + STEP
    for other in later:
        if other.position > end:
            break
        end = other.position = end + STEP
        moved.append(other)
    Plan.objects.bulk_update(moved, ["position"])
    return int(start + STEP)
