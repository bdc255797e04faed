"""Every page that a model admin lists in ``pages``: its address, and who may open it."""

from __future__ import annotations

import pytest
from django.contrib import admin

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
