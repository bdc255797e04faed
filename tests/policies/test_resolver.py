"""Which policies apply, and why: rows of the database in, buckets and reasons out."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User

from django_ratequota.models import Endpoint, Plan, PlanAssignment, RatePolicy
from django_ratequota.policies.cache import policies
from django_ratequota.policies.facts import NOBODY, Assignment, EndpointFacts, PolicyFacts, UserEntry
from django_ratequota.policies.loading import load_snapshot
from django_ratequota.policies.matching import NO_METHOD, Where, match_endpoints
from django_ratequota.policies.reasons import explain, others_in_words, plan_source
from django_ratequota.policies.requests.caller import DescribedCaller
from django_ratequota.policies.resolver import EvaluationContext, Resolution, resolve, standing_of
from django_ratequota.policies.snapshot import Snapshot, regrouped

# Ahead of the real clock, by which policies that ended long ago are not even loaded.
NOW = datetime(2100, 3, 1, 12, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
ADDRESS = "203.0.113.7"
TENANT = {"tenant": "acme"}
IDENTIFIERS = {"tenant": "tests.project.views.tenant", "api_key": "tests.project.views.api_key"}

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def tenants(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": IDENTIFIERS}


def context(
    user: User | None = None, scope: str | None = None, at: datetime = NOW, **named: Any
) -> EvaluationContext:
    """The question a caller's request poses to the policies as the database holds them."""
    snapshot = load_snapshot(0)
    return EvaluationContext(
        caller=DescribedCaller(user_id=str(user.pk) if user else None, **{"address": ADDRESS, **named}),
        entry=policies.load_user(str(user.pk)) if user else NOBODY,
        endpoints=match_endpoints(snapshot, Where(scope=scope, route=None, name=None, method="GET")),
        scope=scope,
        snapshot=snapshot,
        now_us=round(at.timestamp()) * 10**6,
    )


def limits(resolution: Resolution) -> list[str]:
    return [f"{bucket.subject} {bucket.rate}" for bucket in resolution.buckets]


@pytest.mark.parametrize(
    ("caller", "first", "second"),
    [
        (["user", "api_key", "tenant", "ip"], "api_key", "tenant"),
        (["ip", "tenant", "api_key"], "tenant", "api_key"),
        (["user", "api_key", "ip"], "api_key", "tenant"),
        # none of them named: in the order of IDENTIFIERS
        (["user", "ip"], "tenant", "api_key"),
    ],
)
def test_identifiers_go_by_the_order_of_caller(caller: list[str], first: str, second: str, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": caller}
    values = {"tenant": "acme", "api_key": "k"}
    winner = RatePolicy.objects.create(subject=f"{first}:{values[first]}", rates="7/hour")
    for subject in (f"{second}:{values[second]}", f"ip:{ADDRESS}"):
        RatePolicy.objects.create(subject=subject, starts_at=NOW - HOUR, rates="1/hour")
    asking = context(identifiers=values)
    assert [str(bucket.rate) for bucket in resolve(asking).buckets] == ["7/hour"]
    policy = f"policy {winner.pk} for {first}:{values[first]} comes first"
    assert {c.reason for c in explain(asking)} == {
        f"wins: {first}:{values[first]} is the most specific audience here",
        f"lost: {policy}, because CALLER and IDENTIFIERS list {first} before {second}",
        f"lost: {policy}, because identifiers come before addresses",
    }


def test_an_override_in_a_blocked_network(alice: User) -> None:
    RatePolicy.objects.create(user=alice, rates="1000/min")
    block = RatePolicy.objects.create(subject="ip:203.0.113.0/24", rates="blocked")
    narrow = RatePolicy.objects.create(subject=f"ip:{ADDRESS}", rates="9/min")
    assert [c.reason for c in explain(context(alice))] == [
        f"lost: policy {block.pk} blocks ip:203.0.113.0/24, which takes precedence over all other policies",
        f"lost: policy {block.pk} blocks ip:203.0.113.0/24, which takes precedence over all other policies",
        "wins: a block of ip:203.0.113.0/24 takes precedence over all other policies",
    ]
    RatePolicy.objects.filter(pk=narrow.pk).update(rates="blocked")
    assert [c.reason for c in explain(context(alice))] == [
        f"lost: policy {narrow.pk} blocks ip:{ADDRESS}, which takes precedence over all other policies",
        f"wins: a block of ip:{ADDRESS} takes precedence over all other policies",
        f"lost: policy {narrow.pk} for ip:{ADDRESS} has the longer prefix",
    ]


@pytest.mark.parametrize(
    ("counted_per", "named", "subject"),
    [
        ("plan", {"plan_slug": "pro"}, "plan:{plan}"),
        ("plan", {}, None),
        ("tenant", {"identifiers": TENANT}, "tenant:acme"),
        ("tenant", {}, None),
        # written past the model's validation
        ("phase of the moon", {}, None),
    ],
)
def test_counted_per(alice: User, counted_per: str, named: dict[str, Any], subject: str | None) -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    RatePolicy.objects.create(counted_per=counted_per, rates="5/hour")
    asking = context(alice, **named)
    assert limits(resolve(asking)) == ([] if subject is None else [f"{subject.format(plan=plan.pk)} 5/hour"])
    [candidate] = explain(asking)
    assert candidate.won is (subject is not None)
    assert candidate.won or candidate.reason == f"lost: the customer has no {counted_per} to count by"


@pytest.mark.parametrize(
    ("slug", "default", "plan", "why"),
    [
        ("pro", "", "Pro", "from PLAN_RESOLVER"),
        (None, "authenticated", "Assigned", "assigned to the user"),
        ("gold", "authenticated", "Assigned", "assigned to the user"),
    ],
)
def test_the_plan_of_a_resolver_comes_before_assignments(
    alice: User, settings: Any, slug: str | None, default: str, plan: str | None, why: str
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": "tests.project.views.tenant"}
    Plan.objects.create(name="Free", slug="free", default_for=default)
    Plan.objects.create(name="Pro", slug="pro")
    assigned = Plan.objects.create(name="Assigned", slug="assigned")
    PlanAssignment.objects.create(user=alice, plan=assigned, starts_at=NOW - DAY)
    for policies_plan in Plan.objects.all():
        RatePolicy.objects.create(plan=policies_plan, rates=f"{policies_plan.pk}/hour")
    asking = context(alice, plan_slug=slug)
    found = standing_of(asking).plan
    assert (found.name if found else None, plan_source(asking)) == (plan, why)
    expected = [f"user:{alice.pk} {found.id}/hour"] if found else []
    assert limits(resolve(asking)) == expected


ROUTE, NAME = "/api/reports/(?P<pk>[^/.]+)/", "v1:report-detail"
HANDLINGS = ("own", "none", "preflight")


def test_endpoints_match_routes_and_names() -> None:
    for routes, matched in {
        "": False,
        ROUTE: True,
        "/API/reports/*": False,
        "/api/reports/?????????????????": False,  # only * is special
        "*:report-*": True,
        "report-detail": False,
        "/nowhere/\nv1:*\nother": True,
        "/nowhere/\nother": False,
    }.items():
        endpoint = EndpointFacts(id=1, name="x", routes=tuple(routes.split()), methods=frozenset(), cost=1)
        snapshot = picture([endpoint])
        found = match_endpoints(snapshot, Where(scope=None, route=ROUTE, name=NAME, method="GET"))
        assert found == ((endpoint,) if matched else ()), routes
        assert match_endpoints(snapshot, Where(scope=None, route=None, name=None, method="GET")) == ()


def test_endpoints_match_methods_by_handlers() -> None:
    for (methods, method), matched in {
        ("", "GET"): "own none",
        ("", "HEAD"): "own none",
        ("", "BREW"): "own none",
        ("", "OPTIONS"): "own none",
        ("GET", "GET"): "own none preflight",
        ("GET", "HEAD"): "own none preflight",
        ("GET", "POST"): "",
        ("GET POST", "POST"): "own none preflight",
        ("GET POST", "PUT"): "none",
        ("POST", "GET"): "none",
        ("POST", "OPTIONS"): "none",
        ("OPTIONS", "OPTIONS"): "own none preflight",
        ("GET", NO_METHOD): "own none",
        ("POST", NO_METHOD): "own none",
    }.items():
        endpoint = EndpointFacts(id=1, name="x", routes=("*",), methods=frozenset(methods.split()), cost=1)
        for scope in (None, "x"):
            where = {"scope": scope, "route": "/", "name": "home", "method": method}
            found = {way for way in HANDLINGS if match_endpoints(picture([endpoint]), Where(**where, handling=way))}
            assert found == set(matched.split()), (methods, method, scope)


def test_the_endpoint_named_by_the_scope_comes_first_and_sets_the_cost() -> None:
    endpoints = [
        EndpointFacts(id=n, name=name, routes=routes, methods=frozenset(), cost=cost)
        for n, (name, routes, cost) in enumerate([("a", ("/*",), 7), ("b", ("/*",), 9), ("c", (), 2)], 1)
    ]
    snapshot = picture(endpoints)

    def found(scope: str | None, route: str | None) -> tuple[str, int]:
        matched = match_endpoints(snapshot, Where(scope=scope, route=route, name=None, method="GET"))
        caller = DescribedCaller(user_id=None, address=ADDRESS)
        question = EvaluationContext(
            caller=caller, entry=NOBODY, endpoints=matched, scope=scope, snapshot=snapshot, now_us=0
        )
        return "".join(endpoint.name for endpoint in matched), resolve(question).cost

    for scope, route, expected in (
        ("c", "/x/", ("cab", 2)),
        ("b", "/x/", ("ba", 9)),
        *(("a", "/x/", ("ab", 7)), (None, "/x/", ("ab", 9)), ("a", "/x/", ("ab", 7))),  # remembered apart
        ("unknown", "/x/", ("ab", 9)),
        ("unknown", None, ("", 1)),
    ):
        assert found(scope, route) == expected


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mode": "off", "plan": "free"}, "it is switched off"),
        ({"starts_at": NOW + HOUR}, "it has not started yet"),
        ({"ends_at": NOW}, "it has ended"),
        ({"plan": "free"}, "policy {winner} for the user is more specific"),
        ({"user": "alice", "starts_at": NOW - DAY}, "policy {winner} for the same audience is newer"),
        ({"user": "alice"}, "policy {winner} for the same audience has dates"),
    ],
)
def test_explain_says_why_a_policy_lost(alice: User, fields: dict[str, Any], reason: str) -> None:
    named = {
        "alice": alice,
        "free": Plan.objects.create(name="Free", slug="free", default_for="authenticated"),
    }
    winner = RatePolicy.objects.create(user=alice, starts_at=NOW - HOUR, rates="7/hour")
    RatePolicy.objects.create(rates="5/hour", **{name: named.get(value, value) for name, value in fields.items()})
    reasons = [(c.won, c.reason) for c in explain(context(alice, identifiers=TENANT))]
    assert sorted(reasons) == [
        (False, f"lost: {reason.format(winner=winner.pk)}"),
        (True, "wins: the user is the most specific audience here"),
    ]


def test_explain_counts_the_policies_of_other_callers_by_kind(alice: User) -> None:
    Plan.objects.create(name="Free", slug="free", default_for="authenticated")
    pro = Plan.objects.create(name="Pro", slug="pro")
    own = RatePolicy.objects.create(user=alice, rates="7/hour")
    RatePolicy.objects.create(subject="ip:198.51.100.1", mode="off", rates="5/hour")
    RatePolicy.objects.create(subject="ip:198.51.100.0/24", rates="5/hour")
    RatePolicy.objects.create(subject="tenant:globex", rates="5/hour")
    RatePolicy.objects.create(plan=pro, rates="5/hour")
    others: Counter[str] = Counter()
    assert [c.policy.id for c in explain(context(alice, identifiers=TENANT), others)] == [own.pk]
    assert others == {"ip": 2, "tenant": 1, "plan": 1}
    assert sorted(others_in_words(others)) == [  # else in the database's order
        "1 more policy is for other customers (plan).",
        "1 more policy is for other customers (tenant).",
        "2 more policies are for other customers (ip).",
    ]


def picture(endpoints: list[EndpointFacts], rows: list[PolicyFacts] = [], **fields: Any) -> Snapshot:  # noqa: B006
    return Snapshot(
        revision=1,
        endpoints={endpoint.id: endpoint for endpoint in endpoints},
        groups=regrouped({}, {row.id: row for row in rows if not row.user}),
        **fields,
    )


def test_callers_alike_are_resolved_once_until_something_starts_or_ends(alice: User) -> None:
    RatePolicy.objects.create(rates="5/hour")
    RatePolicy.objects.create(rates="7/hour", starts_at=NOW, ends_at=NOW + HOUR)
    first = context(alice)
    again = [replace(first, now_us=first.now_us + step) for step in (0, 1, 3_599_999_999, 3_600_000_000)]
    found = [resolve(question) for question in again]
    assert found[0] is found[1] is found[2]
    assert found[3] is not found[0]
    assert [limits(one) for one in (found[0], found[3])] == [[f"user:{alice.pk} 7/hour"], [f"user:{alice.pk} 5/hour"]]
    other = replace(first, caller=DescribedCaller(user_id=None, address="198.51.100.7"), entry=NOBODY)
    assert limits(resolve(other)) == ["ip:198.51.100.7 7/hour"]
    assigned = UserEntry(assignments=(Assignment(plan_id=1, starts_us=0, ends_us=None),))
    assert resolve(replace(first, entry=assigned)).assigned_to == f"user:{alice.pk}"


def test_long_names_that_clients_choose_are_remembered_as_digests_or_not_at_all() -> None:
    RatePolicy.objects.create(counted_per="tenant", rates="5/hour")
    first = context(identifiers=TENANT)
    for number in range(3):
        long = DescribedCaller(user_id=None, address=ADDRESS, identifiers={"tenant": f"{number}" * 201})
        (limit,) = limits(resolve(replace(first, caller=long)))
        assert re.fullmatch(r"tenant:~[0-9A-Za-z_-]{20} 5/hour", limit)
    assert len(first.snapshot.memo.resolutions) == 3
    long = DescribedCaller(user_id=None, address=ADDRESS, identifiers=TENANT, plan_slug="p" * 201)
    resolve(replace(first, caller=long))
    assert len(first.snapshot.memo.resolutions) == 3
    resolve(first)
    assert len(first.snapshot.memo.resolutions) == 4


def test_an_identifier_that_nothing_counts_per_is_not_asked() -> None:
    """It may cost a query of its own: only where a policy of the endpoint needs it."""
    reports = Endpoint.objects.create(name="reports")
    RatePolicy.objects.create(endpoint=reports, counted_per="tenant", rates="5/hour")
    RatePolicy.objects.create(endpoint=reports, subject="api_key:k", rates="5/hour")
    RatePolicy.objects.create(rates="9/hour")
    for scope, wanted in ((None, set()), ("search", set()), ("reports", {"tenant", "api_key"})):
        question = context(scope=scope)
        looked_up: set[str] = set()

        class Watched(DescribedCaller):
            def _call(self, path: str, seen: set[str] = looked_up) -> None:
                seen.add(path.rpartition(".")[2])

        resolve(replace(question, caller=Watched(user_id=None, address=ADDRESS)))
        assert looked_up == wanted
