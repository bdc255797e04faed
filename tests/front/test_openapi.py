"""The schema that drf-spectacular generates: valid, without warnings, and true."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import include, path
from drf_spectacular.drainage import GENERATOR_STATS, reset_generator_stats
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.settings import spectacular_settings
from drf_spectacular.utils import OpenApiResponse, extend_schema
from drf_spectacular.validation import validate_schema
from drf_standardized_errors.openapi import AutoSchema as Standardized
from rest_framework import serializers
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.throttling import AnonRateThrottle
from rest_framework.views import APIView
from rest_framework.viewsets import ModelViewSet

from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.openapi import AutoSchema, QuotaSchema
from django_ratequota.throttling import QuotaThrottle

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

RATES = {"RateLimit", "RateLimit-Policy", "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"}
PROBLEMS = "django_ratequota.errors.exception_handler"
THEIRS = "drf_standardized_errors.handler.exception_handler"


class UserSerializer(serializers.ModelSerializer[User]):
    class Meta:
        model = User
        fields = ["username"]


class Limited(APIView):
    serializer_class = UserSerializer

    def get(self, request: Any) -> Response:
        return Response({"username": "alice"})


class Own(QuotaThrottle):
    """A project's own subclass."""


class Users(ModelViewSet[User]):
    queryset = User.objects.all()
    serializer_class = UserSerializer
    throttle_classes = [Own]


class Free(Limited):
    throttle_classes = []


class Others(Limited):
    throttle_classes = [AnonRateThrottle]


class Picky(Limited):
    def get_throttles(self) -> Any:
        return [QuotaThrottle()] if self.request.user.is_authenticated else self.request.nonsense


class Combined(QuotaSchema, Standardized):
    """With drf-standardized-errors, as in the docs."""


router = SimpleRouter()
router.register("users", Users)
VIEWS = {"limited": Limited, "free": Free, "others": Others}
urlpatterns = [
    path("api/v1/", include([path(f"{name}/", view.as_view()) for name, view in VIEWS.items()])),
    path("api/v1/", include(router.urls)),
    path("api/v1/quota/", include("django_ratequota.urls")),
]


@pytest.fixture
def generate(settings: Any) -> Any:
    """The schema by an exception handler and a schema class; checked to be valid and free of complaints."""

    def run(handler: str | None = None, schema: type = AutoSchema, patterns: Any = urlpatterns, **more: Any) -> Any:
        settings.REST_FRAMEWORK = {
            "DEFAULT_THROTTLE_CLASSES": ["django_ratequota.throttling.QuotaThrottle"],
            "DEFAULT_SCHEMA_CLASS": f"{schema.__module__}.{schema.__name__}",
            **({"EXCEPTION_HANDLER": handler} if handler else {}),
        }
        reset_generator_stats()
        spectacular_settings.apply_patches(more)
        try:
            found = SchemaGenerator(patterns=patterns).get_schema(public=True)
        finally:
            spectacular_settings.clear_patches()
        complaints = {*GENERATOR_STATS._warn_cache, *GENERATOR_STATS._error_cache}
        validate_schema(found)
        return found, complaints

    return run


def responses(found: Any, name: str, method: str = "get", prefix: str = "/api/v1/") -> Any:
    return found["paths"][f"{prefix}{name}"][method]["responses"]


@pytest.mark.parametrize("version", ["3.0.3", "3.1.0"])
def test_operations_under_the_throttle_document_refusals(generate: Any, settings: Any, version: str) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 1}
    found, complaints = generate(PROBLEMS, OAS_VERSION=version)
    assert (complaints, found["openapi"]) == (set(), version)
    operations = [("limited/", "get"), ("users/", "get"), ("users/", "post"), ("users/{id}/", "delete")]
    for name, method in operations:
        documented = responses(found, name, method)
        refused, down = documented["429"], documented["503"]
        ref = {"schema": {"$ref": "#/components/schemas/QuotaProblem"}}
        assert refused["content"] == down["content"] == {"application/problem+json": ref}
        assert set(refused["headers"]) == {*RATES, "Retry-After", "X-RateLimit-Refusal"}
        assert set(down["headers"]) == {"Retry-After", "X-RateLimit-Refusal"}
        (success,) = [response for code, response in documented.items() if code.startswith("2")]
        assert set(success["headers"]) == RATES
        for name in {*RATES, "Retry-After"}:
            assert refused["headers"][name] == {"$ref": f"#/components/headers/{name}"}
            assert found["components"]["headers"][name]["description"]


def test_operations_beyond_it_do_not(generate: Any) -> None:
    found, _ = generate(PROBLEMS)
    for name in ("free/", "others/"):
        assert set(responses(found, name)) == {"200"}
        assert "headers" not in responses(found, name)["200"]


def test_the_usage_endpoint_is_typed(generate: Any) -> None:
    found, complaints = generate(patterns=[path("quota/", include("django_ratequota.urls"))])
    assert complaints == set()
    operation = found["paths"]["/quota/usage/"]["get"]
    assert [(one["name"], one["in"]) for one in operation["parameters"]] == [("scope", "query")]
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/QuotaUsage"}
    limit = found["components"]["schemas"]["QuotaLimit"]
    assert limit["properties"]["remaining"]["type"] == "integer"
    assert limit["properties"]["remaining"]["nullable"] is True
    assert set(limit["required"]) == set(limit["properties"])
    operation = found["paths"]["/quota/usage/history/"]["get"]
    assert {one["name"] for one in operation["parameters"]} == {"cursor", "days", "page_size", "period"}
    assert operation["responses"]["200"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/PaginatedQuotaWindowList"
    }
    window = found["components"]["schemas"]["QuotaWindow"]["properties"]
    assert (window["starts_at"]["format"], window["scope"]["nullable"]) == ("date-time", True)
    assert "429" in operation["responses"]


@pytest.mark.parametrize("handler", [None, PROBLEMS])
def test_what_is_documented_is_what_is_sent(
    generate: Any, client: Client, handler: str | None, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = generate(handler, OAS_VERSION="3.1.0", patterns=[path("search/", Limited.as_view())])
    documented = responses(found, "search/", prefix="/")
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="search"), rates="1/hour", on_error="deny")
    answers = [client.get("/search/"), client.get("/search/")]
    settings.RATEQUOTA = {"REDIS_URL": "redis://127.0.0.1:1/0", "STATISTICS_SECONDS": 0}
    answers.append(client.get("/search/"))
    assert [answer.status_code for answer in answers] == [200, 429, 503]
    for answer in answers:
        told = documented[str(answer.status_code)]
        assert {name for name in answer.headers if "rate" in name.lower() or name == "Retry-After"} == set(
            told["headers"]
        )
        if answer.status_code != 200:
            schema = told["content"][answer["Content-Type"]]["schema"] | {"components": found["components"]}
            jsonschema.validate(answer.json(), schema)
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({}, schema)


def test_headers_that_are_not_sent_are_not_documented(generate: Any, settings: Any) -> None:
    for form in ("ietf", "ietf-11"):
        settings.RATEQUOTA = {**settings.RATEQUOTA, "HEADERS": [form]}
        found, _ = generate()
        assert set(responses(found, "limited/")["429"]["headers"]) == {"RateLimit", "RateLimit-Policy", "Retry-After"}


def test_the_projects_own_responses_stay(generate: Any) -> None:
    generate(PROBLEMS)  # extend_schema goes by the settings at the time

    class Documented(Limited):
        @extend_schema(responses={200: UserSerializer, 429: OpenApiResponse(description="Mine.")})
        def get(self, request: Any) -> Response:
            return super().get(request)

    found, _ = generate(PROBLEMS, patterns=[path("documented/", Documented.as_view())])
    said = responses(found, "documented/", prefix="/")["429"]
    assert said["description"] == "Mine."
    assert "application/problem+json" in said["content"]
    assert "Retry-After" in said["headers"]


def test_beside_drf_standardized_errors(generate: Any) -> None:
    found, _ = generate(THEIRS, Combined)
    refused = responses(found, "limited/")["429"]
    assert list(refused["content"]) == ["application/json"]
    assert "Error" in str(refused["content"])
    assert set(refused["headers"]) == {*RATES, "Retry-After"}
    found, _ = generate("tests.front.test_errors.both", Combined)
    assert "application/problem+json" in responses(found, "limited/")["429"]["content"]
    found, _ = generate(THEIRS)
    assert "content" not in responses(found, "limited/")["429"], "unknown to our schema alone"


def test_throttles_that_want_a_real_request_are_warned_about(generate: Any) -> None:
    found, complaints = generate(patterns=[path("picky/", Picky.as_view())])
    assert set(responses(found, "picky/", prefix="/")) == {"200"}
    assert any("get_throttles() failed" in text for text in complaints)
