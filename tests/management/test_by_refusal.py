"""``explain``, ``reset``, ``give-back`` and ``boost`` of a refusal, and of a path whose limits differ by method."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from django_ratequota.decorators import exempt, ratequota
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.monitoring.collector import collector
from tests.support.commands import run

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "recording")]


class Exports(View):
    """Limits GET and POST apart."""

    @method_decorator(ratequota(scope="search"))
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    @method_decorator(ratequota(scope="exports"))
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


class Orders(View):
    """Answers POST alone, at another scope than its class names."""

    throttle_scope = "search"

    @method_decorator(ratequota(scope="exports"))
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


class Reports(View):
    """Its GET is exempt."""

    @exempt
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    def put(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


@ratequota
def search(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


urlpatterns = [
    path("exports/", Exports.as_view()),
    path("orders/", Orders.as_view()),
    path("reports/", Reports.as_view()),
    path("search/", search),
    path("search/all/", search),
]


@pytest.fixture(autouse=True)
def limits(settings: Any) -> None:
    """Five requests an hour in all, one of them an export, and one by POST to the page of all results."""
    settings.ROOT_URLCONF = __name__
    exports = Endpoint.objects.create(name="exports")
    posted = Endpoint.objects.create(name="posted", routes="/search/all/", methods="POST")
    Endpoint.objects.create(name="search", routes="/search/")
    RatePolicy.objects.create(rates="5/hour")
    RatePolicy.objects.create(endpoint=exports, rates="1/hour")
    RatePolicy.objects.create(endpoint=posted, rates="1/hour")


@pytest.fixture
def alice() -> Client:
    client = Client()
    client.force_login(User.objects.create(username="alice"))
    return client


def refusal_of(client: Client) -> str:
    """Export until that is refused; returns the refusal's id."""
    answers = [client.post("/exports/") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    collector.flush()
    return str(answers[-1].json()["refusal_id"])


@pytest.mark.parametrize("verb", ["reset", "give-back --units 1", "boost"])
def test_a_refused_customer_is_helped_by_the_refusals_id(alice: Client, verb: str) -> None:
    """Regression: ``reset --path`` took GET for granted, reset other counters, and POST was refused as before."""
    refusal_id = refusal_of(alice)
    assert "a request of cost 1 would be refused now, by exports: 1/hour" in run("explain", "--id", refusal_id)
    assert "exports" in run(*verb.split(), "--id", refusal_id.upper())
    assert "a request of cost 1 would be admitted now" in run("explain", "--id", refusal_id)
    assert alice.post("/exports/").status_code == 200


def test_an_id_replaces_the_customer_and_the_request(alice: Client) -> None:
    refusal_id = refusal_of(alice)
    text = r"Leave out either --id or --user and --path, because a refusal names both the customer and the request\."
    for verb in ("explain", "reset", "boost"):
        with pytest.raises(CommandError, match=text):
            run(verb, "--id", refusal_id, "--user", "bob", "--path", "/exports/")
    text = r"No refusal 'zzzzzzzzzz' is recorded\. .* 48 hours\. .* --user alice --path /search/ --method POST"
    for verb in ("explain", "reset", "boost"):
        with pytest.raises(CommandError, match=text):
            run(verb, "--id", "zzzzzzzzzz")


def test_a_refusal_at_a_route_that_is_gone_has_no_place(
    alice: Client, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its route and scope only the limits for all endpoints are left, which did not refuse it."""
    answers = [alice.post("/search/all/") for _ in range(2)]
    collector.flush()
    monkeypatch.setattr(sys.modules[__name__], "urlpatterns", urlpatterns[:2])
    settings.ROOT_URLCONF = "tests.project.urls"
    for verb in ("explain", "reset", "boost"):
        with pytest.raises(CommandError, match=r"no route /search/all/ .* with --user alice --endpoint"):
            run(verb, "--id", answers[-1]["X-RateLimit-Refusal"])


@pytest.mark.parametrize(
    ("place", "methods"),
    [
        ("--path /exports/", "--method GET or --method POST"),
        ("--path /search/all/", "--method GET or --method POST"),
        ("--path /reports/", "--method GET or --method PUT"),
    ],
)
@pytest.mark.parametrize("verb", ["explain", "reset", "boost", "give-back --units 1"])
def test_a_path_whose_limits_differ_by_method_needs_one(alice: Client, verb: str, place: str, methods: str) -> None:
    with pytest.raises(CommandError, match=rf"limits .* depend on the method\. Write {methods}\."):
        run(*verb.split(), "--user", "alice", *place.split())


@pytest.mark.parametrize(
    ("place", "limit"),
    [
        ("--path /exports/ --method POST", "exports: 1/hour"),
        ("--path /exports/ --method post", "exports: 1/hour"),
        ("--path /orders/", "exports: 1/hour"),
        ("--path /search/", "all endpoints: 5/hour"),
        ("--path /search/all/ --method PUT", "posted: 1/hour"),
        ("--endpoint exports", "exports: 1/hour"),
        ("--endpoint posted", "posted: 1/hour"),
        ("--endpoint search", "all endpoints: 5/hour"),
    ],
)
def test_a_place_that_is_alike_for_its_methods_needs_none(alice: Client, place: str, limit: str) -> None:
    assert f"{limit} of user:" in run("explain", "--user", "alice", *place.split())
    assert f"reset {limit} of user:" in run("reset", "--user", "alice", *place.split())
