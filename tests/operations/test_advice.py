"""Advice on policies: replays and limiters confirm each sentence; where nothing can be proved, there is none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from ipaddress import ip_network
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone, translation
from hypothesis import given
from hypothesis import strategies as st

from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.engine.rates import ALGORITHMS, BURST_ALGORITHMS, parse_rates
from django_ratequota.models import Endpoint, Plan, PlanAssignment, RatePolicy
from django_ratequota.operations.advice import Surroundings, about_endpoint, about_policy, about_saved
from django_ratequota.operations.redundancy import binds_first
from django_ratequota.operations.replay import replay
from django_ratequota.policies.facts import EndpointFacts, PolicyFacts
from tests.conftest import NOON_US, Clock
from tests.support.properties import examples

DAY = 86_400 * 10**6
_ids = itertools.count(1)


def policy(rates: str = "5/s", /, **fields: Any) -> PolicyFacts:
    rates = fields.pop("rates", rates)
    plain: dict[str, Any] = {
        "id": next(_ids),
        "endpoint_id": None,
        "user": "",
        "subject": "",
        "plan_id": None,
        "counted_per": "caller",
        "text": rates,
        "rates": parse_rates(rates) if rates else (),
        "mode": "enforce",
        "on_error": "",
        "starts_us": None,
        "ends_us": None,
    }
    return PolicyFacts(**{**plain, **fields})


def network(text: str) -> dict[str, Any]:
    return {"subject": f"ip:{text}", "network": ip_network(text)}


def advise(own: PolicyFacts, *others: PolicyFacts, **around: Any) -> list[str]:
    return about_policy(own, Surroundings(now_us=NOON_US, others=(*others, own), **around))


# --- Policies that never win. ---


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        ({"mode": "off"}, [], "Its mode is off"),
        ({"mode": "log"}, [], ""),
        ({"ends_us": NOON_US}, [], "It has ended"),
        ({"ends_us": NOON_US + 1}, [], ""),
        ({"starts_us": NOON_US + DAY}, [], ""),
        # An open policy loses to a dated one, for as long as that lasts.
        ({}, [{"starts_us": NOON_US - DAY}], "never wins"),
        ({}, [{"starts_us": NOON_US - DAY, "ends_us": NOON_US + DAY}], ""),
        ({}, [{"starts_us": NOON_US + 1}], ""),
        ({}, [{"starts_us": NOON_US - DAY, "mode": "off"}], ""),
        ({}, [{"starts_us": NOON_US - DAY, "rates": ""}], ""),
        ({}, [{"starts_us": NOON_US - DAY, "user": "1"}], ""),
        ({}, [{"starts_us": NOON_US - DAY, "plan_id": 1}], ""),
        ({}, [{"starts_us": NOON_US - DAY, "endpoint_id": 1}], ""),
        ({}, [{"starts_us": NOON_US - DAY, "counted_per": "ip"}], ""),
        ({"user": "1"}, [{"user": "1", "starts_us": NOON_US - DAY}], "never wins"),
        ({"user": "1"}, [{"user": "2", "starts_us": NOON_US - DAY}], ""),
        ({"plan_id": 1}, [{"plan_id": 1, "starts_us": 1}], "never wins"),
        ({"subject": "tenant:a"}, [{"subject": "tenant:a", "starts_us": 1}], "never wins"),
        ({"subject": "tenant:a"}, [{"subject": "tenant:b", "starts_us": 1}], ""),
        # A block of a user or a subject wins over dated policies, and that of a wider network over a narrower one.
        ({"user": "1", "starts_us": 5}, [{"user": "1", "rates": "blocked"}], "never wins"),
        ({"user": "1", "starts_us": 5}, [{"user": "1", "rates": "blocked", "mode": "log"}], ""),
        ({"user": "1", "starts_us": 5}, [{"user": "1", "rates": "blocked", "ends_us": NOON_US + DAY}], ""),
        ({"plan_id": 1, "starts_us": 5}, [{"plan_id": 1, "rates": "blocked"}], ""),
        ({"user": "1", "rates": "blocked"}, [{"user": "1", "starts_us": 5}], ""),
        ({"user": "1"}, [{**network("203.0.113.0/24"), "rates": "blocked"}], ""),
        (network("203.0.113.7"), [{**network("203.0.113.0/24"), "rates": "blocked"}], "never wins"),
        (network("203.0.113.7"), [{**network("203.0.113.0/24")}], ""),
        (network("203.0.0.0/16"), [{**network("203.0.113.0/24"), "rates": "blocked"}], ""),
        (network("198.51.100.7"), [{**network("203.0.113.0/24"), "rates": "blocked"}], ""),
        (network("2001:db8::7"), [{**network("0.0.0.0/0"), "rates": "blocked"}], ""),
        ({**network("203.0.113.7"), "rates": "blocked"}, [{**network("203.0.113.0/24"), "rates": "blocked"}], ""),
        # Of two dated policies the one that started last wins.
        ({"starts_us": 5, "ends_us": NOON_US + DAY}, [{"starts_us": 6, "ends_us": NOON_US + DAY}], "never wins"),
        ({"starts_us": 5, "ends_us": NOON_US + DAY}, [{"starts_us": 6, "ends_us": NOON_US + DAY - 1}], ""),
        ({"starts_us": 6, "ends_us": NOON_US + DAY}, [{"starts_us": 5}], ""),
        ({"ends_us": NOON_US + DAY}, [{"ends_us": NOON_US + DAY}], "never wins"),
        # Several policies together may cover the whole time.
        ({}, [{"starts_us": 5, "ends_us": NOON_US + DAY}, {"starts_us": NOON_US + DAY}], "never wins"),
        ({}, [{"starts_us": 5, "ends_us": NOON_US + DAY}, {"starts_us": NOON_US + DAY + 1}], ""),
    ],
)
def test_policies_that_never_win_are_reported(
    own: dict[str, Any], others: list[dict[str, Any]], expected: str
) -> None:
    found = advise(policy(**own), *(policy("7/s", **{"starts_us": None, **other}) for other in others))
    assert len(found) == bool(expected)
    assert expected in "".join(found)


def test_the_policy_that_wins_instead_is_named() -> None:
    rival = policy("7/s", starts_us=1)
    assert f"policy {rival.id} (7/s)" in advise(policy(), rival)[0]


def test_a_policy_for_a_plan_without_callers_is_reported() -> None:
    (advice,) = advise(policy(plan_id=3), empty_plans={3: "Pr\u202eo"})
    assert "Nobody is on the plan “Pr\\u202eo”" in advice
    assert advise(policy(plan_id=4), empty_plans={3: "Pro"}) == []
    assert advise(policy(), empty_plans={3: "Pro"}) == []


# --- Redundant rates. ---


@pytest.mark.parametrize(
    ("stricter", "rate", "how"),
    [
        ("100/min", "10000/hour", "always"),
        ("10/s", "1000/min", "always"),
        ("10/s", "1000/hour", ""),
        ("100/min", "100/min leaky_bucket", "always"),
        ("100/min burst 200", "1000/min burst 199 leaky_bucket", ""),
        ("100/min burst 20", "6000/hour burst 20", "always"),
        ("100/min burst 20", "5999/hour burst 20", ""),
        ("100/hour sliding_window_log", "100/min sliding_window_log", "always"),
        ("100/hour sliding_window_log", "99/min sliding_window_log", ""),
        ("100/hour sliding_window_log", "100/min fixed_window", "always"),
        ("100/2min sliding_window_log", "100/min sliding_window_counter", "always"),
        ("100/min sliding_window_log", "100/min sliding_window_counter", ""),
        ("100/hour fixed_window", "100/min fixed_window", "always"),
        ("100/90s fixed_window", "100/min fixed_window", ""),
        ("100/month", "100/day fixed_window", "always"),
        ("100/month", "100/week fixed_window", ""),
        ("100/min sliding_window_counter", "100/min fixed_window", "always"),
        ("100/min fixed_window", "100/min sliding_window_counter", ""),
        # What a shorter window admits within a longer one.
        ("10/s fixed_window", "600/min fixed_window", "uncharged"),
        ("10/s fixed_window", "599/min fixed_window", ""),
        ("10/s fixed_window", "600/min sliding_window_log", ""),
        ("10/s fixed_window", "610/min sliding_window_log", "uncharged"),
        ("10/s sliding_window_log", "600/min sliding_window_log", "uncharged"),
        ("100/day fixed_window", "3100/month", "uncharged"),
        ("100/day fixed_window", "3099/month", ""),
        ("100/min", "199/min sliding_window_log", "uncharged"),
        ("100/min", "198/min sliding_window_log", ""),
        ("100/min sliding_window_log", "100/min", "uncharged"),
        ("100/min fixed_window", "100/min", ""),
        ("100/min fixed_window", "100/min burst 200", "uncharged"),
        ("100/min", "100/min sliding_window_counter", ""),
    ],
)
def test_when_the_stricter_rate_refuses_first(stricter: str, rate: str, how: str) -> None:
    assert binds_first(Rate.parse(stricter), Rate.parse(rate)) == how


RATES = st.builds(
    lambda limit, period, algorithm, burst: Rate(
        limit=limit,
        period=period,
        algorithm="fixed_window" if period == "month" else algorithm,
        burst=burst if algorithm in BURST_ALGORITHMS and period != "month" else None,
    ),
    st.integers(1, 6) | st.integers(7, 60),
    st.sampled_from([1, 2, 3, 10, 60, 86_400, 604_800, "month"]),
    st.sampled_from(ALGORITHMS),
    st.none() | st.integers(1, 30),
)

#: A Monday's midnight, where windows of all lengths begin.
MONDAY_US = 1_762_128_000 * 10**6
KINDS = [(algorithm, period) for algorithm in ALGORITHMS for period in (1, 2, 3, 10)]
CALENDAR: list[tuple[str, Any]] = [("fixed_window", 86_400), ("fixed_window", 604_800), ("fixed_window", "month")]


def lowest_redundant(stricter: Rate, algorithm: str, period: Any) -> Rate | None:
    """Return the rate with the lowest limit that is reported as redundant beside ``stricter``."""
    for limit in range(1, 400):
        rate = Rate(limit=limit, period=period, algorithm=algorithm)
        if binds_first(stricter, rate):
            return rate
    return None


@examples(400)
@given(
    limit=st.integers(1, 4),
    burst=st.none() | st.integers(1, 6),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS))
    | st.tuples(st.sampled_from(CALENDAR), st.sampled_from(CALENDAR)),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 1), st.booleans()), min_size=3, max_size=12),
)
def test_a_rate_reported_as_redundant_refuses_nothing(
    redis_client: redis.Redis,
    limit: int,
    burst: int | None,
    kinds: tuple[tuple[str, Any], tuple[str, Any]],
    steps: list[tuple[int, int, bool]],
) -> None:
    """Send the most requests that pass, at the edges of both rates' windows, to the lowest redundant limit."""
    (algorithm, period), (other, other_period) = kinds
    burst = burst if algorithm in BURST_ALGORITHMS else None
    stricter = Rate(limit=limit, period=period, algorithm=algorithm, burst=burst)
    rate = lowest_redundant(stricter, other, other_period)
    if rate is None or (rate.algorithm, rate.period) == (algorithm, period):
        return
    instants = {MONDAY_US + number * (stricter if own else rate).period_us + offset for number, offset, own in steps}
    attempts = [(at, 1) for at in sorted(instants) for _ in range(stricter.capacity + 1)]
    assert replay([stricter, rate], attempts) == replay([stricter], attempts)


@pytest.fixture
def limiter_and_clock(redis_client: redis.Redis) -> Iterator[tuple[Limiter, Clock]]:
    clock = Clock()
    limiter = Limiter(client=redis_client, clock=clock, prefix="rqtest", timeout=5)
    yield limiter, clock
    limiter.store.close()


@examples(300)
@given(
    stricter=RATES,
    rate=RATES,
    walk=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 10**6, 20 * 10**6, DAY]),
            st.sampled_from(["check", "check", "charge", "refund"]),
            st.integers(1, 40),
            st.booleans(),
        ),
        max_size=20,
    ),
)
def test_an_always_redundant_rate_refuses_nothing_after_charges_and_refunds(
    limiter_and_clock: tuple[Limiter, Clock], stricter: Rate, rate: Rate, walk: list[tuple[int, str, int, bool]]
) -> None:
    """Also when the stricter rate counts other requests as well."""
    if binds_first(stricter, rate) != "always":
        return
    limiter, clock = limiter_and_clock
    clock.now_us = NOON_US
    own = Bucket(f"user:{next(_ids)}", stricter, scope="all"), Bucket("user:1", rate, scope=f"s{next(_ids)}")
    for pause, verb, cost, alone in walk:
        clock.advance(us=pause)
        # Refunds need units that both were charged.
        buckets = own[:1] if alone and verb != "refund" else own
        decision = getattr(limiter, verb)(buckets, cost)
        if verb == "check" and len(decision.statuses) == 2 and decision.statuses[0].allowed:
            assert decision.statuses[1].allowed, (stricter, rate)
    limiter.reset(own)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ("100/min", []),
        ("10/s, 1000/hour, 100000/month", []),
        ("60/min burst 20, 1000/day", []),
        ("100/min, 10000/hour", ["“10000/hour” never refuses anything: “100/min” always refuses first"]),
        ("10000/hour, 100/min", ["“10000/hour” never refuses"]),
        ("100/min, 100/min leaky_bucket", ["“100/min leaky_bucket” never refuses"]),
        ("100/day fixed_window, 4000/month", ["(Unless code charges"]),
        ("unlimited", []),
        ("blocked", []),
        ("10/min burst 1000", ["same bucket as 1,000 units in 1.7 h"]),
        ("10/s burst 1000", []),
        ("1/s burst 3600", ["same bucket as 3,600 units in 1 h"]),
        ("100/min burst 200", []),
    ],
)
def test_advice_on_rates(rates: str, expected: list[str]) -> None:
    found = advise(policy(rates))
    assert len(found) == len(expected)
    assert all(part in text for part, text in zip(expected, found, strict=True))


def test_a_cost_above_the_limit_is_reported() -> None:
    search = EndpointFacts(id=1, name="search", routes=(), methods=frozenset(), cost=5)
    assert advise(policy("5/min", endpoint_id=1), endpoint=search) == []
    (advice,) = advise(policy("4/min, 1000/day", endpoint_id=1), endpoint=search)
    assert "“4/min” never has room for more than 4" in advice
    assert not any(replay([Rate.parse("4/min")], [(NOON_US + day * DAY, 5) for day in range(3)]))


ALL = {"rates": "100/min"}


@pytest.mark.parametrize(
    ("own", "others", "overridden", "reported"),
    [
        ({}, [{}], (), True),
        ({"plan_id": 1}, [{}], (), True),
        ({"user": "1"}, [{}], (), True),
        ({"plan_id": 1}, [{"plan_id": 1}, {}], (), True),
        ({"mode": "log"}, [{}], (), True),
        ({}, [{"counted_per": "ip"}], (), False),
        ({}, [{"plan_id": 1}], (), False),
        ({"plan_id": 2}, [{"plan_id": 1}, {}], (), False),
        ({}, [{"mode": "log"}], (), False),
        ({}, [{"mode": "off"}], (), False),
        ({}, [{"starts_us": 5}], (), False),
        ({}, [{"rates": "unlimited"}], (), False),
        ({}, [{}, {"user": "1"}], (), False),
        ({}, [{}, {"subject": "tenant:a"}], (), False),
        ({}, [{}, {"subject": "tenant:a", "mode": "off"}], (), True),
        ({}, [{}, {"subject": "tenant:a", "ends_us": NOON_US}], (), True),
        ({}, [{}], ("caller",), False),
        ({}, [{}], ("ip",), True),
        ({"endpoint_id": None, "starts_us": NOON_US + DAY}, [{}], (), False),
    ],
)
def test_a_tighter_limit_for_all_endpoints_is_reported(
    own: dict[str, Any], others: list[dict[str, Any]], overridden: tuple[str, ...], reported: bool
) -> None:
    mine = replace(policy("10000/hour", endpoint_id=7), **own)
    found = advise(mine, *(policy(**{**ALL, **other}) for other in others), overridden=overridden)
    assert any("for all endpoints together, counts the same callers" in text for text in found) is reported
    assert advise(replace(mine, rates=parse_rates("50/min")), *(policy(**{**ALL, **other}) for other in others)) == []


# --- Endpoints. ---


@pytest.mark.parametrize(
    ("fields", "known"),
    [
        ({"name": "search"}, True),
        ({"name": "nowhere"}, False),
        ({"name": "nowhere", "routes": "/plain/"}, True),
        ({"name": "nowhere", "routes": "/plain"}, False),
        ({"name": "nowhere", "routes": "/gone/*\nv1:*"}, True),
        ({"name": "nowhere", "routes": "/admin/*"}, True),
        ({"name": "nowhere", "routes": "*"}, True),
    ],
)
def test_an_endpoint_that_nothing_matches_is_reported(fields: dict[str, str], known: bool) -> None:
    found = about_endpoint(Endpoint(**fields))
    assert found == [] if known else "check_request(request, scope=…)" in found[0]


def test_routes_in_other_languages_match(settings: Any) -> None:
    settings.ROOT_URLCONF = "tests.project.urls_translated"
    settings.LANGUAGES = [("en", "English"), ("de", "German")]
    with translation.override("en"):
        assert about_endpoint(Endpoint(name="nowhere", routes="/de/items/")) == []
        assert about_endpoint(Endpoint(name="nowhere", routes="/fr/items/")) != []


# --- Rows. ---


@pytest.mark.django_db
@pytest.mark.usefixtures("redis_client")
class TestRows:
    def advice(self, *rows: RatePolicy) -> list[str]:
        return [text for found in about_saved(rows, RatePolicy.objects.all()) for text in found]

    def test_a_plan_without_callers_is_reported(self, settings: Any) -> None:
        free = Plan.objects.create(name="Free", slug="free")
        own = RatePolicy.objects.create(plan=free, rates="5/s")
        assert "Nobody is on the plan “Free”" in self.advice(own)[0]
        alice = User.objects.create(username="alice")
        assignment = PlanAssignment.objects.create(user=alice, plan=free, ends_at=timezone.now() - timedelta(days=1))
        assert len(self.advice(own)) == 1
        PlanAssignment.objects.filter(pk=assignment.pk).update(ends_at=timezone.now() + timedelta(days=1))
        assert self.advice(own) == []
        PlanAssignment.objects.all().delete()
        Plan.objects.filter(pk=free.pk).update(default_for="anonymous")
        assert self.advice(own) == []
        Plan.objects.filter(pk=free.pk).update(default_for="")
        assert len(self.advice(own)) == 1
        settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": "tests.project.views.api_key"}
        assert self.advice(own) == []

    def test_a_saved_policy_does_not_compete_with_itself(self) -> None:
        own = RatePolicy.objects.create(rates="5/s", starts_at=timezone.now() - timedelta(days=1))
        assert self.advice(own) == []
        assert "never wins" in self.advice(RatePolicy(rates="5/s"))[0]
        assert self.advice(RatePolicy(rates="5/s", starts_at=timezone.now())) == []

    def test_policies_hidden_from_the_operator_are_not_mentioned(self) -> None:
        RatePolicy.objects.create(rates="5/s", starts_at=timezone.now() - timedelta(days=1))
        own = RatePolicy(rates="5/s")
        assert about_saved([own], RatePolicy.objects.none()) == [[]]

    def test_the_endpoints_cost_and_the_overrides_are_queried(self) -> None:
        search = Endpoint.objects.create(name="search", cost=7)
        RatePolicy.objects.create(rates="5/min")
        own = RatePolicy(rates="6/min", endpoint=search)
        assert len(self.advice(own)) == 2
        RatePolicy.objects.create(user=User.objects.create(username="alice"), rates="9/s")
        assert "always refused" in "".join(self.advice(own))
        assert len(self.advice(own)) == 1

    def test_query_count_does_not_grow_with_rows(self) -> None:
        def count(*rows: RatePolicy) -> int:
            with CaptureQueriesContext(connection) as captured:
                self.advice(*rows)
            return len(captured)

        rows = [
            RatePolicy.objects.create(
                plan=Plan.objects.create(name=f"p{number}", slug=f"p{number}"),
                endpoint=Endpoint.objects.create(name=f"e{number}"),
                rates="5/s",
            )
            for number in range(9)
        ]
        assert count(rows[0]) == count(*rows) == 4
