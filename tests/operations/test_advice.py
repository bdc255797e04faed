"""Advice on policies: what is proved is reported, and nothing else."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone, translation

from django_ratequota import Rate
from django_ratequota.engine.rates import parse_rates
from django_ratequota.models import Endpoint, Plan, RatePolicy, SubjectList
from django_ratequota.operations.advice import about_endpoint, about_policy, about_saved
from django_ratequota.operations.replay import replay
from django_ratequota.policies.facts import EndpointFacts, PolicyFacts, member_facts
from tests.conftest import NOON_US
from tests.policies.test_cache import queries

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
    return {"subject": f"ip:{text}", "network": member_facts(1, 1, None, f"ip:{text}", None, None).key}


def advise(own: PolicyFacts, *others: PolicyFacts, endpoint: EndpointFacts | None = None) -> list[str]:
    return about_policy(own, (*others, own), endpoint, NOON_US)


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        ({"mode": "off"}, [], "because its mode is “off”"),
        ({"mode": "log"}, [], ""),
        ({"ends_us": NOON_US}, [], "has ended and never applies again"),
        ({"ends_us": NOON_US + 1}, [], ""),
        ({"starts_us": NOON_US + DAY}, [], ""),
        # An open policy loses to a dated one, for as long as that lasts.
        ({}, [{"starts_us": NOON_US - DAY}], "takes precedence"),
        ({}, [{"starts_us": NOON_US - DAY, "ends_us": NOON_US + DAY}], ""),
        ({}, [{"starts_us": NOON_US + 1}], ""),
        ({}, [{"starts_us": NOON_US - DAY, "mode": "off"}], ""),
        ({}, [{"starts_us": NOON_US - DAY, "plan_id": 1}], ""),
        ({}, [{"starts_us": NOON_US - DAY, "endpoint_id": 1}], ""),
        ({}, [{"starts_us": NOON_US - DAY, "counted_per": "ip"}], ""),
        ({"user": "1"}, [{"user": "1", "starts_us": NOON_US - DAY}], "takes precedence"),
        ({"user": "1"}, [{"user": "2", "starts_us": NOON_US - DAY}], ""),
        ({"subject": "tenant:a"}, [{"subject": "tenant:b", "starts_us": 1}], ""),
        # A block of a user or a subject wins over dated policies, and that of a wider network over a narrower one.
        ({"user": "1", "starts_us": 5}, [{"user": "1", "rates": "blocked"}], "takes precedence"),
        ({"user": "1", "starts_us": 5}, [{"user": "1", "rates": "blocked", "ends_us": NOON_US + DAY}], ""),
        ({"user": "1"}, [{**network("203.0.113.0/24"), "rates": "blocked"}], ""),
        (network("203.0.113.7"), [{**network("203.0.113.0/24"), "rates": "blocked"}], "takes precedence"),
        (network("203.0.113.7"), [{**network("203.0.113.0/24")}], ""),
        (network("203.0.0.0/16"), [{**network("203.0.113.0/24"), "rates": "blocked"}], ""),
        (network("2001:db8::7"), [{**network("0.0.0.0/0"), "rates": "blocked"}], ""),
        # Of two dated policies the one that started last wins.
        ({"starts_us": 5, "ends_us": NOON_US + DAY}, [{"starts_us": 6, "ends_us": NOON_US + DAY}], "precedence"),
        ({"starts_us": 5, "ends_us": NOON_US + DAY}, [{"starts_us": 6, "ends_us": NOON_US + DAY - 1}], ""),
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


def test_a_cost_above_the_limit_is_reported() -> None:
    search = EndpointFacts(id=1, name="search", routes=(), methods=frozenset(), cost=5)
    assert advise(policy("5/min", endpoint_id=1), endpoint=search) == []
    (advice,) = advise(policy("4/min, 1000/day", endpoint_id=1), endpoint=search)
    assert "because “4/min” has room for at most 4" in advice
    assert not any(replay([Rate.parse("4/min")], [(NOON_US + day * DAY, 5) for day in range(3)]))


def test_a_log_of_many_requests_is_reported() -> None:
    assert advise(policy("100000/day sliding_window_log, 1000000/day sliding_window_counter")) == []
    assert advise(policy("unlimited", rates="unlimited")) == []
    (advice,) = advise(policy("10/s, 500000/day sliding_window_log"))
    assert (
        "“500000/day sliding_window_log” stores every request of the period, up to 7 MB for each customer" in advice
    )


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


@pytest.mark.django_db
@pytest.mark.usefixtures("redis_client")
class TestRows:
    def advice(self, *rows: RatePolicy) -> list[str]:
        return [text for found in about_saved(rows, RatePolicy.objects.all()) for text in found]

    def test_a_saved_policy_does_not_compete_with_itself(self) -> None:
        own = RatePolicy.objects.create(rates="5/s", starts_at=timezone.now() - timedelta(days=1))
        assert self.advice(own) == []
        assert "takes precedence" in self.advice(RatePolicy(rates="5/s"))[0]
        assert self.advice(RatePolicy(rates="5/s", starts_at=timezone.now())) == []

    def test_policies_hidden_from_the_operator_are_not_mentioned(self) -> None:
        RatePolicy.objects.create(rates="5/s", starts_at=timezone.now() - timedelta(days=1))
        own = RatePolicy(rates="5/s")
        assert about_saved([own], RatePolicy.objects.none()) == [[]]

    @pytest.mark.parametrize("name", ["user", "subject", "subject_list", "plan", "everyone", "network"])
    def test_rivals_for_the_same_callers_are_found_among_others(self, name: str) -> None:
        """Regression: all policies for all endpoints were read, 20,000 of them in a second."""
        search = Endpoint.objects.create(name="search", cost=7)
        audiences: dict[str, dict[str, Any]] = {
            "user": {"user": User.objects.create(username="alice")},
            "subject": {"subject": "tenant:acme"},
            "subject_list": {"subject_list": SubjectList.objects.create(name="Bots")},
            "plan": {"plan": Plan.objects.create(name="Free", slug="free")},
            "everyone": {},
            "network": {"subject": "ip:10.0.0.0/8", "rates": "blocked"},
        }
        policies = {
            one: RatePolicy.objects.create(endpoint=search, starts_at=timezone.now(), **{"rates": "9/s", **audience})
            for one, audience in audiences.items()
        }
        narrower = {"subject": "ip:10.1.0.0/16"} if name == "network" else audiences[name]
        own = RatePolicy(endpoint=search, **{"rates": "8/s", **narrower})
        (advice,) = self.advice(own)
        assert f"policy {policies[name].pk} ({policies[name].rates}) takes precedence" in advice
        own.endpoint = None
        assert self.advice(own) == []
        assert "always refused" in self.advice(RatePolicy(rates="6/min", endpoint=search, counted_per="ip"))[0]

    def test_query_count_does_not_grow_with_rows(self) -> None:
        rows = [
            RatePolicy.objects.create(
                plan=Plan.objects.create(name=f"p{number}", slug=f"p{number}"),
                endpoint=Endpoint.objects.create(name=f"e{number}"),
                rates="5/s",
            )
            for number in range(9)
        ]
        assert queries(lambda: self.advice(rows[0])) == queries(lambda: self.advice(*rows)) == 2
