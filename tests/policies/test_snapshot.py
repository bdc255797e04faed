"""A change of some rows is applied to the snapshot by reading these rows: exactly, and sharing all else."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_ratequota.changes.writer import write_publication
from django_ratequota.models import (
    Endpoint,
    ListMember,
    Plan,
    PlanAssignment,
    PolicyChange,
    RatePolicy,
    SubjectList,
)
from django_ratequota.policies import cache as module
from django_ratequota.policies import loading, resolve_for
from django_ratequota.policies.audience_index import Group
from django_ratequota.policies.cache import PolicyCache
from django_ratequota.policies.facts import Assigned, UserEntry
from django_ratequota.policies.loading import load_snapshot
from django_ratequota.policies.matching import Where, match_endpoints
from django_ratequota.policies.requests.caller import DescribedCaller
from django_ratequota.policies.resolver import EvaluationContext, match_policies, resolve, resolve_uncached
from django_ratequota.policies.snapshot import Snapshot
from django_ratequota.runtime import default_limiter, process
from tests.faults import poll
from tests.policies.test_cache import newest, queries, rows_read
from tests.support.properties import thorough_after

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

SUBJECTS = ("tenant:acme", "tenant:globex", "key:k1", "ip:203.0.113.7", "ip:203.0.113.0/24", "ip:2001:db8::/64")
ENDPOINTS, PLANS, USERS = ("search", "export", "upload"), ("free", "pro", "trial"), ("alice", "bob", "carol")


@pytest.fixture
def policies() -> PolicyCache:
    return PolicyCache()


@pytest.fixture(autouse=True)
def identifiers(settings: Any) -> None:
    settings.RATEQUOTA = {
        **settings.RATEQUOTA,
        "IDENTIFIERS": {"tenant": "tests.project.views.tenant", "key": "tests.project.views.tenant"},
    }


def picture(snapshot: Snapshot) -> Any:
    groups = {
        (endpoint_id, per): shape(group)
        for endpoint_id, rivals in snapshot.groups.items()
        for per, group in rivals.items()
    }
    endpoints = {pk: astuple(endpoint) for pk, endpoint in snapshot.endpoints.items()}
    outline = (snapshot.names, snapshot.methods, snapshot.by_outcome)
    assert all(snapshot.groups.values()), "an endpoint without policies has no groups"
    lists = snapshot.lists, sorted(map(astuple, snapshot.members)), snapshot.members.kinds_of(snapshot.lists)
    return snapshot.plans, snapshot.defaults, endpoints, groups, outline, lists


def shape(group: Group) -> Any:
    found = {policy.key: sorted(one.id for one in group.at(policy.key)) for policy in group if policy.key}
    return dict(group.by_id), found, group.traits


def answers(
    snapshot: Snapshot,
    own: Callable[[DescribedCaller], tuple[UserEntry, Assigned]],
    how: Callable[[EvaluationContext], Any],
) -> list[Any]:
    """What applies to some callers at every endpoint, by day."""
    found = []
    users = [None, *map(str, User.objects.order_by("pk").values_list("pk", flat=True))]
    now_us = round(timezone.now().timestamp()) * 10**6
    callers = [
        *(DescribedCaller(user_id=user, address="203.0.113.7") for user in users),
        DescribedCaller(user_id=None, address="2001:db8::1", identifiers={"tenant": "acme"}),
        DescribedCaller(user_id=None, address="198.51.100.1", identifiers={"tenant": "globex", "key": "k1"}),
    ]
    for caller in callers:
        entry, assigned = own(caller)
        for scope, route in ((None, "/a/"), ("search", "/b/"), ("export", None), ("found", "/a/x")):
            endpoints = match_endpoints(snapshot, Where(scope=scope, route=route, name=None, method="GET"))
            for day in (-3, 0, 3):
                context = EvaluationContext(
                    caller=caller,
                    entry=entry,
                    endpoints=endpoints,
                    scope=scope,
                    snapshot=snapshot,
                    now_us=now_us + day * 86_400 * 10**6,
                    assigned=assigned,
                )
                one = how(context)
                buckets = sorted((b.subject, str(b.rate), b.scope, b.policy_id, b.mode) for b in one.buckets)
                plan = one.plan, one.assigned_to
                found.append((buckets, sorted(one.blocked_by), plan, sorted(one.policy_ids), one.cost))
    return found


def own_of(policies: PolicyCache) -> Callable[[DescribedCaller], tuple[UserEntry, Assigned]]:
    """What belongs to a caller, by this cache."""

    def find(caller: DescribedCaller) -> tuple[UserEntry, Assigned]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process, "policies", policies)
            return resolve_for.own_of([caller])[0]

    return find


class Editing:
    """Random edits by every means that an application has."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.users = [User.objects.create(username=name) for name in USERS]
        self.serial = 0

    def step(self) -> None:
        edits = [self.create, self.create, self.edit, self.edit, self.move, self.delete, self.in_bulk, self.endpoint]
        edits += [self.plan, self.assign, self.describe, self.roll_back, self.by_hand, self.list, self.list_members]
        with suppress(IntegrityError), transaction.atomic():
            self.random.choice(edits)()

    def one(self, model: Any) -> Any:
        rows = list(model.objects.order_by("pk"))
        return self.random.choice(rows) if rows else None

    def audience(self) -> dict[str, Any]:
        user, subject, plan, subject_list = None, "", None, None
        match self.random.randrange(6):
            case 0:
                user = self.random.choice(self.users)
            case 1 | 2:
                subject = self.random.choice(SUBJECTS)
            case 3:
                plan = self.one(Plan)
            case 4:
                subject_list = self.one(SubjectList)
        return {"user": user, "subject": subject, "plan": plan, "subject_list": subject_list}

    def fields(self) -> dict[str, Any]:
        now = timezone.now()
        days = [None, *(now + timedelta(days=day, seconds=self.serial) for day in (-5, -2, 2, 5))]
        self.serial += 1
        return {
            **self.audience(),
            "endpoint": self.random.choice([None, self.one(Endpoint)]),
            "counted_per": self.random.choice(["caller", "ip", "everyone", "tenant"]),
            "rates": self.random.choice(["5/hour", "1/s, 9/day", "unlimited", "blocked"]),
            "mode": self.random.choice(["enforce", "enforce", "log", "off"]),
            "starts_at": self.random.choice(days),
            "ends_at": self.random.choice(days),
        }

    def create(self) -> None:
        RatePolicy.objects.create(**self.fields())

    def edit(self) -> None:
        policy = self.one(RatePolicy)
        if policy is not None:
            changed = {name: value for name, value in self.fields().items() if self.random.random() < 0.4}
            audience = self.audience() if changed.keys() & {"user", "subject", "plan", "subject_list"} else {}
            for name, value in {**changed, **audience}.items():
                setattr(policy, name, value)
            policy.save()

    def move(self) -> None:
        policies = RatePolicy.objects.filter(counted_per=self.random.choice(["caller", "ip"]))
        if self.random.random() < 0.5:
            policies.update(**self.audience())
        else:
            policies.update(endpoint=self.one(Endpoint), mode=self.random.choice(["enforce", "off"]))

    def delete(self) -> None:
        policy = self.one(RatePolicy)
        if policy is not None:
            policy.delete() if self.random.random() < 0.5 else RatePolicy.objects.filter(pk=policy.pk).delete()

    def in_bulk(self) -> None:
        if self.random.random() < 0.5:
            RatePolicy.objects.bulk_create([RatePolicy(**self.fields()) for _ in range(3)])
        else:
            some = list(RatePolicy.objects.order_by("pk")[:3])
            for policy in some:
                policy.rates, policy.counted_per = "7/min", self.random.choice(["caller", "everyone"])
            RatePolicy.objects.bulk_update(some, ["rates", "counted_per"])

    def endpoint(self) -> None:
        endpoint = self.one(Endpoint)
        if endpoint is None or self.random.random() < 0.4:
            Endpoint.objects.create(name=self.random.choice(ENDPOINTS), routes="/a/*", cost=2)
        elif self.random.random() < 0.3:
            endpoint.delete()
        else:
            endpoint.name = self.random.choice([endpoint.name, "found"])
            endpoint.routes = self.random.choice(["/a/*", "/b/*", ""])
            endpoint.charged_statuses = self.random.choice(["", "401"])
            endpoint.save()

    def plan(self) -> None:
        plan, slug = self.one(Plan), self.random.choice(PLANS)
        if plan is None or self.random.random() < 0.4:
            Plan.objects.create(name=slug, slug=slug)
        elif self.random.random() < 0.3:
            plan.delete()
        else:
            Plan.objects.update(default_for="")
            Plan.objects.filter(pk=plan.pk).update(default_for=self.random.choice(["", "authenticated", "anonymous"]))

    def assign(self) -> None:
        assignment, plan = self.one(PlanAssignment), self.one(Plan)
        who: dict[str, Any] = {"user": None, "subject": self.random.choice(SUBJECTS[:3])}
        if self.random.random() < 0.5:
            who = {"user": self.random.choice(self.users), "subject": None}
        if assignment is not None and self.random.random() < 0.6:
            assignment.user, assignment.subject, assignment.reason = who["user"], who["subject"], "moved"
            assignment.save()
        elif plan is not None:
            PlanAssignment.objects.create(**who, plan=plan, starts_at=timezone.now() - timedelta(days=1))

    def list(self) -> None:
        subject_list = self.one(SubjectList)
        if subject_list is None or self.random.random() < 0.5:
            SubjectList.objects.create(name=f"list {self.serial}")
        elif self.random.random() < 0.3:
            subject_list.delete()
        else:
            subject_list.name = f"renamed {self.serial}"
            subject_list.save()

    def list_members(self) -> None:
        members = ListMember.objects.order_by("pk")
        if self.random.random() < 0.2:
            members.filter(pk__in=[member.pk for member in members[:2]]).delete()
        elif self.random.random() < 0.4:
            members.update(subject_list=self.one(SubjectList), starts_at=self.fields()["starts_at"])
        else:
            for subject in (*SUBJECTS, None):
                user = None if subject else self.random.choice(self.users)
                if self.random.random() < 0.3:
                    fields = {"user": user, "subject": subject, "ends_at": self.fields()["ends_at"]}
                    ListMember.objects.create(subject_list=self.one(SubjectList), **fields)

    def describe(self) -> None:
        Plan.objects.update(description=str(self.serial))
        RatePolicy.objects.update(reason=str(self.serial))

    def roll_back(self) -> None:
        with suppress(InterruptedError), transaction.atomic():
            self.create()
            self.edit()
            raise InterruptedError

    def by_hand(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("UPDATE django_ratequota_ratepolicy SET rates = '3/s' WHERE rates = '5/hour'")
        write_publication("raw SQL")


@pytest.mark.slow
@pytest.mark.parametrize("seed", thorough_after(2, range(12)))
def test_changed_rows_make_the_snapshot_that_loading_makes(policies: PolicyCache, seed: int) -> None:
    editing = Editing(seed)
    policies.reload(newest())
    held: list[PolicyChange] = []
    for _ in range(40):
        first = PolicyChange.objects.order_by("pk").values_list("pk", flat=True).last() or 0
        editing.step()
        if editing.random.random() < 0.3:  # committed late: seen after rows with higher ids
            late = PolicyChange.objects.filter(pk__gt=first)
            held += late
            late.delete()
        if editing.random.random() < 0.5:
            policies.reload(default_limiter().publish())
            continue
        PolicyChange.objects.bulk_create(held)
        held.clear()
        snapshot = policies.reload(default_limiter().publish())
        loaded = load_snapshot(snapshot.revision)
        assert picture(snapshot) == picture(loaded)
        assert answers(snapshot, own_of(policies), resolve) == answers(
            loaded, own_of(PolicyCache()), resolve_uncached
        )


def subjects(number: int) -> None:
    made = [
        RatePolicy(subject=f"tenant:t{n}" if n % 2 else f"ip:10.0.{n // 256}.{n % 256}", rates="5/s")
        for n in range(number)
    ]
    RatePolicy.objects.bulk_create(made)


@pytest.mark.parametrize("rows", [1, 7, 60])
def test_a_change_of_some_rows_reads_these_rows(policies: PolicyCache, rows: int) -> None:
    subjects(300)
    policies.reload(newest())
    pks = list(RatePolicy.objects.order_by("pk").values_list("pk", flat=True)[:rows])
    RatePolicy.objects.filter(pk__in=pks).update(rates="6/s")
    with CaptureQueriesContext(connection) as captured:
        snapshot = policies.reload(newest())
    assert len(captured) == 2
    assert rows_read(captured) <= 2 * rows + 1, "the changes, and the newest known; and the policies"
    assert sorted(p.id for p in snapshot.groups[None]["caller"] if p.text == "6/s") == pks


def test_rows_are_read_in_batches_that_every_database_takes(policies: PolicyCache) -> None:
    subjects(1100)
    policies.reload(newest())
    RatePolicy.objects.update(rates="6/s")
    assert queries(lambda: policies.reload(newest())) == 1 + 3


def test_more_changes_than_are_worth_it_are_read_at_once(
    policies: PolicyCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FEW", 10)
    subjects(20)
    policies.reload(newest())
    RatePolicy.objects.update(rates="6/s")
    assert queries(lambda: policies.reload(newest())) == 2 + 5 + 2, (
        "the changes and their ids; plans, endpoints, policies, lists, members; whether users have any of their own"
    )
    assert {policy.text for policy in load_snapshot(1).groups[None]["caller"]} == {"6/s"}


def test_what_a_change_does_not_touch_is_shared(policies: PolicyCache) -> None:
    search = Endpoint.objects.create(name="search", routes="/a/*")
    subjects(4)
    RatePolicy.objects.create(endpoint=search, rates="1/s")
    before = policies.reload(newest())
    match_endpoints(before, Where(scope=None, route="/a/b", name=None, method="GET"))
    RatePolicy.objects.filter(subject="tenant:t1").update(rates="6/s")
    after = policies.reload(newest())
    assert (after.plans, after.endpoints) == (before.plans, before.endpoints)
    assert after.groups[search.pk] is before.groups[search.pk]
    assert after.memo.endpoints is before.memo.endpoints
    assert after.memo.resolutions is not before.memo.resolutions
    assert before.groups[None]["caller"].at("tenant:t1")[0].text == "5/s", "the one before is as it was"
    search.routes = "/b/*"
    search.save()
    assert policies.reload(newest()).memo.endpoints is not before.memo.endpoints


def test_rows_with_changed_keys_are_held_under_the_new_ones(policies: PolicyCache) -> None:
    """The history told of a deletion alone: nobody was limited by them."""
    policy = RatePolicy.objects.create(rates="5/s")
    policies.reload(newest())
    RatePolicy.objects.update(id=policy.pk + 1000)
    snapshot = policies.reload(newest())
    assert picture(snapshot) == picture(load_snapshot(snapshot.revision))
    assert [held.id for held in snapshot.groups[None]["caller"]] == [policy.pk + 1000]


@pytest.mark.parametrize(
    "edit",
    [
        lambda: Plan.objects.update(description="x"),
        lambda: Endpoint.objects.update(description="x"),
        lambda: RatePolicy.objects.update(reason="x"),
        lambda: PlanAssignment.objects.update(reason="x"),
        lambda: SubjectList.objects.update(description="x"),
        lambda: ListMember.objects.update(reason="x"),
    ],
    ids=["plan", "endpoint", "policy", "assignment", "list", "member"],
)
def test_what_no_request_can_see_makes_no_process_reload(policies: PolicyCache, edit: Callable[[], Any]) -> None:
    alice = User.objects.create(username="alice")
    plan = Plan.objects.create(name="Pro", slug="pro")
    Endpoint.objects.create(name="search")
    RatePolicy.objects.create(rates="1/s")
    RatePolicy.objects.create(user=alice, rates="2/s")
    PlanAssignment.objects.create(user=alice, plan=plan)
    ListMember.objects.create(subject_list=SubjectList.objects.create(name="Partners"), user=alice)
    before = policies.reload(newest())
    entry = policies.load_user(str(alice.pk))
    changes = PolicyChange.objects.count()
    edit()
    assert PolicyChange.objects.count() > changes, "recorded"
    assert newest() == before.revision, "and not published"
    reloads = policies.reloads
    after = policies.reload(default_limiter().publish())
    assert (after.groups, after.memo) == (before.groups, before.memo)
    assert policies.reloads == reloads
    assert policies.user(str(alice.pk)) is entry


def test_what_others_wait_for_is_read_in_one_look(policies: PolicyCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the threads that waited looked by itself, one after the other."""
    RatePolicy.objects.create(rates="1/s")
    policies.reload(newest())
    looks: list[int] = []
    waiting, go_on = threading.Event(), threading.Event()
    update = loading.update_snapshot

    def slowly(*args: Any) -> Any:
        looks.append(1)
        waiting.set()
        assert go_on.wait(timeout=30)
        return update(*args)

    monkeypatch.setattr(loading, "update_snapshot", slowly)

    def ask(revision: int) -> int:
        try:
            return policies.reload(revision).revision
        finally:
            raw = connection.connection
            connection.close()
            if raw is not None and connection.vendor == "sqlite":
                raw.close()

    revisions = [default_limiter().publish() for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(ask, revisions[0])
        assert waiting.wait(timeout=30)
        others = [pool.submit(ask, revision) for revision in revisions[1:]]
        poll(lambda: policies._wanted == revisions[-1], 30, "all of them wait")
        go_on.set()
        assert first.result(30) >= revisions[0]
        assert {other.result(30) for other in others} == {revisions[-1]}
    assert len(looks) == 2


def test_policies_that_ended_long_ago_leave_the_snapshot(
    policies: PolicyCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = timezone.now()
    RatePolicy.objects.create(rates="1/s", starts_at=now + timedelta(days=4))
    for hours in (1, 47):
        RatePolicy.objects.create(rates=f"{hours}/min", ends_at=now + timedelta(hours=hours))
    policies.reload(newest())
    monkeypatch.setattr(timezone, "now", lambda: now + timedelta(days=2))
    monkeypatch.setattr("django_ratequota.policies.cache.TIDY_SECONDS", 0)
    snapshot = policies.reload(default_limiter().publish())
    held = [policy.text for policy in snapshot.groups[None]["caller"]]
    assert held == ["1/s", "47/min"], "what the store's clock may still call active stays"
    assert [policy.text for policy in load_snapshot(1).groups[None]["caller"]] == held


def test_limits_have_one_order_whatever_that_of_the_rows(policies: PolicyCache, alice: User) -> None:
    """PostgreSQL moves a row that it updates, and an edit the policy in each process that knows it already."""
    for kind in ("everyone", "ip", "caller"):
        RatePolicy.objects.create(rates="5/s", counted_per=kind)
    RatePolicy.objects.create(rates="5/s", counted_per="plan", user=alice)
    edited = RatePolicy.objects.get(counted_per="ip")
    for kind in ("tenant", "ip"):
        edited.counted_per = kind
        edited.save()
        snapshot = policies.reload(newest())
        entry = policies.entries([str(alice.pk)])[str(alice.pk)]
        found = [contest.counted_per for contest in match_policies(snapshot, (), None, entry).groups]
        assert found == sorted(["everyone", kind, "caller", "plan"])


def test_a_user_key_too_long_for_its_column_goes_stale_nowhere(
    policies: PolicyCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the key was recorded, which is another user's or nobody's: the override stayed as it was for good."""
    monkeypatch.setattr(PolicyChange._meta.get_field("touched_user"), "max_length", 3)
    alice, bob = User.objects.create(pk=12345, username="alice"), User.objects.create(pk=123, username="bob")
    RatePolicy.objects.create(user=bob, rates="2/s")
    policies.reload(newest())
    for user in (alice, bob):
        policies.load_user(str(user.pk))
    RatePolicy.objects.create(user=alice, rates="1/s")
    assert PolicyChange.objects.latest("pk").touched_user == ""
    policies.reload(newest())
    assert policies.user("12345") is None
    assert policies.user("123") is not None
