"""Views of the test suite, one of each kind that can be limited, identifiers for RATEQUOTA, and a request."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import AnonymousUser, User
from django.db.models import IntegerChoices
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import action, api_view
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_ratequota import check_request
from django_ratequota.decorators import ratequota


class Units(IntegerChoices):
    """Costs with names, as projects have them."""

    TWO = 2
    THREE = 3
    FIVE = 5


def plain(request: HttpRequest, **kwargs: Any) -> HttpResponse:
    return JsonResponse({"ran": True})


async def aplain(request: HttpRequest) -> HttpResponse:
    return JsonResponse({"ran": True})


@ratequota(scope="search")
def decorated(request: HttpRequest) -> HttpResponse:
    return JsonResponse({"ran": True})


@ratequota(scope="search")
async def adecorated(request: HttpRequest) -> HttpResponse:
    return JsonResponse({"ran": True})


@ratequota
def bare(request: HttpRequest) -> HttpResponse:
    return JsonResponse({"ran": True})


@ratequota(scope="search", cost=3)
def costly(request: HttpRequest) -> HttpResponse:
    return JsonResponse({"ran": True})


@ratequota(scope="search", block=False)
def deciding(request: HttpRequest) -> HttpResponse:
    return JsonResponse({"allowed": request.ratequota.allowed})


@ratequota(scope="search", block=False)
async def adeciding(request: HttpRequest) -> HttpResponse:
    return JsonResponse({"allowed": request.ratequota.allowed})


@method_decorator(ratequota(scope="search"), name="dispatch")
class Decorated(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return JsonResponse({"ran": True})


@method_decorator(ratequota(scope="search"), name="dispatch")
class ADecorated(View):
    async def get(self, request: HttpRequest) -> HttpResponse:
        return JsonResponse({"ran": True})


@method_decorator([ratequota(scope="search"), csrf_exempt], name="dispatch")
class AStacked(View):
    async def get(self, request: HttpRequest) -> HttpResponse:
        return JsonResponse({"ran": True})


class ADecoratedMethod(View):
    @method_decorator(ratequota(scope="search"))
    async def get(self, request: HttpRequest) -> HttpResponse:
        return JsonResponse({"ran": True})


@ratequota(scope="search")
def thorough(request: HttpRequest) -> HttpResponse:
    """Checks the request again after the decorator."""
    decisions = [check_request(request, scope="search"), check_request(request)]
    return JsonResponse({"allowed": [decision.allowed for decision in decisions]})


def checking(request: HttpRequest) -> HttpResponse:
    """A plain view that checks requests which the middleware may have checked already."""
    decision = check_request(request, scope="search")
    return JsonResponse({"allowed": decision.allowed})


class NameAuthentication(BaseAuthentication):
    """``Authorization: Name alice``: a token scheme without the tokens."""

    def authenticate(self, request: Any) -> tuple[User, None] | None:
        scheme, _, name = request.headers.get("Authorization", "").partition(" ")
        return (User.objects.get(username=name), None) if scheme == "Name" else None


class Search(APIView):
    authentication_classes = [NameAuthentication]
    throttle_scope = "search"
    throttle_cost: Any = None

    def get(self, request: Any) -> Response:
        return Response({"ran": True})


class Unthrottled(APIView):
    throttle_classes: list[Any] = []

    def get(self, request: Any) -> Response:
        return Response({"ran": True})


@api_view()
def api_search(request: Any) -> Response:
    return Response({"ran": True})


api_search.cls.throttle_scope = "search"  # what DRF's decorator throttle_scope does, which DRF 3.16 lacks


class Reports(ViewSet):
    def list(self, request: Any, format: str | None = None) -> Response:
        return Response([])

    def retrieve(self, request: Any, pk: str, format: str | None = None) -> Response:
        return Response({"id": pk})

    @action(detail=False, throttle_classes=[])
    def export(self, request: Any) -> Response:
        return Response({"ran": True})


def tenant(request: Any) -> Any:
    """An identifier: the value, or exception, that the test put on the request."""
    value = request.tenant
    if isinstance(value, Exception):
        raise value
    return value


def api_key(request: Any) -> str | None:
    return request.headers.get("X-Api-Key")


def named_plan(request: Any) -> str | None:
    """A plan resolver: the slug that the test put on the request."""
    slug: str | None = request.plan
    return slug


def plan_of_some(request: Any) -> str | None:
    """A plan resolver for staff and services; all others are on the plan that is assigned to them."""
    return "staff" if request.user.is_staff else request.headers.get("X-Service")


def busiest(request: Any) -> str:
    """An identifier that reads the database."""
    return f"{User.objects.count()} users"


def request_from(user: Any = None, address: str = "203.0.113.7", headers: Any = None, **attributes: Any) -> Any:
    """Return a request as views get it, by ``user`` (None = anonymous)."""
    request = RequestFactory().get("/", REMOTE_ADDR=address, headers=headers)
    request.user = AnonymousUser() if user is None else user
    for name, value in attributes.items():
        setattr(request, name, value)
    return request
