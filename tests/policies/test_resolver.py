"""Which policies apply, and why: rows of the database in, buckets and reasons out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network
from itertools import count, product
from random import Random
from typing import Any

import pytest
from django.contrib.auth.models import User
from hypothesis import given
from hypothesis import strategies as st

from django_ratequota import Rate, check_request
from django_ratequota.models import Endpoint, Plan, PlanAssignment, RatePolicy
from django_ratequota.policies.cache import policies
from django_ratequota.policies.explain import Candidate, explain, others_in_words, plan_source
from django_ratequota.policies.facts import (
    NOBODY,
    Assignment,
    EndpointFacts,
    MemberFacts,
    PlanFacts,
    PolicyFacts,
    UserEntry,
    member_facts,
)
from django_ratequota.policies.loading import load_snapshot
from django_ratequota.policies.matching import NO_METHOD, match_endpoints
from django_ratequota.policies.members import Members
from django_ratequota.policies.requests.caller import Caller, DescribedCaller
from django_ratequota.policies.resolver import EvaluationContext, Resolution, plan_of, resolve, resolve_uncached
from django_ratequota.policies.snapshot import Group, Snapshot
from tests.project.views import request_from
from tests.support.properties import examples

# Ahead of the real clock, by which policies that ended long ago are not even loaded.
NOW = datetime(2100, 3, 1, 12, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
ADDRESS = "203.0.113.7"
TENANT = {"tenant": "acme"}
IDENTIFIERS = {"tenant": "tests.project.views.tenant", "api_key": "tests.project.views.api_key"}

database = pytest.mark.django_db


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
        endpoints=match_endpoints(snapshot, scope=scope, route=None, name=None, method="GET"),
        scope=scope,
        snapshot=snapshot,
        now_us=round(at.timestamp()) * 10**6,
    )


def limits(resolution: Resolution) -> list[str]:
    """``subject rate`` of each bucket."""
    return [f"{bucket.subject} {bucket.rate}" for bucket in resolution.buckets]


@pytest.fixture
def alice(db: None) -> User:
    return User.objects.create(username="alice")


def test_the_worked_example(alice: User) -> None:
    free = Plan.objects.create(name="Free", slug="free")
    PlanAssignment.objects.create(user=alice, plan=free, starts_at=NOW - DAY)
    search = Endpoint.objects.create(name="search")
    Endpoint.objects.create(name="export")
    RatePolicy.objects.create(plan=free, rates="100/min")
    RatePolicy.objects.create(plan=free, endpoint=search, rates="10/min")
    RatePolicy.objects.create(endpoint=search, counted_per="everyone", rates="10000/min")
    RatePolicy.objects.create(user=alice, rates="1000/min")
    own = f"user:{alice.pk}"
    found = resolve(context(alice, "search"))
    assert limits(found) == [f"{own} 1000/min", f"{own} 10/min", "everyone 10000/min"]
    assert [bucket.title for bucket in found.buckets] == ["all/min", "search/min", "search/min per everyone"]
    assert limits(resolve(context(alice, "export"))) == [f"{own} 1000/min"]
    assert limits(resolve(context(alice))) == [f"{own} 1000/min"]
    assert limits(resolve(context(None, "search"))) == ["everyone 10000/min"]


#: (the fields that win, the fields that lose); users and plans are filled in by the test.
PRECEDENCE = [
    ({"user": "alice"}, {"subject": "tenant:acme"}),
    ({"user": "alice"}, {"subject": f"ip:{ADDRESS}"}),
    ({"user": "alice"}, {"plan": "free"}),
    ({"user": "alice"}, {}),
    ({"subject": "tenant:acme"}, {"plan": "free"}),
    ({"subject": f"ip:{ADDRESS}"}, {"plan": "free"}),
    ({"subject": "ip:0.0.0.0/0"}, {"plan": "free"}),
    ({"subject": "tenant:acme"}, {}),
    ({"plan": "free"}, {}),
    ({"subject": f"ip:{ADDRESS}"}, {"subject": "ip:203.0.113.0/24"}),
    ({"subject": "ip:203.0.113.0/24"}, {"subject": "ip:203.0.0.0/16"}),
    ({"subject": "ip:203.0.0.0/16"}, {"subject": "ip:0.0.0.0/0"}),
    # identifiers before addresses
    ({"subject": "tenant:acme"}, {"subject": f"ip:{ADDRESS}"}),
    ({"subject": "tenant:acme"}, {"subject": "ip:203.0.113.0/24", "starts_at": NOW - HOUR, "ends_at": NOW + HOUR}),
    # a date never outweighs a more specific audience
    ({"user": "alice"}, {"ends_at": NOW + HOUR}),
    ({"subject": "ip:203.0.113.0/24"}, {"subject": "ip:203.0.0.0/16", "starts_at": NOW - HOUR}),
    ({"plan": "free"}, {"starts_at": NOW - HOUR, "ends_at": NOW + HOUR}),
    # among equals: dated, then the latest start
    ({"ends_at": NOW + HOUR}, {}),
    ({"starts_at": NOW - DAY}, {}),
    ({"user": "alice", "ends_at": NOW + HOUR}, {"user": "alice"}),
    ({"starts_at": NOW - HOUR}, {"starts_at": NOW - DAY, "ends_at": NOW + HOUR}),
    ({"starts_at": NOW - DAY}, {"ends_at": NOW + HOUR}),
    ({"starts_at": NOW}, {"starts_at": NOW - HOUR}),
    # what is not in force does not compete
    ({}, {"user": "alice", "mode": "off"}),
    ({}, {"user": "alice", "ends_at": NOW}),
    ({}, {"user": "alice", "starts_at": NOW + HOUR}),
    ({}, {"subject": "tenant:globex"}),
    ({}, {"subject": "ip:198.51.100.0/24"}),
    ({}, {"subject": "ip:2001:db8::/32"}),
    ({}, {"plan": "pro"}),
    ({}, {"user": "bob"}),
    # log mode competes like any other
    ({"user": "alice", "mode": "log"}, {}),
]


@pytest.mark.parametrize("winner_first", [True, False], ids=["older", "newer"])
@pytest.mark.parametrize(("wins", "loses"), PRECEDENCE)
def test_precedence(alice: User, wins: dict[str, Any], loses: dict[str, Any], winner_first: bool) -> None:
    named = {
        "alice": alice,
        "bob": User.objects.create(username="bob"),
        "free": Plan.objects.create(name="Free", slug="free", default_for="authenticated"),
        "pro": Plan.objects.create(name="Pro", slug="pro"),
    }
    for fields in (wins, loses) if winner_first else (loses, wins):
        given_by_name = {name: named.get(value, value) for name, value in fields.items()}
        RatePolicy.objects.create(rates="7/hour" if fields is wins else "1/hour", **given_by_name)
    asking = context(alice, identifiers=TENANT)
    assert limits(resolve(asking)) == [f"user:{alice.pk} 7/hour"]
    others: Counter[str] = Counter()
    lost = [candidate for candidate in explain(asking, others) if not candidate.won]
    # An override of another user is never looked at: it is not even loaded.
    assert len(lost) + others.total() == (loses != {"user": "bob"})


@database
@pytest.mark.parametrize(
    ("caller", "first"),
    [
        (["user", "api_key", "tenant", "ip"], "api_key"),
        (["ip", "tenant", "api_key"], "tenant"),
        (["user", "api_key", "ip"], "api_key"),
        # none of them named: in the order of IDENTIFIERS
        (["user", "ip"], "tenant"),
    ],
)
@pytest.mark.parametrize("later", ["tenant", "api_key"])
def test_identifiers_go_by_the_order_of_caller(caller: list[str], first: str, later: str, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": caller}
    values = {"tenant": "acme", "api_key": "k"}
    ids = {}
    for kind in sorted(values, key=lambda kind: kind == later):
        starts = NOW - HOUR if kind == later else None
        rates = "7/hour" if kind == first else "1/hour"
        policy = RatePolicy.objects.create(subject=f"{kind}:{values[kind]}", starts_at=starts, rates=rates)
        ids[kind] = policy.pk
    RatePolicy.objects.create(subject=f"ip:{ADDRESS}", starts_at=NOW - HOUR, rates="1/hour")
    asking = context(identifiers=values)
    assert [str(bucket.rate) for bucket in resolve(asking).buckets] == ["7/hour"]
    second = "api_key" if first == "tenant" else "tenant"
    policy = f"policy {ids[first]} for {first}:{values[first]} comes first"
    assert {c.reason for c in explain(asking)} == {
        f"wins: {first}:{values[first]} is the most specific audience here",
        f"lost: {policy}: CALLER, then IDENTIFIERS, names {first} before {second}",
        f"lost: {policy}: identifiers come before addresses",
    }


NETWORK = {"subject": "ip:203.0.113.0/24"}
DATED = {"starts_at": NOW - HOUR, "ends_at": NOW + HOUR}
#: (the block's fields, its rival's fields, whether the caller is blocked; else the rival's limit counts)
BLOCKS: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    (NETWORK, {"user": "alice"}, True),
    (NETWORK, {"user": "alice", **DATED}, True),
    (NETWORK, {"user": "alice", "rates": "unlimited"}, True),
    (NETWORK, {"subject": "tenant:acme"}, True),
    (NETWORK, {"subject": f"ip:{ADDRESS}"}, True),
    (NETWORK, {"plan": "free"}, True),
    ({**NETWORK, **DATED}, {"user": "alice"}, True),
    ({"subject": "tenant:acme"}, {"user": "alice"}, True),
    ({"user": "alice"}, {"user": "alice", **DATED}, True),
    ({"user": "alice"}, {}, True),
    # what gates a feature is outranked by what opens it
    ({"plan": "free"}, {"user": "alice"}, False),
    ({"plan": "free"}, NETWORK, False),
    ({}, {"plan": "free"}, False),
    ({}, {"user": "alice"}, False),
    ({"plan": "free"}, {"plan": "free", **DATED}, False),
    ({"plan": "free"}, {}, True),
    # log mode refuses nobody, and lifts nobody's limit
    ({**NETWORK, "mode": "log"}, {"user": "alice"}, False),
    ({**NETWORK, "mode": "off"}, {"user": "alice"}, False),
    # a block of others, or of another time
    ({"subject": "ip:198.51.100.0/24"}, {"user": "alice"}, False),
    ({"subject": "tenant:globex"}, {"user": "alice"}, False),
    ({**NETWORK, "ends_at": NOW}, {"user": "alice"}, False),
    ({**NETWORK, "starts_at": NOW + HOUR}, {"user": "alice"}, False),
]


@pytest.mark.parametrize("block_first", [True, False], ids=["older", "newer"])
@pytest.mark.parametrize(("block", "rival", "blocks"), BLOCKS)
def test_a_blocked_user_or_subject_is_never_outranked(
    alice: User, block: dict[str, Any], rival: dict[str, Any], blocks: bool, block_first: bool
) -> None:
    free = Plan.objects.create(name="Free", slug="free", default_for="authenticated")
    named = {"alice": alice, "free": free}
    for fields in (block, rival) if block_first else (rival, block):
        given_by_name = {name: named.get(value, value) for name, value in fields.items()}
        RatePolicy.objects.create(**{"rates": "blocked" if fields is block else "7/hour", **given_by_name})
    asking = context(alice, identifiers=TENANT)
    found = resolve(asking)
    assert found.blocked_by == (("all/blocked",) if blocks else ())
    assert limits(found) == ([] if blocks else [f"user:{alice.pk} 7/hour"])
    assert [c.policy.rates == "blocked" for c in explain(asking) if c.won] == [blocks]


def test_explain_says_what_a_block_outranks(alice: User) -> None:
    RatePolicy.objects.create(user=alice, rates="1000/min")
    block = RatePolicy.objects.create(subject="ip:203.0.113.0/24", rates="blocked")
    narrow = RatePolicy.objects.create(subject=f"ip:{ADDRESS}", rates="9/min")
    assert [c.reason for c in explain(context(alice))] == [
        f"lost: policy {block.pk} blocks ip:203.0.113.0/24, and no other policy outranks that",
        f"lost: policy {block.pk} blocks ip:203.0.113.0/24, and no other policy outranks that",
        "wins: blocked for ip:203.0.113.0/24, which no other policy outranks",
    ]
    RatePolicy.objects.filter(pk=narrow.pk).update(rates="blocked")
    assert [c.reason for c in explain(context(alice))] == [
        f"lost: policy {narrow.pk} blocks ip:{ADDRESS}, and no other policy outranks that",
        f"wins: blocked for ip:{ADDRESS}, which no other policy outranks",
        f"lost: policy {narrow.pk} for ip:{ADDRESS} has the longer prefix",
    ]


def test_a_block_in_log_mode_stands_in_no_other_blocks_way(alice: User) -> None:
    RatePolicy.objects.create(user=alice, rates="blocked", mode="log")
    RatePolicy.objects.create(subject="ip:203.0.113.0/24", rates="blocked")
    found = resolve(context(alice))
    assert (found.blocked_by, found.would_block) == (("all/blocked",), ())


@database
def test_the_highest_id_wins_among_equals() -> None:
    for rates in ("1/hour", "2/hour", "3/hour"):
        RatePolicy.objects.create(starts_at=NOW - DAY, rates=rates)
    assert limits(resolve(context())) == [f"ip:{ADDRESS} 3/hour"]


@pytest.mark.parametrize(
    ("fields", "buckets", "blocked_by"),
    [
        ({"rates": "unlimited"}, [], ()),
        ({"rates": "blocked"}, [], ("all/blocked",)),
        ({"rates": "blocked", "mode": "log"}, [], ()),
        ({"rates": "blocked", "mode": "off"}, ["5/hour"], ()),
        ({"rates": "2/hour, 1/s", "mode": "log"}, ["2/hour", "1/s"], ()),
        ({"rates": "2/hour, 1/s"}, ["2/hour", "1/s"], ()),
    ],
)
def test_an_override_replaces_the_group(
    alice: User, fields: dict[str, Any], buckets: list[str], blocked_by: tuple[str, ...]
) -> None:
    RatePolicy.objects.create(rates="5/hour")
    search = Endpoint.objects.create(name="search")
    RatePolicy.objects.create(endpoint=search, rates="9/day")
    RatePolicy.objects.create(user=alice, **fields)
    found = resolve(context(alice, "search"))
    # The endpoint's group is another one: neither unlimited nor blocked touches it.
    assert limits(found) == [f"user:{alice.pk} {rate}" for rate in (*buckets, "9/day")]
    assert found.blocked_by == blocked_by
    mode = "log" if fields.get("mode") == "log" else "enforce"
    assert {bucket.mode for bucket in found.buckets[:-1]} <= {mode if buckets != ["5/hour"] else "enforce"}


@database
def test_a_blocked_endpoint_is_named() -> None:
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="search"), rates="blocked")
    assert resolve(context(scope="search")).blocked_by == ("search/blocked",)
    assert resolve(context(scope="export")).blocked_by == ()


@database
@pytest.mark.parametrize("subject", ["ip:::ffff:203.0.113.7", "ip:203.0.113.7/32", " ip:203.0.113.7"])
def test_an_address_is_meant_however_it_is_written(subject: str) -> None:
    policy = RatePolicy(subject=subject, rates="5/hour")
    policy.full_clean()
    policy.save()
    assert limits(resolve(context())) == [f"ip:{ADDRESS} 5/hour"]


@pytest.mark.parametrize(
    ("counted_per", "logged_in", "named", "subject"),
    [
        ("caller", True, {}, "user:{pk}"),
        ("caller", False, {}, f"ip:{ADDRESS}"),
        ("caller", False, {"address": None}, "ip:unknown"),
        ("ip", True, {}, f"ip:{ADDRESS}"),
        ("ip", False, {"address": "2001:db8::7"}, "ip:2001:db8::/64"),
        ("plan", True, {"plan_slug": "pro"}, "plan:{plan}"),
        ("plan", True, {}, None),
        ("everyone", False, {}, "everyone"),
        ("tenant", True, {"identifiers": TENANT}, "tenant:acme"),
        ("tenant", True, {}, None),
        # written past the model's validation
        ("phase of the moon", True, {}, None),
    ],
)
def test_counted_per(
    alice: User, counted_per: str, logged_in: bool, named: dict[str, Any], subject: str | None
) -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    RatePolicy.objects.create(counted_per=counted_per, rates="5/hour")
    asking = context(alice if logged_in else None, **named)
    expected = [] if subject is None else [f"{subject.format(pk=alice.pk, plan=plan.pk)} 5/hour"]
    assert limits(resolve(asking)) == expected
    [candidate] = explain(asking)
    assert candidate.won is (subject is not None)
    assert candidate.won or candidate.reason == f"lost: the caller has no {counted_per} to count by"


def test_defaults_are_for_callers_without_an_assignment(alice: User) -> None:
    assert plan_of(context(alice)) is None
    Plan.objects.create(name="Guest", slug="guest", default_for="anonymous")
    assert plan_of(context(alice)) is None
    Plan.objects.create(name="Free", slug="free", default_for="authenticated")

    def plans() -> list[str | None]:
        return [plan.name if (plan := plan_of(context(user))) else None for user in (alice, None)]

    assert plans() == ["Free", "Guest"]
    PlanAssignment.objects.create(user=alice, plan=Plan.objects.create(name="Pro", slug="pro"), starts_at=NOW - DAY)
    assert plans() == ["Pro", "Guest"]


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        ([], "Default"),
        ([(-1, None)], "0"),
        ([(0, None)], "0"),
        ([(1, None)], "Default"),
        ([(-2, 0)], "Default"),
        ([(-2, 1)], "0"),
        # a dated one beats an open one, however late that started
        ([(-1, None), (-5, 1)], "1"),
        ([(-5, 1), (-1, None)], "0"),
        # then the latest start
        ([(-5, None), (-1, None), (-3, None)], "1"),
        ([(-5, 1), (-1, 2), (-3, 9)], "1"),
        # what has ended or not begun does not compete
        ([(-5, None), (-4, -1), (1, 2)], "0"),
    ],
)
def test_assignments(alice: User, assignments: list[tuple[int, int | None]], expected: str) -> None:
    Plan.objects.create(name="Default", slug="default", default_for="authenticated")
    for number, (starts, ends) in enumerate(assignments):
        PlanAssignment.objects.create(
            user=alice,
            plan=Plan.objects.create(name=str(number), slug=str(number)),
            starts_at=NOW + starts * HOUR,
            ends_at=None if ends is None else NOW + ends * HOUR,
        )
    plan = plan_of(context(alice))
    assert plan is not None
    assert plan.name == expected


@pytest.mark.parametrize(
    ("slug", "default", "plan", "why"),
    [
        ("pro", "", "Pro", "from PLAN_RESOLVER"),
        (None, "authenticated", "Free", "the default for logged-in users, because PLAN_RESOLVER returned no plan"),
        ("gold", "authenticated", "Free", "the default for logged-in users, because PLAN_RESOLVER returned no plan"),
        (None, "", None, "PLAN_RESOLVER returned no plan, and there is no default plan"),
    ],
)
def test_a_plan_resolver_takes_the_place_of_assignments(
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
    found = plan_of(asking)
    assert (found.name if found else None, plan_source(asking)) == (plan, why)
    expected = [f"user:{alice.pk} {found.id}/hour"] if found else []
    assert limits(resolve(asking)) == expected


def test_an_assignment_ends_at_its_end_and_not_before(alice: User) -> None:
    plan = Plan.objects.create(name="Trial", slug="trial")
    PlanAssignment.objects.create(user=alice, plan=plan, starts_at=NOW, ends_at=NOW + HOUR)
    second = timedelta(seconds=1)
    seen = [plan_of(context(alice, at=at)) for at in (NOW - second, NOW, NOW + HOUR - second, NOW + HOUR)]
    assert [bool(plan) for plan in seen] == [False, True, True, False]


ROUTE, NAME = "/api/reports/(?P<pk>[^/.]+)/", "v1:report-detail"


@pytest.mark.parametrize(
    ("routes", "matched"),
    [
        ("", False),
        (ROUTE, True),
        ("/api/reports/*", True),
        ("/api/*/", True),
        ("/*", True),
        ("*", True),
        ("/api/reports/", False),
        ("/api/reports", False),
        ("api/reports/*", False),
        ("/API/reports/*", False),
        ("/api/reports/(?P<pk>[^/.]+)", False),
        # only * is special
        ("/api/reports/?????????????????", False),
        ("/api/reports/[(]*", False),
        ("/api.reports/*", False),
        ("v1:report-detail", True),
        ("v1:*", True),
        ("*:report-*", True),
        ("report-detail", False),
        ("v1:report", False),
        ("V1:*", False),
        ("/nowhere/\nv1:*\nother", True),
        ("/nowhere/\nother", False),
    ],
)
def test_endpoints_match_routes_and_names(routes: str, matched: bool) -> None:
    endpoint = EndpointFacts(id=1, name="x", routes=tuple(routes.split()), methods=frozenset(), cost=1)
    snapshot = picture([endpoint])
    found = match_endpoints(snapshot, scope=None, route=ROUTE, name=NAME, method="GET")
    assert found == ((endpoint,) if matched else ())
    assert match_endpoints(snapshot, scope=None, route=None, name=None, method="GET") == ()


@pytest.mark.parametrize(
    ("methods", "method", "matched"),
    [
        ("", "GET", "own none"),
        ("", "HEAD", "own none"),
        ("", "BREW", "own none"),
        ("", "OPTIONS", "own none"),
        ("GET", "GET", "own none preflight"),
        ("GET", "HEAD", "own none preflight"),
        ("GET", "POST", ""),
        ("GET POST", "POST", "own none preflight"),
        ("GET POST", "PUT", "none"),
        ("POST", "GET", "none"),
        ("POST", "OPTIONS", "none"),
        ("OPTIONS", "OPTIONS", "own none preflight"),
        ("GET", NO_METHOD, "own none"),
        ("POST", NO_METHOD, "own none"),
    ],
)
@pytest.mark.parametrize("scope", [None, "x"])
def test_endpoints_match_methods_by_handlers(methods: str, method: str, matched: str, scope: str | None) -> None:
    endpoint = EndpointFacts(id=1, name="x", routes=("*",), methods=frozenset(methods.split()), cost=1)
    where = {"scope": scope, "route": "/", "name": "home", "method": method}
    handlings = ("own", "none", "preflight")
    assert {
        handling for handling in handlings if match_endpoints(picture([endpoint]), **where, handling=handling)
    } == set(matched.split())


def test_the_endpoint_named_by_the_scope_comes_first_and_sets_the_cost() -> None:
    endpoints = [
        EndpointFacts(id=n, name=name, routes=routes, methods=frozenset(), cost=cost)
        for n, (name, routes, cost) in enumerate([("a", ("/*",), 7), ("b", ("/*",), 9), ("c", (), 2)], 1)
    ]
    snapshot = picture(endpoints)

    def found(scope: str | None, route: str | None) -> tuple[str, int]:
        matched = match_endpoints(snapshot, scope=scope, route=route, name=None, method="GET")
        caller = DescribedCaller(user_id=None, address=ADDRESS)
        question = EvaluationContext(
            caller=caller, entry=NOBODY, endpoints=matched, scope=scope, snapshot=snapshot, now_us=0
        )
        return "".join(endpoint.name for endpoint in matched), resolve(question).cost

    assert found("c", "/x/") == ("cab", 2)
    assert found("b", "/x/") == ("ba", 9)
    assert found(None, "/x/") == ("ab", 9)
    assert found("unknown", "/x/") == ("ab", 9)
    assert found("unknown", None) == ("", 1)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mode": "off", "plan": "free"}, "it is switched off"),
        ({"starts_at": NOW + HOUR}, "it has not started yet"),
        ({"ends_at": NOW}, "it has ended"),
        ({"plan": "free"}, "policy {winner} for the user is more specific"),
        ({"user": "alice", "starts_at": NOW - DAY}, "policy {winner} for the same audience is newer"),
        ({"user": "alice"}, "policy {winner} for the same audience is dated"),
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


@database
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
    assert others_in_words(others) == [
        "2 more policies are for other addresses.",
        "1 more policy is for another tenant.",
        "1 more policy is for another plan.",
    ]


# Random policies, as facts: rows would be slow, and their constraints would keep the odd ones out.

PLANS = {n: PlanFacts(id=n, name=f"Plan {n}", slug=f"plan-{n}") for n in (1, 2)}
ENDPOINTS = [EndpointFacts(id=n, name=f"e{n}", routes=(), methods=frozenset(), cost=1) for n in (1, 2)]
RATES = ((Rate.parse("5/hour"),), (Rate.parse("1/s"), Rate.parse("9/day")), "unlimited", "blocked", ())
SUBJECTS = (
    "tenant:acme",
    "tenant:globex",
    "api_key:k",
    "ip:203.0.113.7",
    "ip:203.0.113.0/24",
    "ip:198.51.100.0/24",
    "ip:nonsense",
)


def picture(endpoints: list[EndpointFacts], rows: list[PolicyFacts] = [], **fields: Any) -> Snapshot:  # noqa: B006
    """A snapshot of these; users' own policies left out."""
    groups: dict[int | None, dict[str, list[PolicyFacts]]] = {}
    for row in rows:
        if not row.user:
            groups.setdefault(row.endpoint_id, {}).setdefault(row.counted_per, []).append(row)
    return Snapshot(
        revision=1,
        **{"plans": {}, "defaults": {}, **fields},
        endpoints={endpoint.id: endpoint for endpoint in endpoints},
        groups={e: {per: Group(rivals) for per, rivals in named.items()} for e, named in groups.items()},
    )


def facts_of(random: Random) -> list[PolicyFacts]:
    """Policies of a few groups, so that there is a contest in most of them."""
    ids: Iterator[int] = count(1)
    per = ["caller", "caller", "ip", "plan", "everyone", "tenant"]
    groups = [(random.choice([None, None, 1, 2]), random.choice(per)) for _ in range(random.randint(1, 2))]
    moments = [None] * 7 + [10, 20, 30]
    rows = []
    for _ in range(random.randint(0, 12)):
        audience = random.choice(["user", "subject", "subject", "list", "plan", "everyone"])
        subject = random.choice(SUBJECTS) if audience == "subject" else ""
        kind, _colon, value = subject.partition(":")
        endpoint_id, counted_per = random.choice(groups)
        rows.append(
            PolicyFacts(
                id=next(ids),
                endpoint_id=endpoint_id,
                user="42" if audience == "user" else "",
                subject=subject,
                plan_id=random.choice([1, 2]) if audience == "plan" else None,
                counted_per=counted_per,
                text="",
                rates=random.choice(RATES),
                mode=random.choice(["enforce", "enforce", "enforce", "log", "off"]),
                on_error="",
                starts_us=random.choice(moments),
                ends_us=random.choice(moments),
                network=ip_network(value) if kind == "ip" and value != "nonsense" else None,
                list_id=random.choice([1, 2, 3]) if audience == "list" else None,
            )
        )
    random.shuffle(rows)
    return rows


def members_of(random: Random) -> list[MemberFacts]:
    """Entries of lists 1 and 2, with times in µs."""
    moments = [None] * 7 + [10, 20, 30]
    subjects = [
        *SUBJECTS,
        "ip:203.0.0.0/11",
        "ip:0.0.0.0/0",
        "ip:2001:db8::/33",
        "ip:2001::/16",
        "user:42",
        "user:43",
    ]
    chosen = [(random.choice([1, 2]), random.choice(subjects)) for _ in range(random.randint(0, 4))]
    entries = []
    for pk, (list_id, subject) in enumerate(chosen):
        user = subject.removeprefix("user:") if subject.startswith("user:") else None
        entry = member_facts(pk, list_id, user, None if user else subject, None, None)
        entries.append(replace(entry, starts_us=random.choice(moments), ends_us=random.choice(moments)))
    return entries


def includes(entry: MemberFacts, caller: Caller, now: int) -> bool:
    """Whether an entry puts the caller in its list at ``now``."""
    if not entry.active(now):
        return False
    kind, _colon, value = str(entry).partition(":")
    if kind != "ip":
        return caller.value(kind) == value
    return value != "nonsense" and caller.address is not None and caller.address in ip_network(value)


def facts() -> st.SearchStrategy[list[PolicyFacts]]:
    # From a seed: of policies whose every field is drawn by itself, few ever meet.
    return st.integers(0, 2**32).map(lambda seed: facts_of(Random(seed)))


def first_of(rivals: list[PolicyFacts], kinds: list[str]) -> PolicyFacts:
    """The rule of precedence, word for word and step by step; ``kinds``: identifiers in CALLER's order."""
    rivals = [one for one in rivals if blocks_somebody(one)] or rivals
    prefixes = sorted({one.network.prefixlen for one in rivals if one.network}, reverse=True)
    most_specific = (
        [one for one in rivals if one.user],
        *([one for one in rivals if one.subject.startswith(f"{kind}:")] for kind in kinds),
        *([one for one in rivals if one.network and one.network.prefixlen == bits] for bits in prefixes),
        [one for one in rivals if one.list_id is not None],
        [one for one in rivals if one.plan_id is not None],
        rivals,
    )
    equals = next(found for found in most_specific if found)
    equals = [one for one in equals if one.starts_us is not None or one.ends_us is not None] or equals
    latest = max(one.starts_us or 0 for one in equals)
    return max((one for one in equals if (one.starts_us or 0) == latest), key=lambda one: one.id)


def blocks_somebody(policy: PolicyFacts) -> bool:
    chosen = policy.user or policy.subject or policy.list_id is not None
    return policy.rates == "blocked" and policy.mode == "enforce" and bool(chosen)


def concerns(
    policy: PolicyFacts,
    caller: Caller,
    plan: int | None,
    now: int,
    entries: list[MemberFacts] = [],  # noqa: B006
) -> bool:
    """Whether the policy is in force for the caller at ``now``."""
    if policy.mode == "off" or not policy.rates or not policy.active(now):
        return False
    if policy.user:
        return policy.user == caller.user_id
    if policy.subject.startswith("ip:"):
        return policy.network is not None and caller.address is not None and caller.address in policy.network
    if policy.subject:
        kind, _, value = policy.subject.partition(":")
        return caller.value(kind) == value
    if policy.list_id is not None:
        return any(entry.list_id == policy.list_id and includes(entry, caller, now) for entry in entries)
    return policy.plan_id in (None, plan)


@pytest.mark.parametrize("order", [["user", "ip"], ["user", "api_key", "tenant", "ip"], ["ip", "api_key"]], ids=str)
def test_explain_agrees_with_resolve_and_both_with_the_rules(order: list[str], settings: Any) -> None:
    settings.RATEQUOTA = {"IDENTIFIERS": IDENTIFIERS, "CALLER": order}
    kinds = [kind for kind in dict.fromkeys([*order, *IDENTIFIERS]) if kind in IDENTIFIERS]
    contests = [agree(Random(seed), kinds) for seed in range(3000)]
    assert sum(contests) > 500, "policies met"


def agree(random: Random, kinds: list[str]) -> int:
    """Compare the resolver with the rules, and return how many groups were contested."""
    rows, now, entries = facts_of(random), random.choice([5, 10, 25, 30]), members_of(random)
    caller = DescribedCaller(
        user_id=random.choice([None, "42", "42"]),
        address=random.choice([None, ADDRESS, ADDRESS, "203.0.113.8", "2001:db8::7"]),
        identifiers=random.choice([{}, TENANT, {"api_key": "k"}, {**TENANT, "api_key": "k"}]),
    )
    assigned, scope = random.choice([None, 1, 2]), random.choice([None, "e1", "e2", "unknown"])
    plan = assigned if caller.user_id else 1
    members = Members().changed({entry.id: entry for entry in entries})
    snapshot = picture(ENDPOINTS, rows, plans=PLANS, defaults={"anonymous": 1}, lists={1: "L1"}, members=members)
    own = UserEntry(
        policies=tuple(row for row in rows if row.user),
        assignments=(Assignment(plan_id=assigned, starts_us=0, ends_us=None),) if assigned else (),
    )
    question = EvaluationContext(
        caller=caller,
        entry=own if caller.user_id else NOBODY,
        endpoints=match_endpoints(snapshot, scope=scope, route=None, name=None, method="GET"),
        scope=scope,
        snapshot=snapshot,
        now_us=now,
    )
    others: Counter[str] = Counter()
    resolution, candidates = resolve(question), explain(question, others)

    competing: dict[tuple[int | None, str], list[PolicyFacts]] = {}
    for row in rows:
        at = {None: True, 1: scope == "e1", 2: scope == "e2"}[row.endpoint_id]
        countable = caller.subject(row.counted_per, plan) is not None
        if at and countable and concerns(row, caller, plan, now, entries):
            competing.setdefault((row.endpoint_id, row.counted_per), []).append(row)
    expected = {first_of(rivals, kinds).id for rivals in competing.values()}

    assert {policy.id for policy in resolution.winners} == expected
    assert {c.policy.id for c in candidates if c.won} == expected
    assert len(resolution.winners) == len(expected)
    looked_at = [row.id for row in rows if row.endpoint_id in (None, *(e.id for e in question.endpoints))]
    looked_at = [n for n in looked_at if caller.user_id or not next(row for row in rows if row.id == n).user]
    listed = [c.policy.id for c in candidates]
    assert set(listed) <= set(looked_at)
    assert len(set(listed)) == len(listed) == len(looked_at) - others.total()
    assert {row.id for rivals in competing.values() for row in rivals} <= set(listed)
    assert all(c.reason.startswith("wins: " if c.won else "lost: ") for c in candidates)
    assert buckets_of(candidates) == list(resolution.buckets)
    refusing = [c for c in candidates if c.won and c.policy.rates == "blocked" and c.policy.mode == "enforce"]
    assert len(resolution.blocked_by) == len(refusing)
    for rivals in competing.values():
        for one in rivals:
            if blocks_somebody(one):
                assert resolution.blocked_by, "a blocked caller gets nowhere"
    return sum(len(rivals) > 1 for rivals in competing.values())


def buckets_of(candidates: tuple[Candidate, ...]) -> list[Any]:
    return [bucket for candidate in candidates for bucket in candidate.buckets]


def entries(rows: list[PolicyFacts]) -> st.SearchStrategy[UserEntry]:
    """What belongs to user 42: its policies, and assignments that begin and end."""
    moments = st.sampled_from([10, 20, 30])
    assignment = st.builds(
        Assignment,
        plan_id=st.sampled_from([1, 2]),
        starts_us=moments,
        ends_us=st.none() | moments,
        anchor=st.sampled_from([1, 15]),
    )
    own = tuple(row for row in rows if row.user)
    return st.builds(
        UserEntry, policies=st.sampled_from([own, ()]), assignments=st.lists(assignment, max_size=3).map(tuple)
    )


@st.composite
def questions(draw: st.DrawFn) -> list[EvaluationContext]:
    """Questions to one picture, by few enough callers that some are alike but for the time, or for one thing."""
    rows = draw(facts())
    snapshot = picture(ENDPOINTS, rows, plans=PLANS, defaults=draw(st.sampled_from([{}, {"authenticated": 2}])))
    known = draw(st.lists(entries(rows), min_size=1, max_size=2))
    tenants = {name: draw(st.none() | entries([])) for name in ("acme", "globex")}
    user_first = draw(st.booleans())
    context = []
    for _ in range(draw(st.integers(2, 12))):
        # Made for each call, as a request's is.
        caller = DescribedCaller(
            user_id=draw(st.sampled_from([None, "42", "43"])),
            address=draw(st.sampled_from([None, ADDRESS, "203.0.113.8", "2001:db8::7", "2001:db8::8"])),
            identifiers=draw(st.sampled_from([{}, TENANT, {"tenant": "globex"}])),
            plan_slug=draw(st.sampled_from([None, None, "plan-1", "plan-2", "unknown"])),
        )
        scope = draw(st.sampled_from([None, "e1", "e2", "unknown"]))
        entry = draw(st.sampled_from(known)) if caller.user_id == "42" else NOBODY
        own = tenants.get(caller.value("tenant") or "")
        pairs = (("user", entry), ("tenant", own)) if own else ()
        context.append(
            EvaluationContext(
                caller=caller,
                entry=entry,
                assigned=pairs if user_first else pairs[::-1],
                endpoints=match_endpoints(snapshot, scope=scope, route=None, name=None, method="GET"),
                scope=scope,
                snapshot=snapshot,
                now_us=draw(st.sampled_from([5, 9, 10, 11, 19, 20, 25, 30, 31])),
            )
        )
    return context


@pytest.mark.slow
@given(questions())
@examples(1000)
def test_remembering_changes_no_answer(contexts: list[EvaluationContext]) -> None:
    for question in (*contexts, *contexts[::-1]):
        # A copy of the snapshot has an empty memo.
        uncached = resolve_uncached(replace(question, snapshot=replace(question.snapshot)))
        remembered = resolve(question)
        assert remembered == uncached
        assert remembered.since_us <= question.now_us < remembered.until_us
        won = [candidate.policy for candidate in explain(question) if candidate.won]
        assert won == list(remembered.winners)


@database
@pytest.mark.parametrize("caller", [["user", "ip"], ["tenant", "ip"]])
def test_whatever_tells_callers_apart_is_remembered_apart(caller: list[str], settings: Any) -> None:
    """Each fact decides something here: the address, the user, the identifier, the resolver's plan, the time."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": caller}
    guest = Plan.objects.create(name="Guest", slug="guest", default_for="anonymous")
    free = Plan.objects.create(name="Free", slug="free", default_for="authenticated")
    pro = Plan.objects.create(name="Pro", slug="pro")
    search = Endpoint.objects.create(name="search")
    for number, plan in enumerate((guest, free, pro)):
        RatePolicy.objects.create(plan=plan, rates=f"{number + 1}/hour")
    RatePolicy.objects.create(subject="ip:203.0.113.0/24", endpoint=search, rates="10/hour")
    RatePolicy.objects.create(subject="tenant:acme", rates="11/hour")
    RatePolicy.objects.create(counted_per="tenant", rates="12/hour")
    RatePolicy.objects.create(starts_at=NOW, ends_at=NOW + HOUR, counted_per="everyone", rates="13/hour")
    alice = User.objects.create(username="alice")
    PlanAssignment.objects.create(user=alice, plan=pro, starts_at=NOW - DAY, ends_at=NOW + 2 * HOUR)
    first = context(alice)
    found = []
    users, addresses, tenants = (None, "43", str(alice.pk)), (ADDRESS, "198.51.100.7"), ({}, TENANT)
    # The time first: what was remembered of another time is never found.
    for hours, scope, user, address, tenant, plan_slug in product(
        (-1, 0, 1, 2), (None, "search"), users, addresses, tenants, (None, "pro")
    ):
        question = replace(
            first,
            caller=DescribedCaller(user_id=user, address=address, identifiers=tenant, plan_slug=plan_slug),
            entry=first.entry if user == str(alice.pk) else NOBODY,
            endpoints=match_endpoints(first.snapshot, scope=scope, route=None, name=None, method="GET"),
            scope=scope,
            now_us=first.now_us + hours * 3600 * 10**6,
        )
        found.append(resolve(question))
        assert found[-1] == resolve_uncached(question)
    assert len(first.snapshot.memo.resolutions) < len(found) / 2, "what nothing tells apart is found again"


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


@database
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


@database
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
            def _find(self, kind: str, seen: set[str] = looked_up) -> str | None:
                seen.add(kind)
                return None

        resolve(replace(question, caller=Watched(user_id=None, address=ADDRESS)))
        assert looked_up == wanted


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies")
def test_plans_shed_load_by_sharing_one_counter_with_different_limits(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": "tests.project.views.tenant"}
    search = Endpoint.objects.create(name="search")
    for slug, rates in (("free", "2/hour"), ("pro", "3/hour")):
        plan = Plan.objects.create(name=slug, slug=slug)
        RatePolicy.objects.create(plan=plan, endpoint=search, counted_per="everyone", rates=rates)

    def admitted(plan: str) -> bool:
        return check_request(request_from(tenant=plan), scope="search").allowed

    assert [admitted(plan) for plan in ("pro", "free", "free", "pro", "pro")] == [True, True, False, True, False]
