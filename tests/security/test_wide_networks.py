"""Policies and list members for a large part of the Internet, without the permission to change rate policies."""

from __future__ import annotations

from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.test import RequestFactory
from django.utils import timezone

from django_ratequota.admin.revert import missing_permission
from django_ratequota.changes.validators import canonical_subject
from django_ratequota.models import Endpoint, ListMember, RatePolicy, SubjectList
from tests.support.operators import client_of
from tests.support.pages import form_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

APP = "/admin/django_ratequota"
LIST = f"{APP}/ratepolicy/"
REFUSAL = "is a large part of the Internet. Larger networks need the permission “Can change rate policy”."


@pytest.mark.parametrize(
    ("network", "is_wide"),
    [
        ("0.0.0.0/0", True),
        ("ip:128.0.0.0/15", True),
        ("203.0.0.0/16", False),
        ("2000::/31", True),
        ("2001:db8::/32", False),
        ("::ffff:0:0/96", True),
        ("203.0.113.7", False),
    ],
)
@pytest.mark.parametrize("kind", ["block", "override", "list", "member"])
def test_a_wide_network_is_refused(kind: str, network: str, is_wide: bool) -> None:
    bots = SubjectList.objects.create(name="Bots")
    subject = canonical_subject(network)
    override = {"counted_per": "caller", "rates": "blocked", "algorithm": "gcra", "mode": "enforce"}
    path, data, permission = {
        "block": (
            f"{LIST}block/?caller={subject}",
            {"target": subject, "until": "day", "reason": "x"},
            "block_callers",
        ),
        "override": (f"{LIST}add/", {"subject": network, **override}, "grant_override"),
        "list": (f"{APP}/subjectlist/{bots.pk}/add-members/", {"text": network}, "add_listmember"),
        "member": (f"{APP}/listmember/add/", {"subject_list": bots.pk, "subject": network}, "add_listmember"),
    }[kind]
    page = client_of(permission).post(path, data, follow=True)
    assert (REFUSAL in unescape(page.content.decode())) is is_wide
    assert RatePolicy.objects.count() + ListMember.objects.count() == (not is_wide)
    client_of(permission, "change_ratepolicy", name="editor").post(path, data)
    assert RatePolicy.objects.count() + ListMember.objects.count() >= 1


class World:
    """Rows for wide networks, and the requests that would change them."""

    def __init__(self) -> None:
        past = timezone.now() - timedelta(days=1)
        self.root = client_of(superuser=True, name="root")
        self.reports = Endpoint.objects.create(name="reports")
        self.bots, self.friends = (SubjectList.objects.create(name=name) for name in ("Bots", "Friends"))
        RatePolicy.objects.create(subject_list=self.bots, rates="blocked")
        wide: dict[str, Any] = {"subject": "ip:0.0.0.0/0"}
        self.limit = RatePolicy.objects.create(**wide, endpoint=self.reports, rates="1000/min")
        self.trial = RatePolicy.objects.create(**wide, rates="blocked", mode="log")
        self.ended = RatePolicy.objects.create(**wide, rates="blocked", starts_at=past, ends_at=past + timedelta(1))
        self.block = RatePolicy.objects.create(subject="ip:2000::/3", rates="blocked", starts_at=past)
        self.member = ListMember.objects.create(subject_list=self.friends, subject="ip:128.0.0.0/1", ends_at=past)

    def edited(self, row: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
        page = f"{APP}/{row._meta.model_name}/{row.pk}/change/"
        return page, {**form_of(self.root.get(page)), **fields}

    def enforced_in_the_list(self) -> tuple[str, dict[str, Any]]:
        form = form_of(self.root.get(f"{LIST}?q=0.0.0.0"))
        [row] = [name for name, value in form.items() if name.endswith("-id") and value == str(self.trial.pk)]
        return LIST, {**form, row.replace("-id", "-mode"): "enforce", "_save": "1"}

    def rows(self) -> list[Any]:
        return [list(model.objects.order_by("pk").values()) for model in (RatePolicy, ListMember)]


ENDLESS = {"ends_at_0": "", "ends_at_1": ""}
ATTACKS: dict[str, Any] = {
    "a limit made a block everywhere": (
        ("grant_override",),
        lambda w: w.edited(w.limit, rates="blocked", endpoint=""),
    ),
    "a wide network made a smaller one": (("grant_override",), lambda w: w.edited(w.block, subject="ip:1.2.3.4")),
    "a log-only block enforced": (("grant_override",), lambda w: w.edited(w.trial, mode="enforce")),
    "one enforced in the list": (("grant_override",), lambda w: w.enforced_in_the_list()),
    "an ended block revived": (("grant_override",), lambda w: w.edited(w.ended, **ENDLESS)),
    "a block deleted": (("grant_override",), lambda w: (f"{LIST}{w.block.pk}/delete/", {"post": "yes"})),
    "a block deleted in the list": (
        ("grant_override",),
        lambda w: (LIST, {"action": "delete_selected", "_selected_action": [w.block.pk], "post": "yes"}),
    ),
    "a block deleted with its endpoint": (
        ("grant_override", "view_endpoint", "delete_endpoint"),
        lambda w: (f"{APP}/endpoint/{w.reports.pk}/delete/", {"post": "yes"}),
    ),
    "a block ended": (("block_callers",), lambda w: (f"{LIST}block/?caller=ip:2000::/3", {"end": "ip:2000::/3"})),
    "a member revived": (("change_listmember",), lambda w: w.edited(w.member, **ENDLESS)),
    "a member moved to a blocked list": (
        ("change_listmember",),
        lambda w: w.edited(w.member, subject_list=w.bots.pk),
    ),
    "a member removed": (
        ("delete_listmember",),
        lambda w: (f"{APP}/subjectlist/{w.friends.pk}/remove-members/", {"text": "128.0.0.0/1"}),
    ),
    "a member deleted": (
        ("view_listmember", "delete_listmember"),
        lambda w: (f"{APP}/listmember/{w.member.pk}/delete/", {"post": "yes"}),
    ),
    "a member deleted with its list": (
        ("view_subjectlist", "delete_subjectlist", "delete_listmember"),
        lambda w: (f"{APP}/subjectlist/{w.friends.pk}/delete/", {"post": "yes"}),
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_wide_network_by_narrow_rights(attack: str) -> None:
    """Regression: only what was typed was refused, so that a stored block could be widened, revived or ended."""
    world = World()
    permissions, request_of = ATTACKS[attack]
    path, data = request_of(world)
    before = world.rows()
    page = client_of(*permissions).post(path, data, follow=True)
    assert world.rows() == before
    assert (REFUSAL in unescape(page.content.decode())) is (attack == "a member removed")
    client_of(*permissions, "change_ratepolicy", name="editor").post(path, data)
    assert world.rows() != before


@pytest.mark.parametrize("now", [None, "203.0.113.7"])
def test_a_wide_network_is_restored_only_with_the_permission(now: str | None) -> None:
    request = RequestFactory().get("/")
    for permissions, missing in ((["grant_override"], True), (["grant_override", "change_ratepolicy"], False)):
        request.user = User.objects.create(username=str(permissions), is_staff=True)
        request.user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        rows = [one and RatePolicy(subject=f"ip:{one}", rates="blocked") for one in (now, "0.0.0.0/0")]
        for edit in (rows, rows[::-1]):
            found = missing_permission(admin.site, request, *edit)
            assert found == ("You need the permission “Can change rate policy”." if missing else "")
