"""DRF's errors as problem details: refusals, and nothing else; also beside a project's own exception handler."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client
from drf_standardized_errors.handler import exception_handler as standardized
from rest_framework.renderers import BrowsableAPIRenderer, JSONRenderer
from rest_framework.test import APIRequestFactory
from rest_framework.throttling import BaseThrottle

from django_ratequota.errors import problem_details
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.throttling import QuotaThrottle
from tests.project.views import Search

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

TYPES = "https://iana.org/assignments/http-problem-types#"
THROTTLES = ["django_ratequota.throttling.QuotaThrottle"]
DOWN = {"REDIS_URL": "redis://127.0.0.1:1/0", "STATISTICS_SECONDS": 0}
both = problem_details(standardized)


@pytest.fixture
def limited(search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="1/hour")


@pytest.fixture
def handled(settings: Any) -> Any:
    """Has DRF use the handler of that name."""

    def use(path: str) -> None:
        settings.REST_FRAMEWORK = {"DEFAULT_THROTTLE_CLASSES": THROTTLES, "EXCEPTION_HANDLER": path}

    return use


@pytest.fixture(autouse=True)
def ours(handled: Any) -> None:
    handled("django_ratequota.errors.exception_handler")


def refused(client: Client) -> Any:
    client.get("/search/")
    return client.get("/search/")


@pytest.mark.usefixtures("limited")
def test_a_refusal_is_what_it_is_outside_drf(client: Client) -> None:
    response = refused(client)
    assert (response.status_code, response["Content-Type"]) == (429, "application/problem+json")
    wait = int(response["Retry-After"])
    assert 3590 < wait <= 3600
    assert response.json() == {
        "type": TYPES + "quota-exceeded",
        "title": "Quota exceeded",
        "status": 429,
        "detail": "Too many requests. Try again in 60 minutes.",
        "violated_policies": ["search/hour"],
        "violated-policies": ["search/hour"],
        "retry_after": wait,
    }
    assert response["RateLimit-Policy"] == '"search/hour";q=1;w=3600'
    outside = client.get("/decorated/", headers={"Accept": "application/json"})
    assert outside.json() | {"detail": "", "retry_after": 0} == response.json() | {"detail": "", "retry_after": 0}


def test_a_policy_that_denies_without_a_store(client: Client, settings: Any, search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="9/hour", on_error="deny")
    settings.RATEQUOTA = DOWN
    response = client.get("/search/")
    assert (response.status_code, response["Content-Type"]) == (503, "application/problem+json")
    assert (response["Retry-After"], response.json()["retry_after"]) == ("1", 1)
    assert response.json()["type"] == TYPES + "temporary-reduced-capacity"
    assert response.json()["violated-policies"] == ["search/hour"]


def test_other_errors_are_drfs(client: Client) -> None:
    response = client.post("/search/")
    assert (response.status_code, response["Content-Type"]) == (405, "application/json")
    assert response.json() == {"detail": 'Method "POST" not allowed.'}


class Never(BaseThrottle):
    def allow_request(self, request: Any, view: Any) -> bool:
        return False

    def wait(self) -> float:
        return 7200.3


@pytest.mark.usefixtures("limited")
def test_other_throttles_errors_are_theirs_and_the_longest_wait_counts() -> None:
    view = type("Both", (Search,), {"throttle_classes": [QuotaThrottle, Never]}).as_view()
    theirs, both = (view(APIRequestFactory().get("/")) for _ in range(2))
    said = "Request was throttled. Expected available in 7201 seconds."
    assert (theirs.status_code, theirs.data) == (429, {"detail": said})
    assert (both.headers["Retry-After"], both.data["retry_after"], both.data["detail"]) == ("7201", 7201, said)
    assert both.data["violated-policies"] == ["search/hour"]


@pytest.mark.usefixtures("limited")
def test_the_browsable_api_stays_html(monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    monkeypatch.setattr(Search, "renderer_classes", [JSONRenderer, BrowsableAPIRenderer])
    client.get("/search/")
    response = client.get("/search/", headers={"Accept": "text/html"})
    assert (response.status_code, response["Content-Type"]) == (429, "text/html; charset=utf-8")
    assert b"violated-policies" in response.content


# --- Beside drf-standardized-errors. ---


@pytest.mark.usefixtures("limited")
def test_both_handlers_together_keep_every_key(client: Client, handled: Any) -> None:
    handled("tests.front.test_errors.both")
    response = refused(client)
    wait = int(response["Retry-After"])
    assert (response.status_code, response["Content-Type"]) == (429, "application/problem+json")
    assert (response.json()["type"], response.json()["retry_after"]) == (TYPES + "quota-exceeded", wait)
    assert response.json()["errors"] == [
        {"code": "throttled", "detail": "Too many requests. Try again in 60 minutes.", "attr": None}
    ]
