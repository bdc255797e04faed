"""Every permission of the app, alone and in pairs, against every POST of the admin: no row changes without its own.

A superuser opens the forms, so that each operator sends them whole, with their signed values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_network
from itertools import combinations
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.contrib.messages.storage import default_storage
from django.core.exceptions import PermissionDenied
from django.db import connection, transaction
from django.http import Http404
from django.test import RequestFactory
from django.urls import ResolverMatch, resolve
from django.utils import timezone

from django_ratequota.models import (
    Endpoint,
    ListMember,
    Plan,
    PlanAssignment,
    PolicyChange,
    RatePolicy,
    SubjectList,
)
from tests.support.operators import client_of, seen_in
from tests.support.pages import form_of
from tests.support.requests import check_from

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("fresh_policies")]

TABLES: tuple[Any, ...] = (Plan, Endpoint, SubjectList, RatePolicy, PlanAssignment, ListMember)
POLICIES = "/admin/django_ratequota/ratepolicy/"
#: Pairs that are needed together for a page, or of which one may bring rows of the other along.
PAIRS = [
    *((f"view_{model._meta.model_name}", f"delete_{model._meta.model_name}") for model in TABLES),
    ("view_plan", "add_plan"),
    ("view_plan", "add_planassignment"),
    *(
        ("view_policychange", other)
        for other in (
            *("grant_override", "block_callers", "reset_usage", "add_ratepolicy", "change_ratepolicy"),
            *("delete_ratepolicy", "delete_planassignment", "add_listmember", "change_listmember", "change_plan"),
        )
    ),
    *(("delete_endpoint", other) for other in ("delete_ratepolicy", "grant_override")),
    *(("delete_subjectlist", other) for other in ("delete_ratepolicy", "delete_listmember")),
    *(("delete_plan", other) for other in ("delete_ratepolicy", "delete_planassignment")),
    *(("delete_user", other) for other in ("grant_override", "delete_planassignment", "delete_listmember")),
    ("delete_ratepolicy", "change_ratepolicy"),
    ("grant_override", "change_ratepolicy"),
    ("grant_override", "block_callers"),
    ("grant_override", "change_listmember"),
    ("add_listmember", "change_listmember"),
]
#: The pages that change rows; a POST to any other changes none.
WRITING = {
    *(f"{model._meta.model_name}_{verb}" for model in TABLES for verb in ("add", "change", "delete", "changelist")),
    *("ratepolicy_block", "ratepolicy_boost", "ratepolicy_counters", "ratepolicy_roll_out", "policychange_revert"),
    *("plan_copy", "plan_assign", "subjectlist_add_members", "subjectlist_remove_members"),
    *("auth_user_delete", "auth_user_changelist"),
}

#: Kind and key of a row -> its columns.
State = dict[tuple[str, Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Post:
    path: str
    body: str
    view: ResolverMatch = field(repr=False)

    @property
    def page(self) -> str:
        """The name of the page, such as ``ratepolicy_change``."""
        return str(self.view.url_name).removeprefix("django_ratequota_")


# --- The rows, and what is sent about them. ---


class World:
    """Rows of each kind, and the requests that would change them."""

    def __init__(self) -> None:
        past = timezone.now() - timedelta(days=2)
        self.root = client_of(superuser=True, name="root")
        self.forms: dict[str, dict[str, str]] = {}
        self.alice, self.bob = (User.objects.create(username=name) for name in ("alice", "bob"))
        self.free, self.pro = (Plan.objects.create(name=name, slug=name.lower()) for name in ("Free", "Pro"))
        self.search, self.reports = (Endpoint.objects.create(name=name) for name in ("search", "reports"))
        self.bots, self.friends = (SubjectList.objects.create(name=name) for name in ("Bots", "Friends"))
        audiences: list[dict[str, Any]] = [{"plan": self.free}, {"user": self.alice}]
        for audience in audiences:
            for mode in ("enforce", "log"):
                RatePolicy.objects.create(**audience, endpoint=self.search, rates="10/hour", mode=mode)
        RatePolicy.objects.create(subject="ip:0.0.0.0/0", endpoint=self.reports, rates="1000/min")
        RatePolicy.objects.create(subject="ip:0.0.0.0/0", rates="blocked", mode="log")
        for audience in ({"subject_list": self.bots}, {"subject": "ip:203.0.113.9"}, {"subject": "ip:2000::/3"}):
            RatePolicy.objects.create(**audience, rates="blocked", starts_at=past)
        PlanAssignment.objects.create(user=self.alice, plan=self.free)
        for audience in ({"user": self.alice}, {"subject": "ip:203.0.113.8"}, {"subject": "ip:128.0.0.0/1"}):
            ListMember.objects.create(**audience, subject_list=self.friends, ends_at=past)
        # For the history: a change of each row, and deletions.
        for model in TABLES:
            for row in model.objects.all():
                setattr(row, "reason" if hasattr(row, "reason") else "description", "changed")
                row.save()
        RatePolicy.objects.create(subject="ip:4000::/3", rates="blocked", starts_at=past).delete()
        ListMember.objects.create(subject_list=self.bots, subject="ip:0.0.0.0/1").delete()
        Plan.objects.create(name="Old", slug="old").delete()

    def posts(self) -> Iterator[Post]:
        """Yield a POST to each page, of each row; to forms one for each edit."""
        for model in (*TABLES, PolicyChange, User):
            own = admin.site.get_model_admin(model)
            base = f"/admin/{model._meta.app_label}/{model._meta.model_name}/"
            for added in self._added(model):
                yield self._form(f"{base}add/", added)
            rows = self._rows(model)
            for row in rows if model is not PolicyChange else rows[:1]:
                yield _post(f"{base}{row.pk}/delete/", post="yes")
                yield _post(base, action="delete_selected", _selected_action=row.pk, post="yes")
                for edit in self._edits(row):
                    yield self._form(f"{base}{row.pk}/change/", edit)
            for page in getattr(own, "own_pages", ()):
                of_rows = rows if "object_id" in page.path else [None]
                for row in of_rows if page.name != "change" else rows[:1]:
                    yield from self._asked(page.name, base + (page.path or f"{page.name}/"), row)
        rows_of_list = form_of(self.root.get(POLICIES))
        for number in range(RatePolicy.objects.count()):
            row = {name: value for name, value in rows_of_list.items() if name.startswith(f"form-{number}-")}
            mode = "log" if row[f"form-{number}-mode"] == "enforce" else "enforce"
            alone = {name.replace(f"-{number}-", "-0-"): value for name, value in row.items()}
            totals = {"form-TOTAL_FORMS": 1, "form-INITIAL_FORMS": 1, "_save": "1"}
            yield _post(POLICIES, **{**alone, "form-0-mode": mode, **totals})

    def _rows(self, model: Any) -> list[Any]:
        """Return the model's rows; of the history, the changes of one row of each kind, and of wide networks."""
        if model is User:
            return [self.alice]
        if model is not PolicyChange:
            return list(model.objects.all())
        changes = {}
        for change in PolicyChange.objects.order_by("pk"):
            subject = (change.before or change.after).get("subject") or ""
            changes[change.model, change.action, "::/3" in subject or "0.0.0/" in subject] = change
        return list(changes.values())

    def _form(self, path: str, edit: dict[str, Any]) -> Post:
        if path not in self.forms:
            self.forms[path] = form_of(self.root.get(path))
        return _post(path, **{**self.forms[path], **edit})

    def _asked(self, name: str, path: str, row: Any) -> Iterator[Post]:
        """Yield the POSTs to a page of ours, about the row where it is about one."""
        temporary = {"until": "day", "reason": "x"}
        data: list[dict[str, Any]] = {
            "copy": [{"name": "Copy", "slug": "copy", "factor": "2"}],
            "assign": [{"text": "bob"}],
            "add_members": [{"text": "198.51.100.8"}, {"text": "alice"}, {"text": "128.0.0.0/1"}],
            "remove_members": [{"text": "alice\n203.0.113.8"}, {"text": "128.0.0.0/1"}],
        }.get(name, [{}])
        paths = [path.replace("<uuid:change_id>", str(PolicyChange.objects.latest("pk").change_id))]
        if row is not None:
            kinds = ("save", "object") if getattr(row, "before", None) else ("save",)
            path = path.replace("<path:object_id>", str(row.pk))
            paths = [path.replace("<str:what>", what) for what in kinds]
        if name == "block":
            for caller in ("ip:203.0.113.7", "ip:203.0.113.9", "ip:64.0.0.0/2", "ip:2000::/3"):
                for sent in ({"target": caller, **temporary}, {"end": caller}):
                    yield _post(f"{path}?caller={caller}", **sent)
        query = f"?user={self.alice.pk}&endpoint=search"
        if name == "boost":
            policy = RatePolicy.objects.get(user=self.alice, mode="enforce").pk
            yield _post(f"{path}{query}&policy={policy}", **{f"{policy}-rates": "50/hour", **temporary})
        if name == "counters":
            yield _post(f"{path}{query}&bucket=search/hour", reason="x")
        for one in paths:
            seen = seen_in(self.root.get(one)) if row is not None else {}
            yield from (_post(one, **sent, **seen) for sent in data)

    def _audiences(self) -> list[dict[str, Any]]:
        nobody = dict.fromkeys(("plan", "user", "subject", "subject_list"), "")
        chosen: list[dict[str, Any]] = [{"plan": self.pro.pk}, {"user": self.bob.pk}]
        chosen += [{"subject": "ip:198.51.100.7"}, {"subject": "ip:64.0.0.0/2"}]
        return [{**nobody, **one} for one in chosen]

    def _members(self) -> list[dict[str, Any]]:
        return [{name: one[name] for name in ("user", "subject")} for one in self._audiences() if not one["plan"]]

    def _added(self, model: Any) -> list[dict[str, Any]]:
        """Return what the form for a new row is filled in with."""
        if model is RatePolicy:
            return [{"rates": "9/s", **audience} for audience in self._audiences()]
        if model is ListMember:
            return [{"subject_list": self.bots.pk, **member} for member in self._members()]
        if model is PlanAssignment:
            return [{"user": self.bob.pk, "plan": self.pro.pk}]
        return [{"name": "New", "slug": "new"}] if model in TABLES else []

    def _edits(self, row: Any) -> list[dict[str, Any]]:
        """Return what the form of the row is changed to."""
        forever = {"ends_at_0": "", "ends_at_1": ""}
        if isinstance(row, RatePolicy):
            block = {"rates": "blocked", "mode": "enforce", "endpoint": "", **forever}
            return [{"rates": "7/min"}, block, *(self._audiences() if row.mode == "enforce" else ())]
        if isinstance(row, ListMember):
            return [forever, {"subject_list": self.bots.pk}, *self._members()]
        if isinstance(row, PlanAssignment):
            return [{"plan": self.pro.pk}]
        if row not in (self.free, self.search, self.bots):  # those that have policies
            return []
        added = {"rates": "9/s", "counted_per": "ip", "algorithm": "gcra", "mode": "enforce"}
        table = {"policies-TOTAL_FORMS": 9, **{f"policies-8-{name}": value for name, value in added.items()}}
        return [{"description": "after"}, {"policies-0-rates": "7/min"}, {"policies-0-DELETE": "on"}, table]


def _post(path: str, **data: Any) -> Post:
    return Post(path, urlencode(data), resolve(path.partition("?")[0]))


# --- What changed, and what that needs. ---


class Desk:
    """Sends the POSTs as any operator, and takes back what they change."""

    def __init__(self, world: World) -> None:
        posts, self.alice = list(world.posts()), world.alice
        self.before = self.state()
        self.wrote = False
        self._refill()
        root = User.objects.get(username="root")
        #: POST -> the permissions that all of it needs.
        self.posts = {post: self._needed(root, post) for post in posts}

    def leaks(self, operators: Iterable[tuple[str, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yield each POST that changes a row for which its operator lacks a permission.

        Operators with several try only those that need one of these, and another.
        """
        for codenames in operators:
            user = User.objects.create(username=" ".join(codenames), is_staff=True)
            user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
            self._refill()
            held = {*codenames}
            for post, needs in self.posts.items():
                tried = needs - held and (len(held) < 2 or needs & held)
                if tried and (lacks := self._needed(user, post) - held):
                    yield codenames, lacks, post

    def state(self) -> State:
        """Return all rows, and the records of counters that were changed."""
        tables = [(model._meta.model_name, model.objects.values()) for model in TABLES]
        tables.append(("counter", PolicyChange.objects.filter(model="counter").values("id")))
        return {(name, row["id"]): row for name, rows in tables for row in rows}

    def _needed(self, user: User, post: Post) -> set[str]:
        """Return the permissions that are needed for what the POST of this user changes."""
        after = self._after(user, post)
        rows = [(key[0], self.before.get(key), after.get(key)) for key in self.before.keys() | after.keys()]
        return {name for kind, *row in rows if row[0] != row[1] for name in needed(post.page, kind, *row)}

    def _after(self, user: User, post: Post) -> State:
        """Return the rows after the POST of this user, which is taken back."""
        view = post.view
        sent: Any = RequestFactory().post(post.path, post.body, content_type="application/x-www-form-urlencoded")
        sent.user, sent.session, sent.resolver_match, sent._dont_enforce_csrf_checks = user, {}, view, True
        sent._messages = default_storage(sent)
        self.wrote = False
        with transaction.atomic(), connection.execute_wrapper(self._note):
            with suppress(PermissionDenied, Http404):
                view.func(sent, *view.args, **view.kwargs)
            after = self.state() if self.wrote else self.before
            transaction.set_rollback(True)
        return after

    def _note(self, execute: Any, sql: str, *args: Any) -> Any:
        written = re.match(r'(?:INSERT INTO|UPDATE|DELETE FROM) ["`]django_ratequota_(\w+)', sql)
        self.wrote = self.wrote or bool(written and written[1] != "savelock")
        return execute(sql, *args)

    def _refill(self) -> None:
        """Leave something to refund."""
        check_from(self.alice, scope="search")


def needed(page: str, kind: str, before: Any, after: Any) -> set[str]:
    """Return the permissions that the change of a row needs."""
    if kind == "counter":
        return {"reset_usage"}
    verb = "add" if before is None else "delete" if after is None else "change"
    found = set()
    for row in filter(None, (before, after)):
        subject = row.get("subject") or ""
        override = kind == "ratepolicy" and (subject or row["user_id"])
        found.add("grant_override" if override else f"{verb}_{kind}")
        network = ip_network(subject[3:]) if subject.startswith("ip:") else None
        if network and network.prefixlen < {4: 16, 6: 32}[network.version]:
            found.add("change_ratepolicy")
    blocks = page == "ratepolicy_block" and after and after["rates"] == "blocked"
    if blocks and (before is None or {**before, "ends_at": after["ends_at"]} == after):
        found = {"block_callers" if name == "grant_override" else name for name in found}
    return found


@pytest.fixture
def desk() -> Desk:
    return Desk(World())


def names() -> list[str]:
    """Return the permissions of the app."""
    known = Permission.objects.filter(content_type__app_label="django_ratequota")
    return list(known.values_list("codename", flat=True))


def test_a_post_without_its_permission(desk: Desk) -> None:
    assert {post.page for post, needs in desk.posts.items() if needs} == WRITING
    assert list(desk.leaks([(), *((name,) for name in names()), *PAIRS])) == []


@pytest.mark.thorough
def test_no_pair_of_permissions_is_more_than_both(desk: Desk) -> None:
    assert list(desk.leaks(combinations([*names(), "delete_user"], 2))) == []
