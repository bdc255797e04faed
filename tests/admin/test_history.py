"""The history in the admin: a row per save, one History per object, and the page that undoes a save."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client

from django_ratequota.admin import undo as page_of_saves
from django_ratequota.changes.writer import changed_by, write_reset
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from tests.support.operators import client_of, text_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

BASE = "/admin/django_ratequota"
HISTORY = f"{BASE}/policychange"


def plan(name: str, **fields: Any) -> Plan:
    return Plan.objects.create(name=name, slug=name.lower(), **fields)


def newest() -> PolicyChange:
    change = PolicyChange.objects.first()
    assert change is not None
    return change


def url(change: PolicyChange | None = None) -> str:
    return f"{HISTORY}/save/{(change or newest()).change_id}/"


def cells(page: Any, name: str) -> list[str]:
    """Return the texts of a column, without tags and marks of direction."""
    found = re.findall(rf'<t[dh] class="field-{name}[^"]*">(.*?)</t[dh]>', text_of(page), re.S)
    return [" ".join(re.sub("[\u2066\u2069]", "", re.sub(r"<[^>]+>", " ", cell)).split()) for cell in found]


def confirm(client: Client, path: str, **fields: str) -> Any:
    """GET the page, and send its form."""
    page = text_of(client.get(path))
    seen = re.search(r'name="seen" value="(\w+)"', page)
    assert seen is not None, page
    return client.post(path, {"seen": seen[1], **fields})


@pytest.fixture
def edited(free: Plan, search: Endpoint) -> PolicyChange:
    """One save that edits two policies, creates one and deletes one; returns its last row."""
    RatePolicy.objects.create(plan=free, rates="1/s")
    RatePolicy.objects.create(plan=free, endpoint=search, rates="2/s")
    RatePolicy.objects.create(rates="9/s", counted_per="ip")
    with changed_by(User.objects.create(username="anna"), "Ticket 4711"):
        RatePolicy.objects.filter(plan=free).update(mode="log")
        RatePolicy.objects.create(endpoint=search, rates="3/s")
        RatePolicy.objects.filter(counted_per="ip").delete()
    return newest()


# --- The list. ---


def test_a_save_is_one_row_with_its_first_objects(operator: Client, edited: PolicyChange) -> None:
    page = operator.get(f"{HISTORY}/")
    counted = re.findall(r"\d × [a-z ]+?(?= \d|$)", cells(page, "saved")[0])
    assert sorted(counted) == ["1 × rate policy created", "1 × rate policy deleted", "2 × rate policy changed"]
    what = "plan Free × all endpoints: 1/s mode: enforce → log only plan Free × search: 2/s mode: enforce → log only"
    assert cells(page, "what_changed")[0] == f"{what} everyone × search: 3/s created and 1 more"
    assert (cells(page, "actor")[0], cells(page, "reason_text")[0]) == ("anna", "Ticket 4711")
    assert len(cells(page, "saved")) == 6
    assert f'href="{url(edited)}"' in text_of(page)
    assert cells(page, "saved")[1] == "rate policy created everyone × all endpoints: 9/s"
    page = operator.get(f"{HISTORY}/?action__exact=delete")
    assert cells(page, "what_changed") == ["everyone × all endpoints: 9/s deleted and 3 more"]


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("", 6),
        ("?q=everyone+search", 1),
        ("?q=anna", 1),
        ("?model=ratepolicy", 4),
        ("?action__exact=delete", 1),
        ("?action__exact=update&model=plan", 0),
        ("?q=nothing", 0),
    ],
)
def test_a_save_is_found_by_any_of_its_rows(operator: Client, edited: PolicyChange, query: str, count: int) -> None:
    page = operator.get(f"{HISTORY}/{query}")
    assert len(cells(page, "saved")) == page.context["cl"].result_count == count


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("?q=Free", False),  # the plan's own creation, which is the oldest
        ("?q=Ticket", True),
        ("?q=Free&model=plan", True),  # the newest of the filter's rows
        ("?q=anna", True),
        ("?q={plan}&model=plan", True),
        ("?q={user}", True),
    ],
)
def test_words_are_searched_in_the_newest_changes_and_ids_in_all(
    operator: Client, free: Plan, monkeypatch: pytest.MonkeyPatch, query: str, found: bool
) -> None:
    bob = User.objects.create(username="bob")
    RatePolicy.objects.create(user=bob, rates="1/s")
    with changed_by(User.objects.create(username="anna")):
        Endpoint.objects.create(name="first")
    with changed_by(None, "Ticket 4711"):
        Endpoint.objects.create(name="second")
    monkeypatch.setattr("django_ratequota.admin.history._SEARCHED", 1)
    page = operator.get(f"{HISTORY}/{query.format(plan=free.pk, user=bob.pk)}")
    assert bool(cells(page, "saved")) is found


# --- One History per object. ---


@pytest.mark.parametrize("model", [Plan, Endpoint, RatePolicy, PlanAssignment])
def test_the_button_history_leads_to_the_saves_of_the_object(
    operator: Client, edited: PolicyChange, free: Plan, model: Any
) -> None:
    PlanAssignment.objects.create(user=User.objects.create(username="alice"), plan=free)
    row = model.objects.first()
    path = f"{BASE}/{model._meta.model_name}/{row.pk}"
    assert f'href="{path}/history/"' in text_of(operator.get(f"{path}/change/"))
    page = operator.get(f"{path}/history/", follow=True)
    assert page.redirect_chain[0][0].startswith(f"{HISTORY}/?")
    assert f"History of {row} (id {row.pk})" in text_of(page)
    assert page.context["cl"].result_count >= 1


def test_operators_who_may_not_view_the_history_get_djangos_log(edited: PolicyChange, free: Plan) -> None:
    page = client_of("view_plan").get(f"{BASE}/plan/{free.pk}/history/")
    assert (page.status_code, "Change history: Free" in text_of(page)) == (200, True)
    assert client_of("view_policychange", name="second").get(f"{BASE}/plan/{free.pk}/history/").status_code == 403
    assert client_of("view_plan", "view_policychange", name="third").get(f"{BASE}/plan/7/history/").status_code == 302


def test_a_plans_history_has_its_policies_and_counts_its_assignments(operator: Client, free: Plan) -> None:
    pro = plan("Pro")
    other = RatePolicy.objects.create(plan=pro, rates="5/s")
    policy = RatePolicy.objects.create(plan=free, rates="1/s")
    RatePolicy.objects.filter(pk=policy.pk).update(rates="2/s")
    RatePolicy.objects.filter(pk=policy.pk).update(plan=pro, counted_per="ip")
    RatePolicy.objects.filter(pk=policy.pk).update(rates="3/s")
    for name in ("alice", "bob"):
        PlanAssignment.objects.create(user=User.objects.create(username=name), plan=free)
    page = operator.get(f"{BASE}/plan/{free.pk}/history/", follow=True)
    assert cells(page, "what_changed") == ["plan: Free → Pro; counted per: caller → ip", "rates: 1/s → 2/s", "-", "-"]
    link = re.search(r'<a href="([^"]+)">2 saves of its assignments</a>', text_of(page))
    assert link is not None
    listed = operator.get(link[1].replace("&amp;", "&"))
    assert cells(listed, "saved") == ["plan assignment created bob: Free", "plan assignment created alice: Free"]
    page = operator.get(f"{BASE}/plan/{pro.pk}/history/", follow=True)
    assert cells(page, "what_changed")[:2] == ["rates: 2/s → 3/s", "plan: Free → Pro; counted per: caller → ip"]
    assert len(cells(page, "saved")) == 4
    other.delete()
    for hostile in ("x", "%00", "9" * 40, "<script>alert(1)</script>"):
        assert operator.get(f"{HISTORY}/?touched_plan={hostile}").status_code in (200, 302)


# --- The page of a save. ---


def test_a_save_is_undone_on_its_page(operator: Client, edited: PolicyChange, published: list[Any]) -> None:
    page = text_of(operator.get(url(edited)))
    for text in ("anna", "Ticket 4711", "This save created it", "This save deleted it", "log only"):
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
    assert done.headers["Location"] == url()
    assert "4 objects were restored." in text_of(operator.get(url()))
    assert "There is nothing to undo" in text_of(operator.get(url(edited)))
    # The undo can be undone.
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
    assert (">Undo this save</button>" in page) is bool(undone)
    before = newest().pk
    if undone:
        assert confirm(client, url(edited)).status_code == 302
    else:
        client.post(url(edited), {"seen": "x"})
    assert set(PolicyChange.objects.filter(pk__gt=before).values_list("action", flat=True)) == undone


@pytest.mark.parametrize("grants", [True, False])
def test_overrides_need_the_permission_to_grant_them(grants: bool) -> None:
    policy = RatePolicy.objects.create(subject="ip:203.0.113.7", rates="1/s")
    RatePolicy.objects.filter(pk=policy.pk).update(rates="2/s")
    client = client_of("view_policychange", "change_ratepolicy", *(["grant_override"] if grants else []))
    page = text_of(client.get(url()))
    assert ("You need the permission “Can grant overrides to users and subjects”." in page) is not grants
    assert (">Undo this save</button>" in page) is grants


def test_a_save_of_counters_is_shown_and_cannot_be_undone(operator: Client) -> None:
    write_reset("everyone", [], "Ticket 4711")
    page = text_of(operator.get(url()))
    assert "Nothing of this can be undone" in page
    assert "counter reset" in page
    assert 'name="seen"' not in page
    assert operator.get(f"{HISTORY}/save/00000000-0000-0000-0000-000000000000/").status_code == 404


def test_a_save_that_is_too_large_names_the_command(
    operator: Client, edited: PolicyChange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_of_saves, "MOST", 3)
    page = text_of(operator.get(url(edited)))
    assert f"manage.py ratequota undo {edited.change_id} --dry-run" in page
    assert "Undo this save" not in page
    assert operator.post(url(edited), {"seen": "x"}).status_code == 200
    assert RatePolicy.objects.filter(mode="log").count() == 2
