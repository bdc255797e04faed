"""The page that takes changes back: what it shows, asks and refuses, and which permissions each object needs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from django_ratequota.admin import revert
from django_ratequota.models import Endpoint, Plan, PolicyChange, RatePolicy
from tests.admin.test_history import HISTORY, newest, url
from tests.support.operators import client_of, text_of, words_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


def revert_url(what: str, change: PolicyChange | None = None) -> str:
    return f"{HISTORY}/{(change or newest()).pk}/revert/{what}/"


def confirm(client: Client, path: str, **fields: str) -> Any:
    """GET the page, and send its form."""
    page = text_of(client.get(path))
    seen = re.search(r'name="seen" value="(\w+)"', page)
    assert seen is not None, page
    return client.post(path, {"seen": seen[1], **fields})


def test_a_save_is_undone_after_its_plan_was_shown(
    operator: Client, edited: PolicyChange, published: list[Any]
) -> None:
    """The undo led to its own page, whose button of the same name silently undid the undo."""
    page = words_of(operator.get(revert_url("save", edited)))
    for text in (
        "This change created it. It will be deleted.",
        "The rate policy was deleted",
        "log only</td><td>enforce",
    ):
        assert text in page
    assert "errornote" not in page
    published.clear()
    done = confirm(operator, revert_url("save", edited), reason="It was wrong")
    assert sorted(RatePolicy.objects.values_list("rates", "mode")) == [
        ("1/s", "enforce"),
        ("2/s", "enforce"),
        ("9/s", "enforce"),
    ]
    assert len(published) == 1
    assert (newest().actor.username, newest().reason) == ("operator", "It was wrong")
    assert PolicyChange.objects.filter(change_id=newest().change_id).count() == 4
    assert sorted(LogEntry.objects.values_list("action_flag", flat=True)) == [1, 2, 2, 3]
    assert done.headers["Location"] == url(edited)
    page = words_of(operator.get(url(edited)))
    assert "The changes of 4 objects were undone." in page
    assert f'<dt>Undone</dt><dd><a href="{url()}">' in page
    assert f'<dt>Undoes</dt><dd><a href="{url(edited)}">' in words_of(operator.get(url()))
    page = words_of(operator.get(revert_url("save", edited)))
    assert "There is nothing to undo" in page
    assert 'type="submit" class="default"' not in page
    assert operator.post(revert_url("save", edited), {"seen": "x"}).status_code == 200
    assert PolicyChange.objects.filter(change_id=newest().change_id).count() == 4


def test_later_changes_are_named_and_stay(operator: Client, edited: PolicyChange) -> None:
    RatePolicy.objects.filter(rates="1/s").update(mode="off")
    path = revert_url("save", edited)
    page = words_of(operator.get(path))
    assert (
        "Later changes of these fields stay:</p> <ul><li>Code or a command changed mode from log only to off at "
        in page
    )
    assert "1 object stays unchanged" in page
    done = confirm(operator, path)
    assert sorted(RatePolicy.objects.values_list("mode", flat=True)) == ["enforce", "enforce", "off"]
    assert "1 object stays unchanged." in text_of(operator.get(done.headers["Location"]))


def test_an_edit_before_the_confirmation_is_shown_first(operator: Client, edited: PolicyChange) -> None:
    path = revert_url("save", edited)
    seen = re.search(r'name="seen" value="(\w+)"', text_of(operator.get(path)))[1]  # type: ignore[index]
    RatePolicy.objects.filter(rates="1/s").update(reason="Another")
    page = text_of(operator.post(path, {"seen": seen, "reason": "Ticket 4712"}))
    assert "An object was changed in the meantime." in page
    assert 'value="Ticket 4712"' in page
    seen = re.search(r'name="seen" value="(\w+)"', page)[1]  # type: ignore[index]
    assert "at most 200 characters" in text_of(operator.post(path, {"seen": seen, "reason": "x" * 201}))
    assert RatePolicy.objects.filter(mode="log").count() == 2


@pytest.mark.parametrize(
    ("permissions", "undone"),
    [
        (("change_ratepolicy", "add_ratepolicy", "delete_ratepolicy"), {"update", "create", "delete"}),
        (("change_ratepolicy",), {"update"}),
        (("add_ratepolicy",), {"create"}),
        (("delete_ratepolicy",), {"delete"}),
        (("grant_override", "change_plan"), set()),
    ],
)
def test_each_object_needs_the_permission_of_its_own_page(
    edited: PolicyChange, permissions: tuple[str, ...], undone: set[str]
) -> None:
    client, path = client_of("view_policychange", *permissions), revert_url("save", edited)
    page = text_of(client.get(path))
    names = {"update": "Can change rate policy", "create": "Can add rate policy", "delete": "Can delete rate policy"}
    for action, name in names.items():
        assert (f"You need the permission “{name}”." in page) is (action not in undone), action
    assert ('value="Undo this change"' in page) is bool(undone)
    before = newest().pk
    if undone:
        assert confirm(client, path).status_code == 302
    else:
        client.post(path, {"seen": "x"})
    assert set(PolicyChange.objects.filter(pk__gt=before).values_list("action", flat=True)) == undone


@pytest.mark.parametrize(
    ("permissions", "missing"),
    [
        (("change_ratepolicy",), "Can grant overrides to users and subjects"),
        (("grant_override",), "Can change rate policy"),
        (("grant_override", "change_ratepolicy"), ""),
    ],
)
def test_an_override_that_becomes_another_policy_needs_both_permissions(
    free: Plan, permissions: tuple[str, ...], missing: str
) -> None:
    policy = RatePolicy.objects.create(subject="ip:203.0.113.7", rates="1/s")
    RatePolicy.objects.filter(pk=policy.pk).update(subject="", plan=free)
    text = text_of(client_of("view_policychange", *permissions).get(revert_url("object")))
    assert (f"You need the permission “{missing}”." in text) is bool(missing)
    assert ('type="submit" class="default"' in text) is not missing


def test_a_save_that_is_too_large_names_the_command(
    operator: Client, edited: PolicyChange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revert, "MOST", 3)
    page = text_of(operator.get(revert_url("save", edited)))
    assert f"manage.py ratequota undo {edited.change_id} --dry-run" in page
    assert 'value="Undo this change"' not in page
    assert operator.post(revert_url("save", edited), {"seen": "x"}).status_code == 200
    assert RatePolicy.objects.filter(mode="log").count() == 2


def test_a_version_is_compared_and_restored(operator: Client, free: Plan, search: Endpoint) -> None:
    policy = RatePolicy.objects.create(plan=free, rates="1/s", reason="first")
    RatePolicy.objects.filter(pk=policy.pk).update(rates="2/s", mode="log")
    change = newest()
    RatePolicy.objects.filter(pk=policy.pk).update(endpoint=search, plan=None)
    page = text_of(operator.get(revert_url("object", change)))
    rows = re.findall(r'<tr><th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td></tr>', page)
    assert rows == [
        ("endpoint", "search", "-"),
        ("plan", "-", "Free"),
        ("rates", "2/s", "1/s"),
        ("mode", "log only", "enforce"),
    ]
    done = confirm(operator, revert_url("object", change))
    assert done.headers["Location"] == url(change)
    assert newest().after == change.before
    assert (newest().actor.username, newest().reason[:24]) == ("operator", "restored version before ")
    assert [(entry.object_id, entry.is_change()) for entry in LogEntry.objects.all()] == [(str(policy.pk), True)]
    page = text_of(operator.get(revert_url("object", change)))
    assert "the object already matches this version" in page
    assert 'value="Restore it"' not in page


def test_what_was_deleted_along_needs_its_own_permission(search: Endpoint) -> None:
    RatePolicy.objects.create(user=User.objects.create(username="alice"), endpoint=search, rates="1/s")
    RatePolicy.objects.create(endpoint=search, rates="2/s")
    search.delete()
    path = revert_url("save", PolicyChange.objects.filter(model="endpoint")[0])
    client = client_of("view_policychange", "add_endpoint", "add_ratepolicy")
    page = text_of(client.get(path))
    assert page.count("Can grant overrides to users and subjects") == page.count("user alice × search") == 1
    assert confirm(client, path).status_code == 302
    assert list(RatePolicy.objects.values_list("rates", flat=True)) == ["2/s"]


def test_a_version_that_cannot_be_restored_has_no_button(operator: Client, free: Plan) -> None:
    Plan.objects.filter(pk=free.pk).update(name="F")
    Plan.objects.create(name="Free", slug="other")
    path = revert_url("object", PolicyChange.objects.filter(action="update")[0])
    page = text_of(operator.get(path))
    assert "It stays unchanged. name: Plan with this Name already exists." in page
    assert 'value="Restore it"' not in page
    assert operator.post(path, {"seen": "x"}).status_code == 200
    assert Plan.objects.get(pk=free.pk).name == "F"


def test_only_versions_that_exist_are_restored(operator: Client, free: Plan) -> None:
    created = newest()
    Plan.objects.filter(pk=free.pk).update(name="F")
    for path in (revert_url("object", created), revert_url("other"), f"{HISTORY}/4711/revert/object/"):
        assert operator.get(path).status_code == 404
    reverse("admin:index")  # builds the URLs while the model is registered
    kept = admin.site._registry.pop(Plan)
    try:
        assert 'value="Restore it"' not in text_of(operator.get(revert_url("object")))
    finally:
        admin.site._registry[Plan] = kept
