"""Any text and any number, wherever clients may put them: documented errors, no 500, no shared counter."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.test import AsyncClient, Client
from hypothesis import example, given
from hypothesis import strategies as st

from django_ratequota import Bucket, Decision, Limiter, acheck_request, check_request
from django_ratequota.exceptions import InvalidBucket, InvalidCost
from django_ratequota.models import Endpoint, Plan, RatePolicy
from django_ratequota.runtime import default_limiter
from tests.engine.test_keys import BUCKETS, TEXT, counter
from tests.project.views import request_from
from tests.support.properties import examples

EXAMPLES = examples(150)
MAX_COST = 10**12

INTEGERS = st.integers(-2, 12) | st.integers() | st.sampled_from([MAX_COST, MAX_COST + 1, 2**53, 2**63, 10**400])
ANYTHING = (
    INTEGERS
    | st.floats()
    | st.booleans()
    | st.none()
    | TEXT
    | st.binary(max_size=5)
    | st.decimals()
    | st.fractions()
    | st.lists(st.integers(), max_size=2)
    | st.sampled_from([10.0, 1e308, -0.0, "5", "nan", b"5", object(), int, {}, 3 + 0j])
)
#: Texts that some parser between client and counter takes apart.
HEADER = st.text(st.characters(max_codepoint=255), max_size=40) | st.text("0123.:[]%,;=/*q \"'\\abcf\t", max_size=40)
PATHS = st.sampled_from(
    "/plain/ /aplain/ /decorated/ /adecorated/ /api/reports/ /v1/items/1/ /files /nowhere".split()
)
NAMES = (
    "X-Forwarded-For X-Api-Key Accept Accept-Language User-Agent Host Cookie Content-Type RateLimit X-Requested-With"
).split()


def is_cost(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_COST


@given(
    verb=st.sampled_from(["check", "peek", "charge", "refund"]),
    buckets=st.lists(BUCKETS, max_size=4),
    cost=ANYTHING,
    awaited=st.booleans(),
)
@EXAMPLES
def test_the_limiter_decides_or_raises_a_documented_error(
    redis_client: redis.Redis, limiter: Limiter, verb: str, buckets: list[Bucket], cost: Any, awaited: bool
) -> None:
    duplicate = len({counter(bucket) for bucket in buckets}) < len(buckets)
    try:
        if awaited:
            decision = asyncio.run(getattr(limiter, f"a{verb}")(buckets, cost))
        else:
            decision = getattr(limiter, verb)(buckets, cost)
    except InvalidCost:
        assert not is_cost(cost)
    except InvalidBucket:
        assert duplicate
    else:
        assert is_cost(cost)
        assert not duplicate
        assert [status.bucket for status in decision.statuses] == buckets
        assert all(0 <= s.remaining <= s.limit and s.reset_after_us >= 0 for s in decision.statuses)
    for key in redis_client.scan_iter("rqtest:*", count=1000):
        assert len(key) <= 128
        assert redis_client.pttl(key) != -1  # 0, -2: one of an earlier example ends, or has ended meanwhile


class Principal:
    """A principal of a token scheme: no row of the user model, with any text as its key."""

    is_authenticated = True

    def __init__(self, pk: str) -> None:
        self.pk = pk


@pytest.fixture
def everything_counts(settings: Any, transactional_db: None, fresh_policies: None) -> Iterator[None]:
    """Policies counted per each kind of subject, some always refusing, for valid and invalid requests."""
    settings.RATEQUOTA = {
        **settings.RATEQUOTA,
        "ENFORCE_ALL": True,
        "TRUSTED_PROXIES": ["127.0.0.0/8", "unix"],
        "IDENTIFIERS": {"tenant": "tests.project.views.tenant", "api_key": "tests.project.views.api_key"},
    }
    search = Endpoint.objects.create(name="search", routes="/plain/ v1:*")
    for counted_per in ("caller", "ip", "everyone", "tenant", "api_key"):
        RatePolicy.objects.create(counted_per=counted_per, rates="1000000/3650day")
    for subject in ("ip:203.0.113.0/24", "ip:2001:db8::/32", "tenant:a", "api_key:a"):
        RatePolicy.objects.create(subject=subject, rates="5/3650day, 7/3650day gcra, 9/month")
    RatePolicy.objects.create(endpoint=search, rates="blocked")
    RatePolicy.objects.create(
        plan=Plan.objects.create(name="Free", slug="free", default_for="anonymous"), rates="9/s"
    )
    yield
    default_limiter().store.close()


@given(scope=TEXT | st.none(), tenant=TEXT, key=TEXT, address=TEXT, user=TEXT | st.none(), cost=ANYTHING)
@example(scope=None, tenant="", key="", address="", user="9" * 19, cost=1)
@example(scope=None, tenant="", key="", address="", user="-" + "9" * 30, cost=1)
@example(scope=None, tenant="", key="", address="", user="1" * 5000, cost=1)
@example(scope=None, tenant="", key="", address="", user="\x00", cost=None)
@EXAMPLES
@pytest.mark.usefixtures("everything_counts")
def test_a_request_is_decided_or_its_cost_is_wrong(
    scope: str | None, tenant: str, key: str, address: str, user: str | None, cost: Any
) -> None:
    for check in (check_request, async_to_sync(acheck_request)):
        request = request_from(
            None if user is None else Principal(user), address, headers={"X-Api-Key": key}, tenant=tenant
        )
        try:
            decision: Decision = check(request, scope, cost)
        except InvalidCost:
            assert cost is not None
            assert not is_cost(cost)
        else:
            assert cost is None or is_cost(cost)
            assert not decision.error
            assert decision is request.ratequota


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies")
@pytest.mark.parametrize("pk", ["1_0", " 10", "10\n", "+10", "010", "\u0661\u0660", "10.0", "9" * 19, "10"])
def test_a_key_that_reads_like_another_user_s(pk: str) -> None:
    """int() takes many texts for ten, and the database's driver takes no number of twenty digits."""
    RatePolicy.objects.create(user=User.objects.create(pk=10, username="ten"), rates="blocked")
    assert check_request(request_from(Principal(pk))).allowed is (pk != "10")


@given(
    path=PATHS,
    more=HEADER,
    query=HEADER,
    method=st.sampled_from(["GET", "HEAD", "OPTIONS", "POST", "TRACE"]) | HEADER.filter(bool),
    headers=st.dictionaries(st.sampled_from(NAMES), HEADER, max_size=5),
    address=HEADER | st.sampled_from(["", "127.0.0.1", "203.0.113.7", "2001:db8::1"]),
)
@example(path="/plain/", more="", query="", method="GET", headers={"Accept": ";q=,*/*;q=x"}, address="")
@EXAMPLES
@pytest.mark.usefixtures("everything_counts")
def test_any_text_in_any_header(
    path: str, more: str, query: str, method: str, headers: dict[str, str], address: str
) -> None:
    """The test client raises a view's exceptions, so any response of 500 or above fails here."""
    about = {"headers": headers, "QUERY_STRING": query, "REMOTE_ADDR": address}
    for place in (path, path + more):
        response = Client().generic(method, "/", PATH_INFO=place, **about)
        assert response.status_code < 500
        if place in ("/plain/", "/v1/items/1/", "/decorated/") and method in ("GET", "HEAD"):
            assert response.status_code == 429, "blocked for all callers"


@given(path=PATHS, headers=st.dictionaries(st.sampled_from(NAMES), HEADER, max_size=5))
@examples(60)
@pytest.mark.usefixtures("everything_counts")
def test_no_request_is_a_500_under_asgi(path: str, headers: dict[str, str]) -> None:
    assert async_to_sync(AsyncClient().get)(path, headers=headers).status_code < 500
