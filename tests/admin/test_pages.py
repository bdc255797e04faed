"""Every page that a model admin lists in ``pages``: its address, and who may open it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.test import Client
from django.urls import resolve

from django_ratequota.admin.pages import AdminPage, Replies
from django_ratequota.exceptions import StoreError
from django_ratequota.models import Plan, PolicyChange, RatePolicy

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("fresh_policies")]

PAGES = [
    (model, page) for model in (Plan, RatePolicy, PolicyChange) for page in admin.site._registry[model].own_pages
]
NAMES = [f"{model._meta.model_name} {page.name}" for model, page in PAGES]


def url_of(model: Any, page: AdminPage, pk: Any) -> str:
    pattern = page.path.replace("<path:object_id>", str(pk)).replace("<str:version>", "after")
    change = PolicyChange.objects.last()
    pattern = pattern.replace("<uuid:change_id>", str(change.change_id if change else UUID(int=pk)))
    return f"/admin/django_ratequota/{model._meta.model_name}/{pattern}"


@pytest.fixture
def rows() -> dict[Any, Any]:
    plan = Plan.objects.create(name="Free", slug="free")
    policy = RatePolicy.objects.create(subject="tenant:acme", rates="5/min")
    change = PolicyChange.objects.latest("pk")
    return {Plan: plan.pk, RatePolicy: policy.pk, PolicyChange: change.pk}


@pytest.mark.parametrize(("model", "page"), PAGES, ids=NAMES)
def test_the_address_has_the_pages_name(model: Any, page: AdminPage) -> None:
    assert resolve(url_of(model, page, 1)).url_name == f"django_ratequota_{model._meta.model_name}_{page.name}"


@pytest.mark.parametrize(("model", "page"), PAGES, ids=NAMES)
def test_operators_need_a_permission_and_the_object_must_exist(
    model: Any, page: AdminPage, rows: dict[Any, Any]
) -> None:
    address = url_of(model, page, rows[model])
    assert Client().get(address).status_code == 302, "to the login"
    staff, root = Client(), Client()
    staff.force_login(User.objects.create_user("support", is_staff=True))
    root.force_login(User.objects.create_superuser("root"))
    assert staff.get(address).status_code == 403
    assert root.get(address).status_code in (200, 302)
    if "<path:object_id>" in page.path:
        assert root.get(url_of(model, page, 4711)).status_code == 404


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
