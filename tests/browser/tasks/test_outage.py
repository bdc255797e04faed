"""Last night's outage of Redis: when it was, and how many were admitted without limits: two actions."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

from django.utils import timezone
from playwright.sync_api import expect

from django_ratequota.models import Outage
from tests.browser.desk import Desks
from tests.browser.pages import PAGES
from tests.browser.scene import Scene


def test_last_nights_outage(desk: Desks, scene: Scene) -> None:
    began = timezone.now().replace(second=0, microsecond=0) - timedelta(hours=8)
    ended = began + timedelta(minutes=10)
    for worker, admitted in (("web-1:7", 38), ("web-2:7", 2)):
        Outage.objects.create(
            id=uuid4(),
            worker=worker,
            began_at=began,
            ended_at=ended,
            reason="timeout",
            allow=admitted,
            deny=0,
            local=0,
            policies={str(scene.free_search.pk): {"allow": admitted}},
        )
    own = desk()
    page = own.open(PAGES["home"].path(scene))
    times = (f"{timezone.localtime(moment):%H:%M}" for moment in (began, ended))
    told = f"{'–'.join(times)} (40 requests were admitted without limits)."
    expect(page.locator(".ratequota-home")).to_contain_text(told)
    own.look()
    with own.task(actions=2):
        page.locator(".ratequota-home").get_by_role("link", name="Health").click()
        outage = page.locator(".ratequota-outages li")
        expect(outage).to_contain_text(told)
        expect(outage).to_contain_text("2 workers (timeout)")
        expect(outage.get_by_role("link", name="search")).to_be_visible()
    own.look()
