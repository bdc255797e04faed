"""Views, throttles, signals and health of a Django project."""

from typing import Any, assert_type

from django.dispatch import receiver
from django.http import HttpRequest, HttpResponse, JsonResponse
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from django_ratequota import Decision, acheck_request, check_request
from django_ratequota.decorators import ratequota
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.monitoring.health import Health, health
from django_ratequota.signals import request_refused
from django_ratequota.throttling import QuotaThrottle, throttle_scope


@ratequota(scope="exports", cost=5)
def export(request: HttpRequest, year: int) -> HttpResponse:
    return HttpResponse(str(year))


@ratequota
def plain(request: HttpRequest) -> JsonResponse:
    decision = check_request(request, scope="completions")
    assert_type(decision, Decision)
    return JsonResponse({"allowed": decision.allowed, "violated": decision.violated})


@ratequota(scope="search")
async def search(request: HttpRequest) -> HttpResponse:
    decision = await acheck_request(request, cost=0)
    return HttpResponse(status=200 if decision.allowed else 429)


class Reports(APIView):
    throttle_classes = [QuotaThrottle]
    throttle_scope = "reports"
    throttle_cost = 2

    def get(self, request: Request) -> Response:
        return Response([])


@throttle_scope("archive")
class Archive(Reports):
    @throttle_scope("exports", cost=lambda request, view: 2)
    def post(self, request: Request) -> Response:
        return Response([])


async def count_bytes(request: HttpRequest) -> int:
    return len(request.body)


@ratequota("uploads", cost=count_bytes)
async def upload(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@receiver(request_refused)
def told(sender: object, request: HttpRequest, decision: Decision, **_: Any) -> None:
    print(request.path, decision.violated)


def load(endpoint: Endpoint) -> Health:
    RatePolicy(endpoint=endpoint, rates="100/min").full_clean()
    assert_type(health().decisions, int)
    return health()


def mistakes(request: HttpRequest) -> None:
    export(request, "2026")  # type: ignore[arg-type]
    ratequota(scope="search", cost="5")  # type: ignore[call-overload]
    throttle_scope("search", cost="5")  # type: ignore[arg-type]
    assert_type(Archive().post(Request(request)), Response)
    check_request(request, "search", 1, True)  # type: ignore[call-arg]
    health(1)  # type: ignore[call-arg]
