"""What one request makes the app work does not grow with the headers that its client sends."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from django.http import request as django_request
from django.test import Client
from django.urls import path
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.throttling import BaseThrottle

from django_ratequota.compat.drf import SimpleRateThrottle
from django_ratequota.compat.ratelimit import get_usage
from django_ratequota.engine.decision import LimitRequest
from django_ratequota.engine.keys import short
from django_ratequota.engine.limiter import Limiter
from django_ratequota.models import RatePolicy
from django_ratequota.operations.explain import explain_caller
from django_ratequota.policies.requests import caller as caller_module
from django_ratequota.policies.requests.caller import DescribedCaller
from django_ratequota.throttling import QuotaThrottle
from tests.conftest import Get
from tests.project import views

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies"),
    pytest.mark.urls(__name__),
]

#: Views that are refused by the decorator, and by the middleware.
REFUSED = ["/bare/", "/adecorated/", "/plain/", "/aplain/"]


class Negotiation(DefaultContentNegotiation):
    calls = 0

    def select_renderer(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        Negotiation.calls += 1
        return super().select_renderer(request, *args, **kwargs)


class Picking(views.Search):
    """Says for each request which throttles hold it: with JSON, none."""

    content_negotiation_class = Negotiation

    def get_throttles(self) -> list[BaseThrottle]:
        return [QuotaThrottle()]


urlpatterns = [
    path("bare/", views.bare),
    path("adecorated/", views.adecorated),
    path("plain/", views.plain),
    path("aplain/", views.aplain),
    path("picking/", Picking.as_view()),
]


@pytest.fixture(autouse=True)
def enforce_all(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True, "TRUSTED_PROXIES": ["10.0.0.0/8"]}


@pytest.fixture
def blocked(db: None) -> None:
    RatePolicy.objects.create(rates="blocked")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The media ranges of the client that were parsed."""
    found: list[str] = []

    class Counted(django_request.MediaType):
        def __init__(self, text: str) -> None:
            if "x-" in text:
                found.append(text)
            super().__init__(text)

    monkeypatch.setattr(django_request, "MediaType", Counted)
    return found


def ranges(size: int) -> str:
    """An Accept header of ``size`` bytes that nobody has sent before."""
    mark = uuid4().hex[:8]
    return ",".join(f"x-{mark}/{number};q=0.{number % 9 + 1}" for number in range(size // 10))[:size]


@pytest.mark.usefixtures("blocked")
@pytest.mark.parametrize("page", REFUSED)
@pytest.mark.parametrize("size", [0, 2_000, 60_000, 1_000_000])
def test_a_long_accept(get: Get, parsed: list[str], page: str, size: int) -> None:
    """60 KB took 110 ms of the event loop, and 1 MB 1.9 s."""
    many_short = ",".join(f"x-{uuid4().hex[:4]}{n}" for n in range(100))
    response = get(page, headers={"Accept": ranges(size) or many_short})
    assert (response.status_code, response["Content-Type"]) == (429, "application/problem+json")
    assert parsed, "it was negotiated about"
    assert sum(map(len, parsed)) <= 1024
    assert len(parsed) == len(set(parsed)) <= 20


@pytest.mark.usefixtures("blocked")
@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        ("text/plain, " + ranges(60_000), "text/plain; charset=utf-8"),
        (ranges(60_000) + ", text/plain", "application/problem+json"),
        # The first kilobyte ends within a range.
        ("x/y," * 253 + "z,text/plainness", "application/problem+json"),
        ("text/plain;" + "x" * 60_000, "application/problem+json"),
    ],
    ids=["first", "last", "cut", "one"],
)
def test_what_counts_of_it_is_the_beginning(get: Get, accept: str, media_type: str) -> None:
    assert get("/bare/", headers={"Accept": accept})["Content-Type"] == media_type


@pytest.mark.usefixtures("blocked")
@pytest.mark.parametrize("page", REFUSED)
def test_an_accept_that_django_cannot_read_is_no_500(get: Get, page: str) -> None:
    """A parameter in an unknown character set made an error page, and a mail, of a refusal."""
    response = get(page, headers={"Accept": f"text/html;a*=x-{uuid4().hex}''b"})
    assert (response.status_code, response["Content-Type"]) == (429, "application/problem+json")


@pytest.mark.parametrize(("size", "calls"), [(20, 2), (60_000, 1)])
def test_a_view_that_picks_its_throttles_is_not_made_to_negotiate_twice(
    get: Get, monkeypatch: pytest.MonkeyPatch, size: int, calls: int
) -> None:
    """A long Accept is enforced by the middleware as well, so it opens no way around."""
    RatePolicy.objects.create(rates="1/hour")
    monkeypatch.setattr(Negotiation, "calls", 0)
    accept = f"application/json,{ranges(size)}"
    assert get("/picking/", headers={"Accept": accept}).status_code == 200
    assert Negotiation.calls == calls
    assert get("/picking/", headers={"Accept": accept}).status_code == 429


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were read as addresses."""
    found: list[str] = []
    plain = caller_module.ip_address

    def ip_address(text: Any) -> Any:
        found.append(text)
        return plain(text)

    monkeypatch.setattr(caller_module, "ip_address", ip_address)
    return found


@pytest.mark.parametrize(
    "forwarded",
    [
        "10.0.0.1," * 6_000 + "10.0.0.1",
        "," * 60_000,
        "1" * 60_000,
        "10.0.0.1%" + "x" * 60_000,
        "fe80::1%" + "x" * 60_000,
    ],
)
def test_a_long_x_forwarded_for(read: list[str], forwarded: str) -> None:
    """A client behind a trusted proxy wrote thousands of trusted addresses, each of which was read."""
    RatePolicy.objects.create(rates="9/hour", counted_per="ip")
    response = Client().get("/bare/", REMOTE_ADDR="10.0.0.9", headers={"X-Forwarded-For": forwarded})
    assert response.status_code == 200
    assert 0 < len(read) <= 33
    assert max(map(len, read)) <= 100


@pytest.fixture
def subjects(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The subjects that Redis was asked about."""
    found: list[str] = []
    steps = Limiter.ask

    def begin(self: Limiter, request: LimitRequest) -> Any:
        found.extend(bucket.subject for bucket in request.buckets)
        return steps(self, request)

    monkeypatch.setattr(Limiter, "ask", begin)
    return found


def test_a_long_api_key(settings: Any, subjects: list[str]) -> None:
    """Thousands of buckets are remembered, with the names of their callers: 64 KB each, as clients please."""
    settings.RATEQUOTA = {
        **settings.RATEQUOTA,
        "IDENTIFIERS": {"api_key": "tests.project.views.api_key"},
        "CALLER": ["api_key", "ip"],
    }
    RatePolicy.objects.create(rates="2/hour")
    keys = ["k" * 60_000, "k" * 60_001, "k" * 200, "k" * 201]
    for key in keys:
        answers = [Client().get("/bare/", headers={"X-Api-Key": key}).status_code for _ in range(3)]
        assert answers == [200, 200, 429], "each has a counter of its own"
    assert max(map(len, subjects)) <= len("api_key:") + 200
    assert f"api_key:{'k' * 200}" in subjects, "what a policy can name stays as it is"
    found = explain_caller(DescribedCaller(user_id=None, address=None, identifiers={"api_key": keys[0]}), scope=None)
    assert not found.decision.allowed, "operators find it by the whole key"
    RatePolicy.objects.create(subject=f"api_key:{short(keys[0])}", rates="unlimited")
    assert Client().get("/bare/", headers={"X-Api-Key": keys[0]}).status_code == 200, "and make it an override"


def test_nor_does_one_by_a_drop_in(subjects: list[str]) -> None:
    request = views.request_from(headers={"X-Api-Key": "k" * 60_000})
    get_usage(request, group="all", key="header:x-api-key", rate="5/h", increment=True)

    class Long(SimpleRateThrottle):
        rate = "5/hour"

        def get_cache_key(self, request: Any, view: Any) -> str:
            return "k" * 60_000

    assert Long().allow_request(request, None)
    assert len(subjects) == 2
    assert max(map(len, subjects)) <= 220


def test_what_the_proxies_wrote_is_at_its_end(read: list[str]) -> None:
    client = "203.0.113.7"
    long = "10.0.0.1," * 6_000 + f"{client},10.0.0.2,10.0.0.3"
    RatePolicy.objects.create(rates="9/hour", counted_per="ip")
    for forwarded, remaining in ((client, "8"), (long, "7")):
        response = Client().get("/bare/", REMOTE_ADDR="10.0.0.9", headers={"X-Forwarded-For": forwarded})
        assert response["X-RateLimit-Remaining"] == remaining
