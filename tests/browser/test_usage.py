"""The live usage page, filled by real requests."""

from __future__ import annotations

import re
from collections.abc import Callable

from django.contrib.auth.models import User
from playwright.sync_api import expect

from django_ratequota.models import Plan, PlanAssignment
from django_ratequota.monitoring import health

from .desk import Desk
from .pages import PAGES
from .scene import Scene

Desks = Callable[..., Desk]


def test_a_bar_shows_how_full_the_tightest_limit_of_a_busy_caller_is(desk: Desks, scene: Scene) -> None:
    # Where organisations have plans, only a request tells whose plan counts, unless the user has an own one.
    own_plan = Plan.objects.filter(default_for="authenticated").first() or Plan.objects.create(name="Own", slug="own")
    PlanAssignment.objects.create(user=User.objects.get(username="dave"), plan=own_plan)
    health.report()
    own = desk()
    page = own.open(PAGES["live usage"].path(scene) + f"&endpoint={scene.search.pk}")
    row = page.get_by_role("region", name="Most requests admitted").get_by_role("row", name="user dave")
    expect(row).to_contain_text("of 10 used search/min")
    bar = row.locator(".ratequota-bar")
    expect(bar).to_be_visible()
    shares = [
        bar.locator(part).evaluate("e => e.getBoundingClientRect().width")
        for part in (".ratequota-all", ".ratequota-used")
    ]
    assert 0 < shares[1] <= shares[0]
    # The revision is a time, with its number to copy.
    expect(page.locator(".ratequota-usage-proof code")).to_have_text(re.compile(r"^\d{16}$"))
    own.look()
