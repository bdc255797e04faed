"""Five answers to which policies apply, compared with the rules as the documentation tells them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import product
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.utils import timezone
from hypothesis import given

from django_ratequota import check_caller, check_request
from django_ratequota.admin.matrix import Cells
from django_ratequota.models import Endpoint, ListMember, Plan, PlanAssignment, RatePolicy, SubjectList
from django_ratequota.monitoring import attempts
from django_ratequota.monitoring.attempts import Attempts, RecordedAttempts
from django_ratequota.operations.caller_limits import caller_limits
from django_ratequota.operations.explain import explain_caller
from django_ratequota.operations.impact import NotEstimable, estimate
from django_ratequota.policies.requests.caller import DescribedCaller
from django_ratequota.testing import Clock, isolated
from tests.project.views import request_from
from tests.support import oracle
from tests.support.oracle import CLIENTS, Client, Policy, World
from tests.support.properties import examples

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

SCOPES = (None, "search", "export", "unknown")
SETTINGS = {"tenant": "tests.project.views.tenant", "api_key": "tests.project.views.api_key"}


#: Subject, rate, the policy's id, and the day on which months begin.
Counted = tuple[str, str, int, int]


class Rows:
    """A world's rows in the database, and their names there."""

    def __init__(self, world: World, now: datetime) -> None:
        for model in (Endpoint, SubjectList, Plan, PlanAssignment, RatePolicy):
            model.objects.all().delete()
        self.world, self._now = world, now
        self.users = {user.username: user for user in User.objects.all()}
        plans = [Plan(name=name, slug=name, default_for=default) for name, default in world.plans.items()]
        self.plans = {plan.slug: plan for plan in Plan.objects.bulk_create(plans)}
        endpoints = [Endpoint(name=name, limits=limits) for name, limits in world.endpoints.items()]
        self.endpoints = {endpoint.name: endpoint for endpoint in Endpoint.objects.bulk_create(endpoints)}
        lists = SubjectList.objects.bulk_create([SubjectList(name=name) for name in oracle.LISTS])
        self.lists = {one.name: one for one in lists}
        ListMember.objects.bulk_create(
            [
                ListMember(subject_list=self.lists[row.of], **self._who(row.who, None), **self._dates(row))
                for row in world.members
            ]
        )
        PlanAssignment.objects.bulk_create(
            [
                PlanAssignment(
                    plan=self.plans[row.of], anchor=row.day or None, **self._who(row.who, ""), **self._dates(row)
                )
                for row in world.assignments
            ]
        )
        saved = RatePolicy.objects.bulk_create([self._policy(policy) for policy in world.policies])
        self.policies = dict(zip(world.policies, saved, strict=True))
        self.ids = {saved.pk: policy for policy, saved in self.policies.items()}

    def _dates(self, row: oracle.Dated) -> dict[str, Any]:
        times = {"starts_at": row.starts, "ends_at": row.ends}
        return {name: at if at is None else self._now + timedelta(hours=at) for name, at in times.items()}

    def _who(self, who: str, nobody: str | None) -> dict[str, Any]:
        kind, _colon, value = who.partition(":")
        return {"user": self.users[value]} if kind == "user" else {"subject": who or nobody}

    def _policy(self, policy: Policy) -> RatePolicy:
        name = policy.audience.partition(":")[2]
        if policy.kind == "list":
            audience: dict[str, Any] = {"subject_list": self.lists[name]}
        else:
            audience = {"plan": self.plans[name]} if policy.kind == "plan" else self._who(policy.audience, "")
        return RatePolicy(
            endpoint=self.endpoints.get(policy.endpoint or ""),
            counted_per=policy.counted_per,
            rates=policy.rates,
            mode=policy.mode,
            durable=False,
            **audience,
            **self._dates(policy),
        )

    def counted(self, client: Client, winners: dict[Policy, str], *modes: str, at: float = 0) -> set[Counted]:
        """The counters of the client's winners in one of these modes."""
        found = set()
        for policy, subject in winners.items():
            if "/" in policy.rates and policy.mode in modes:
                monthly = policy.rates.endswith("/month")
                day = self.world.month_day(subject, client, at) if monthly else 1
                found.add((self.subject(subject), policy.rates, self.policies[policy].pk, day))
        return found

    def subject(self, subject: str) -> str:
        """As keys name it: users and plans by their primary keys."""
        kind, _colon, name = subject.partition(":")
        row = {"user": self.users, "plan": self.plans}.get(kind, {}).get(name)
        return subject if row is None else f"{kind}:{row.pk}"


def blocks(winners: dict[Policy, str]) -> Counter[str]:
    refusing = [one for one in winners if one.rates == "blocked" and one.mode == "enforce"]
    return Counter(f"{one.endpoint or 'all'}/blocked" for one in refusing)


def counters(buckets: Any) -> set[Counted]:
    return {(bucket.subject, str(bucket.rate), bucket.policy_id, bucket.anchor) for bucket in buckets}


def described(client: Client, rows: Rows) -> DescribedCaller:
    user_id = None if client.user is None else str(rows.users[client.user].pk)
    identifiers, slug = dict(client.identifiers), rows.world.slug(client)
    return DescribedCaller(user_id=user_id, address=client.address, identifiers=identifiers, plan_slug=slug)


def check_decisions(rows: Rows, client: Client, scope: str | None, winners: dict[Policy, str], at: float = 0) -> None:
    named, slug = dict(client.identifiers), rows.world.slug(client)
    user = rows.users.get(client.user or "")
    key = {"X-Api-Key": named["api_key"]} if "api_key" in named else {}
    request = request_from(user, client.address or "", key, tenant=named.get("tenant"), plan=slug)
    for decision in (
        check_request(request, scope=scope),
        check_caller(user=user, ip=client.address, identifiers=named, plan=slug, scope=scope),
    ):
        assert Counter(decision.blocked_by) == blocks(winners)
        assert decision.allowed is not bool(blocks(winners))
        if decision.allowed:
            expected = rows.counted(client, winners, "enforce", "log", at=at)
            assert counters(status.bucket for status in decision.statuses) == expected


def check_explain(rows: Rows, client: Client, scope: str | None, winners: dict[Policy, str]) -> None:
    found = explain_caller(described(client, rows), scope=scope)
    assert {rows.ids[one.policy.id] for one in found.candidates if one.won} == set(winners)
    assert counters(found.resolution.buckets) == rows.counted(client, winners, "enforce", "log")
    told = [policy for policy in rows.world.policies if policy.endpoint in (None, scope)]
    told = [policy for policy in told if policy.kind != "user" or policy.audience == f"user:{client.user}"]
    assert len(found.candidates) + sum(found.others.values()) == len(told)


def shown(winners: dict[Policy, str]) -> dict[Policy, str]:
    """Those that customers are shown: of addresses, only an anonymous caller's own."""
    return {one: of for one, of in winners.items() if not of.startswith("ip:") or one.counted_per == "caller"}


def check_usage(rows: Rows, client: Client) -> None:
    everywhere: dict[Policy, str] = {}
    for scope, limits in rows.world.endpoints.items():
        winners = rows.world.winners(client, scope)
        found = caller_limits(described(client, rows), scope)
        assert counters(bucket for bucket, _status in found.limits) == rows.counted(client, shown(winners), "enforce")
        assert Counter(found.blocked_by) == blocks(winners)
        everywhere |= {} if limits == "none" else winners
    found = caller_limits(described(client, rows))
    everywhere |= rows.world.winners(client, None)
    assert counters(bucket for bucket, _status in found.limits) == rows.counted(client, shown(everywhere), "enforce")
    assert Counter(found.blocked_by) == blocks(everywhere)


def check_matrix(rows: Rows, operator: User) -> None:
    shared = tuple(policy for policy in rows.world.policies if policy.kind in ("", "plan"))
    world = replace(rows.world, policies=shared, plans=dict.fromkeys(rows.world.plans, ""), assignments=())
    anybody = Client(identifiers=(("tenant", "any"), ("api_key", "any")))
    cells = Cells(admin.site, operator, [None, *rows.endpoints.values()], list(rows.plans.values()))
    for scope in (None, *rows.endpoints):
        for plan, cell in zip((None, *rows.plans), cells.row(rows.endpoints.get(scope or "")), strict=True):
            winners = [one for one in world.winners(anybody, scope, plan=plan) if one.endpoint == scope]
            in_force = [(one["rates"], one["inherited"]) for one in cell["in_force"]]
            assert sorted(in_force) == sorted((one.rates, plan is not None and not one.kind) for one in winners)


def check_impact(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimate each policy from one request of each client at each endpoint."""
    world = rows.world
    requests = [(client, scope) for client in CLIENTS for scope in (None, *rows.endpoints)]
    records = tuple(record_of(rows, client, scope) for client, scope in requests)

    def usage(hours: int, endpoint_id: int | None) -> RecordedAttempts:
        here = tuple(one for one in records if endpoint_id is None or endpoint_id in one.endpoint_ids)
        return RecordedAttempts(attempts=here, share=1.0, since=timezone.now())

    monkeypatch.setattr(attempts, "recorded_attempts", usage)
    for policy, saved in rows.policies.items():
        try:
            found = estimate(saved)
        except NotEstimable:
            continue
        own = as_if_enforced(policy)
        stay = (one for one in world.policies if policy.mode != "log" or place_of(one) != place_of(policy))
        asked = replace(world, policies=(*(one for one in stay if one is not policy), own))
        if not found.unknown_policies:
            assert found.requests == sum(own in asked.winners(client, scope) for client, scope in requests)


def place_of(policy: Policy) -> tuple[object, ...]:
    """What a log-only policy and the one that it is to replace have in common."""
    return policy.endpoint, policy.audience, policy.counted_per, policy.starts, policy.ends


def as_if_enforced(policy: Policy) -> Policy:
    starts = None if policy.starts is None else min(policy.starts, 0)
    ends = None if policy.ends is None else max(policy.ends, 1)
    return replace(policy, mode="enforce", starts=starts, ends=ends)


def record_of(rows: Rows, client: Client, scope: str | None) -> Attempts:
    plan = rows.world.plan_of(client, 0)
    return Attempts(
        second=round(timezone.now().timestamp()),
        caller=rows.subject(rows.world.subject("caller", client, plan) or ""),
        ip="" if client.address is None else f"ip:{client.value('ip')}",
        plan_id=rows.plans[plan].pk if plan else None,
        endpoint_ids=(rows.endpoints[scope].pk,) if scope else (),
        cost=1,
        admitted=1,
        refused=0,
    )


@given(oracle.worlds())
@examples(200)
def test_every_answer_is_the_documented_one(settings: Any, monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    resolver = "tests.project.views.named_plan" if any(world.slugs) else ""
    changed = {"IDENTIFIERS": SETTINGS, "CALLER": list(world.caller), "PLAN_RESOLVER": resolver}
    settings.RATEQUOTA = {**settings.RATEQUOTA, **changed}
    for name in ("operator", *oracle.USERS):
        User.objects.get_or_create(username=name, defaults={"is_superuser": True, "is_staff": True})
    operator = User.objects.get(username="operator")
    now = timezone.now()
    rows = Rows(world, now)
    clock = Clock(now)
    with isolated(clock=clock):
        check_matrix(rows, operator)
        check_impact(rows, monkeypatch)
        for client, scope in product(CLIENTS, SCOPES):
            winners = world.winners(client, scope)
            check_decisions(rows, client, scope, winners)
            check_explain(rows, client, scope, winners)
        for client in CLIENTS:
            check_usage(rows, client)
        # What was remembered of the time before is not found.
        clock.advance(2 * 3600)
        for client, scope in product(CLIENTS, SCOPES):
            check_decisions(rows, client, scope, world.winners(client, scope, 2), 2)
