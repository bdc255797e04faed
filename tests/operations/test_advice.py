"""Advice on policies: what is proved is reported, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from django.utils import translation

from django_ratequota import Rate
from django_ratequota.engine.rates import parse_rates
from django_ratequota.models import Endpoint, Plan, RatePolicy
from django_ratequota.operations.advice import about_endpoint, about_policy, about_saved
from django_ratequota.operations.replay import replay
from django_ratequota.policies.facts import EndpointFacts, PolicyFacts
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


def advise(own: PolicyFacts, endpoint: EndpointFacts | None = None) -> list[str]:
    return about_policy(own, endpoint, NOON_US)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"mode": "off"}, "because its mode is “off”"),
        ({"mode": "log"}, ""),
        ({"ends_us": NOON_US}, "has ended and never applies again"),
        ({"ends_us": NOON_US + 1}, ""),
        ({"starts_us": NOON_US + DAY}, ""),
    ],
)
def test_policies_that_never_apply_are_reported(own: dict[str, Any], expected: str) -> None:
    found = advise(policy(**own))
    assert len(found) == bool(expected)
    assert expected in "".join(found)


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
def test_query_count_does_not_grow_with_rows() -> None:
    rows = [
        RatePolicy.objects.create(
            plan=Plan.objects.create(name=f"p{number}", slug=f"p{number}"),
            endpoint=Endpoint.objects.create(name=f"e{number}", cost=7),
            rates="6/min",
        )
        for number in range(9)
    ]
    assert queries(lambda: about_saved(rows[:1])) == queries(lambda: about_saved(rows)) == 1
    assert all("always refused" in text for [text] in about_saved(rows))
