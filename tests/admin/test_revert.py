"""The pages that take changes back: what they show, ask and refuse, and which permissions each object needs."""

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
from django_ratequota.changes.writer import write_counted
from django_ratequota.models import Endpoint, Plan, PolicyChange, RatePolicy
from tests.admin.test_history import BASE, HISTORY, newest, url
from tests.support.operators import client_of, text_of, words_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


def version_url(version: str, change: PolicyChange | None = None) -> str:
    return f"{HISTORY}/{(change or newest()).pk}/restore/{version}/"


def confirm(client: Client, path: str, **fields: str) -> Any:
    """GET the page, and send its form."""
    page = text_of(client.get(path))
    seen = re.search(r'name="seen" value="(\w+)"', page)
    assert seen is not None, page
    return client.post(path, {"seen": seen[1], **fields})


# --- A save. ---


def test_a_save_is_undone_on_its_page(operator: Client, edited: PolicyChange, published: list[Any]) -> None:
    page = text_of(operator.get(url(edited)))
    for text in ("anna", "Ticket 4711", "This save created it", "The rate policy was deleted", "log only"):
        assert text in page
    published.clear()
    done = confirm(operator, url(edited), reason="It was wrong")
    assert done.status_code == 302
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


def test_the_button_of_an_undone_save_does_not_make_its_changes_again(operator: Client, edited: PolicyChange) -> None:
    """The undo led to its own page, whose button of the same name silently undid the undo."""
    done = confirm(operator, url(edited))
    page = text_of(operator.get(done.headers["Location"]))
    assert "4 objects were restored." in page
    assert "There is nothing to undo" in page
    assert 'value="Undo this save"' not in page
    page = words_of(operator.get(url()))
    assert re.search(rf'This save undid the <a href="{url(edited)}">save of [^<]+</a>. Undoing it makes', page)
    assert confirm(operator, url()).status_code == 302
    assert sorted(RatePolicy.objects.values_list("rates", "mode")) == [
        ("1/s", "log"),
        ("2/s", "log"),
        ("3/s", "enforce"),
    ]


@pytest.mark.parametrize("overwrite", [False, True])
def test_later_edits_are_shown_and_stay_unless_chosen(
    operator: Client, edited: PolicyChange, overwrite: bool
) -> None:
    RatePolicy.objects.filter(rates="1/s").update(mode="off")
    page = text_of(operator.get(url(edited)))
    assert "1 object was edited again since then." in page
    assert page.count("It was edited again since then, and stays as it is") == 1
    assert re.search(r"<tr><th scope=\"row\">mode</th><td>off</td><td>enforce</td></tr>", page)
    done = confirm(operator, url(edited), **({"also": "on"} if overwrite else {}))
    assert RatePolicy.objects.get(rates="1/s").mode == ("enforce" if overwrite else "off")
    assert RatePolicy.objects.get(rates="2/s").mode == "enforce"
    assert ("1 stays as it is." in text_of(operator.get(done.headers["Location"]))) is not overwrite


def test_an_edit_before_the_confirmation_is_shown_first(operator: Client, edited: PolicyChange) -> None:
    page = text_of(operator.get(url(edited)))
    seen = re.search(r'name="seen" value="(\w+)"', page)[1]  # type: ignore[index]
    RatePolicy.objects.filter(rates="1/s").update(reason="Another")
    page = text_of(operator.post(url(edited), {"seen": seen, "reason": "Ticket 4712"}))
    assert "An object was edited in the meantime." in page
    assert 'value="Ticket 4712"' in page
    seen = re.search(r'name="seen" value="(\w+)"', page)[1]  # type: ignore[index]
    page = text_of(operator.post(url(edited), {"seen": seen, "reason": "x" * 201}))
    assert "at most 200 characters" in page
    assert RatePolicy.objects.filter(mode="log").count() == 2


@pytest.mark.parametrize(
    ("permissions", "undone"),
    [
        (("change_ratepolicy", "add_ratepolicy", "delete_ratepolicy"), {"update", "create", "delete"}),
        (("change_ratepolicy",), {"update"}),
        (("add_ratepolicy",), {"create"}),
        (("delete_ratepolicy",), {"delete"}),
        (("grant_override", "change_plan"), set()),
        ((), set()),
    ],
)
def test_each_object_needs_the_permission_of_its_own_page(
    edited: PolicyChange, permissions: tuple[str, ...], undone: set[str]
) -> None:
    client = client_of("view_policychange", *permissions)
    page = text_of(client.get(url(edited)))
    names = {"update": "Can change rate policy", "create": "Can add rate policy", "delete": "Can delete rate policy"}
    for action, name in names.items():
        assert (f"You need the permission “{name}”." in page) is (action not in undone), action
    assert ('value="Undo this save"' in page) is bool(undone)
    before = newest().pk
    if undone:
        assert confirm(client, url(edited)).status_code == 302
    else:
        client.post(url(edited), {"seen": "x"})
    assert set(PolicyChange.objects.filter(pk__gt=before).values_list("action", flat=True)) == undone


@pytest.mark.parametrize(
    ("permissions", "missing"),
    [
        (("change_ratepolicy",), "Can grant overrides to users and subjects"),
        (("grant_override",), "Can change rate policy"),
        (("grant_override", "change_ratepolicy"), ""),
    ],
)
@pytest.mark.parametrize("page", ["save", "version"])
def test_an_override_that_becomes_another_policy_needs_both_permissions(
    free: Plan, page: str, permissions: tuple[str, ...], missing: str
) -> None:
    policy = RatePolicy.objects.create(subject="ip:203.0.113.7", rates="1/s")
    RatePolicy.objects.filter(pk=policy.pk).update(subject="", plan=free)
    path = url() if page == "save" else version_url("before")
    text = text_of(client_of("view_policychange", *permissions).get(path))
    assert (f"You need the permission “{missing}”." in text) is bool(missing)
    assert ('type="submit" class="default"' in text) is not missing


def test_a_save_of_counters_is_shown_and_cannot_be_undone(operator: Client) -> None:
    write_counted("everyone", "reset", before={}, after={}, reason="Ticket 4711")
    page = text_of(operator.get(url()))
    assert "Nothing of this can be undone" in page
    assert "counter reset" in page
    assert 'name="seen"' not in page
    assert operator.get(f"{HISTORY}/save/00000000-0000-0000-0000-000000000000/").status_code == 404


def test_a_save_that_is_too_large_names_the_command(
    operator: Client, edited: PolicyChange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revert, "MOST", 3)
    page = text_of(operator.get(url(edited)))
    assert f"manage.py ratequota undo {edited.change_id} --dry-run" in page
    assert "Undo this save" not in page
    assert operator.post(url(edited), {"seen": "x"}).status_code == 200
    assert RatePolicy.objects.filter(mode="log").count() == 2


# --- A version. ---


def test_a_version_is_compared_and_restored(operator: Client, free: Plan, search: Endpoint) -> None:
    policy = RatePolicy.objects.create(plan=free, rates="1/s", reason="first")
    change = newest()
    RatePolicy.objects.filter(pk=policy.pk).update(rates="2/s", mode="log")
    RatePolicy.objects.filter(pk=policy.pk).update(endpoint=search, plan=None)
    page = text_of(operator.get(version_url("after", change)))
    rows = re.findall(r'<tr><th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td></tr>', page)
    assert rows == [
        ("endpoint", f"search (id {search.pk})", "-"),
        ("plan", "-", f"Free (id {free.pk})"),
        ("rates", "2/s", "1/s"),
        ("mode", "log only", "enforce"),
    ]
    done = confirm(operator, version_url("after", change))
    assert done.headers["Location"] == f"{BASE}/ratepolicy/{policy.pk}/change/"
    assert newest().after == change.after
    assert (newest().actor.username, newest().reason[:20]) == ("operator", "restored version of ")
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.is_change()) == (str(policy.pk), True)
    page = text_of(operator.get(version_url("after", change)))
    assert "the object already matches this version" in page
    assert "Yes, restore it" not in page
    assert operator.post(version_url("after", change), {"seen": "x"}).status_code == 200
    assert LogEntry.objects.count() == 1


@pytest.mark.parametrize("also", [False, True])
def test_what_was_deleted_with_a_plan_is_restored_on_request(operator: Client, free: Plan, also: bool) -> None:
    RatePolicy.objects.create(plan=free, rates="1/s")
    free.delete()
    change = PolicyChange.objects.filter(model="plan")[0]
    page = words_of(operator.get(version_url("before", change)))
    assert "It will be created again with its old id" in page
    assert re.search(r"Deleted together with it</h2> <ul><li><bdi>plan Free × all endpoints: 1/s</bdi></li>", page)
    assert "Restore these as well" in page
    done = confirm(operator, version_url("before", change), **({"also": "on"} if also else {}))
    assert f"{1 + also} object" in text_of(operator.get(done.headers["Location"]))
    assert (Plan.objects.count(), RatePolicy.objects.count()) == (1, also)
    assert {entry.is_addition() for entry in LogEntry.objects.all()} == {True}


def test_a_version_that_cannot_be_restored_has_no_button(operator: Client, free: Plan) -> None:
    Plan.objects.filter(pk=free.pk).update(name="F")
    change = newest()
    Plan.objects.create(name="Free", slug="other")
    page = text_of(operator.get(version_url("before", change)))
    assert "It stays as it is. name: Plan with this Name already exists." in page
    assert "Yes, restore it" not in page
    assert operator.post(version_url("before", change), {"seen": "x"}).status_code == 200
    assert Plan.objects.get(pk=free.pk).name == "F"


def test_versions_that_exist_are_offered(operator: Client, free: Plan) -> None:
    Plan.objects.filter(pk=free.pk).update(name="F")
    updated, created = PolicyChange.objects.all()[:2]
    for change, offered in ((created, {"after"}), (updated, {"after", "before"})):
        page = text_of(operator.get(f"{HISTORY}/{change.pk}/change/"))
        for version in ("after", "before", "other"):
            assert (version_url(version, change) in page) is (version in offered)
            assert operator.get(version_url(version, change)).status_code == (200 if version in offered else 404)
    for pk in ("4711", "x"):
        assert operator.get(f"{HISTORY}/{pk}/restore/after/").status_code == 404


def test_what_was_deleted_along_needs_its_own_permission(search: Endpoint) -> None:
    RatePolicy.objects.create(user=User.objects.create(username="alice"), endpoint=search, rates="1/s")
    RatePolicy.objects.create(endpoint=search, rates="2/s")
    search.delete()
    path = version_url("before", PolicyChange.objects.filter(model="endpoint")[0])
    client = client_of("view_policychange", "add_endpoint", "add_ratepolicy")
    assert text_of(client.get(path)).count("Can grant overrides to users and subjects") == 1
    assert confirm(client, path, also="on").status_code == 302
    assert list(RatePolicy.objects.values_list("rates", flat=True)) == ["2/s"]


def test_versions_of_unregistered_models_are_not_restored(operator: Client, free: Plan) -> None:
    Plan.objects.filter(pk=free.pk).update(name="F")
    reverse("admin:index")  # builds the URLs while the model is registered
    kept = admin.site._registry.pop(Plan)
    try:
        assert "Yes, restore it" not in text_of(operator.get(version_url("before")))
    finally:
        admin.site._registry[Plan] = kept
