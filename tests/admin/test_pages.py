"""Every page that a model admin lists in ``pages``: its address, and who may open it."""

from __future__ import annotations

import pytest
from django.contrib import admin

from django_ratequota.admin.pages import Replies
from django_ratequota.exceptions import StoreError
from django_ratequota.models import Plan, PolicyChange, RatePolicy, SubjectList
from tests.support.operators import client_of

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("fresh_policies")]


def test_every_page_of_an_object_needs_a_permission_and_the_object() -> None:
    Plan.objects.create(name="Free", slug="free")
    change = PolicyChange.objects.latest("pk")
    root, staff = client_of(superuser=True), client_of(name="support")
    for model in (Plan, RatePolicy, SubjectList, PolicyChange):
        for page in admin.site._registry[model].own_pages:
            address = f"/admin/django_ratequota/{model._meta.model_name}/{page.path}"
            address = address.replace("<uuid:change_id>", str(change.change_id)).replace("<str:version>", "after")
            missing = address.replace("<path:object_id>", "4711")
            assert staff.get(missing).status_code == 403, address
            assert (root.get(missing).status_code == 404) is (missing != address), address


def test_a_page_waits_only_a_second_longer_for_redis_that_hangs() -> None:
    """Regression: with TIMEOUT = 1, Live usage waited five seconds, one for each of its parts."""
    now, asked = [0.0], []

    def hang(seconds: float, reason: str) -> None:
        asked.append(reason)
        now[0] += seconds
        raise StoreError(reason, "")

    ask = Replies(clock=lambda: now[0])
    assert ask(lambda: hang(0.01, "connection")) == (None, "connection")
    assert ask(lambda: 7) == (7, ""), "one part may fail alone"
    assert ask(lambda: hang(1.0, "timeout")) == (None, "timeout")
    assert ask(lambda: hang(1.0, "connection")) == (None, "timeout")
    assert asked == ["connection", "timeout"]
