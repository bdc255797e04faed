"""The history in the admin: a row per save, what a save changed, and one History per object."""

from __future__ import annotations

import html
import re
from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from django_ratequota.admin.formatting import moment
from django_ratequota.changes.writer import changed_by
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from tests.support.operators import client_of, text_of, words_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

BASE = "/admin/django_ratequota"
HISTORY = f"{BASE}/policychange"
NOW = datetime(2031, 5, 6, 7, 8, tzinfo=UTC)


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


# --- The list. ---


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("?q=Free", False),  # the plan's own creation, which is the oldest
        ("?q=Ticket", True),
        ("?q=Free&model=plan", True),  # the newest of the filter's rows
        ("?q=anna", True),
        ("?q={plan}&model=plan", True),
        ("?q={user}", True),
        ("?q=BOB", True),
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


def test_the_list_says_in_a_few_words_what_changed(operator: Client, free: Plan) -> None:
    pro = plan("Pro")
    policy = RatePolicy.objects.create(plan=free, rates="10/min")
    edits: list[tuple[dict[str, Any], str]] = [
        ({"plan": pro}, "plan: Free → Pro"),
        (
            {"mode": "off", "counted_per": "ip", "reason": "x", "on_error": "deny"},
            "counted per: caller → ip; mode: enforce → off; and 2 more fields",
        ),
        ({"reason": "y" * 100}, f"note: x → {'y' * 39}…"),
        ({"reason": ""}, f"note: {'y' * 39}… → empty"),
    ]
    for fields, _words in edits:
        RatePolicy.objects.filter(pk=policy.pk).update(**fields)
    pro_pk = pro.pk
    policy.delete()
    pro.delete()
    texts = [words.replace("Pro", f"deleted (id {pro_pk})") for _fields, words in reversed(edits)]
    assert cells(operator.get(f"{HISTORY}/"), "what_changed") == ["-", "-", *texts, "-", "-", "-"]


# --- A save, and a change. ---

ROW = r'<tr><th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td></tr>'


def test_a_save_shows_first_what_happened(operator: Client, edited: PolicyChange) -> None:
    page = words_of(operator.get(url(edited)))
    first = PolicyChange.objects.filter(change_id=edited.change_id).last()
    assert first is not None
    for name, value in (
        ("When", moment(first.at, seconds=True)),
        ("Who", "<bdi>anna</bdi>"),
        ("Reason", "<bdi>Ticket 4711"),
    ):
        assert f"<dt>{name}</dt><dd>{value}" in page
    assert re.findall("<h2>(.*?)[:<]", page) == [
        f"Rate policy {what}" for what in ("changed", "changed", "created", "deleted")
    ]
    rows = re.findall(ROW, page)
    assert rows.count(("mode", "enforce", "log only")) == 2
    assert {("rates", "-", "3/s"), ("rates", "9/s", "-"), ("mode", "-", "enforce")} <= {*rows}
    assert f'href="{HISTORY}/{first.pk}/revert/save/">Undo this change…' in page
    assert 'type="submit" class="default"' not in page
    assert operator.get(f"{HISTORY}/save/00000000-0000-0000-0000-000000000000/").status_code == 404


def test_a_large_save_is_shown_by_pages(operator: Client, free: Plan) -> None:
    RatePolicy.objects.bulk_create(RatePolicy(subject=f"ip:10.0.0.{n}", rates="1/s") for n in range(60))
    assert text_of(operator.get(url())).count("<section") == 50
    page = text_of(operator.get(f"{url()}?p=2"))
    assert page.count("<section") == 10
    assert '<a href="?p=1">1</a>' in page


def test_a_change_leads_on(operator: Client, free: Plan) -> None:
    alice = User.objects.create(username="alice")
    for number in range(2):
        RatePolicy.objects.create(
            user=alice, rates=f"{number + 1}/s", ends_at=NOW, counted_per=("caller", "ip")[number]
        )
    RatePolicy.objects.create(user=User.objects.create(username="bob", pk=int(f"{alice.pk}0")), rates="3/s")
    change = PolicyChange.objects.filter(touched_user=str(alice.pk))[0]
    RatePolicy.objects.filter(pk=change.object_id).update(mode="log")
    page = words_of(operator.get(f"{HISTORY}/{newest().pk}/change/", follow=True))
    assert re.findall(ROW, page) == [("mode", "enforce", "log only")]
    links = {text: html.unescape(link) for link, text in re.findall(r'<a href="([^"]*)">([^<]*)</a>', page)}
    assert links["Restore the version before this change"] == f"{HISTORY}/{newest().pk}/revert/object/"
    assert len(cells(operator.get(links["All changes of this object"]), "saved")) == 2
    found = cells(operator.get(HISTORY + "/", {"q": f"user:{alice.pk}"}), "saved")
    assert found[1:] == [f"rate policy created user alice × all endpoints: {rates}" for rates in ("2/s", "1/s")]
    page = words_of(operator.get(url(change)))
    assert ("ends at", "-", moment(NOW)) in re.findall(ROW, page)
    assert "Restore the version" not in page


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


def test_a_plans_history_has_its_policies_and_on_request_its_assignments(operator: Client, free: Plan) -> None:
    pro = plan("Pro")
    other = RatePolicy.objects.create(plan=pro, rates="5/s")
    policy = RatePolicy.objects.create(plan=free, rates="1/s")
    RatePolicy.objects.filter(pk=policy.pk).update(rates="2/s")
    RatePolicy.objects.filter(pk=policy.pk).update(plan=pro, counted_per="ip")
    RatePolicy.objects.filter(pk=policy.pk).update(rates="3/s")
    PlanAssignment.objects.create(user=User.objects.create(username="bob"), plan=free)
    page = operator.get(f"{BASE}/plan/{free.pk}/history/", follow=True)
    assert cells(page, "what_changed") == ["plan: Free → Pro; counted per: caller → ip", "rates: 1/s → 2/s", "-", "-"]
    page = operator.get(f"{HISTORY}/?touched_plan={free.pk}&model=planassignment")
    assert cells(page, "saved") == ["plan assignment created user bob: Free"]
    page = operator.get(f"{BASE}/plan/{pro.pk}/history/", follow=True)
    assert cells(page, "what_changed")[:2] == ["rates: 2/s → 3/s", "plan: Free → Pro; counted per: caller → ip"]
    assert len(cells(page, "saved")) == 4
    other.delete()
    for hostile in ("x", "%00", "9" * 40, "<script>alert(1)</script>"):
        assert operator.get(f"{HISTORY}/?touched_plan={hostile}").status_code in (200, 302)


def test_the_history_is_read_only_for_everybody(operator: Client, edited: PolicyChange) -> None:
    for path in ("add/", f"{edited.pk}/delete/"):
        assert operator.post(f"{HISTORY}/{path}", {"post": "yes"}).status_code == 403
    sent = {"action": "delete_selected", "_selected_action": [edited.pk], "post": "yes"}
    operator.post(f"{HISTORY}/", sent)
    assert PolicyChange.objects.filter(pk=edited.pk).exists()
