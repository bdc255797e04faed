"""A small API. Views declare a scope and a cost; the limits are in the admin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.http import HttpRequest, JsonResponse, StreamingHttpResponse
from rest_framework.authtoken.views import ObtainAuthToken
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from django_ratequota import check_request
from django_ratequota.decorators import ratequota
from django_ratequota.responses import refusal_response
from django_ratequota.throttling import QuotaThrottle

REPORTS = [{"number": number, "title": f"Report {number}"} for number in range(1, 4)]


class Login(ObtainAuthToken):
    """Return a token for a name and password. Limited per address, because password guessers are anonymous."""

    authentication_classes = ()
    throttle_classes = (QuotaThrottle,)  # ObtainAuthToken has no throttle
    throttle_scope = "login"


class ReportList(APIView):
    """All reports. Without a scope: the endpoint "reports" matches the route."""

    permission_classes = (IsAuthenticated,)

    def get(self, request: Request) -> Response:
        return Response(REPORTS)


class ReportDetail(APIView):
    """One report. The endpoint "reports" matches this route as well."""

    permission_classes = (IsAuthenticated,)

    def get(self, request: Request, number: int) -> Response:
        found = [report for report in REPORTS if report["number"] == number]
        return Response(found[0] if found else None, status=200 if found else 404)


class Search(APIView):
    """An expensive view: each request consumes five units."""

    permission_classes = (IsAuthenticated,)
    throttle_scope = "search"
    throttle_cost = 5

    def get(self, request: Request) -> Response:
        words = request.query_params.get("q", "").lower().split()
        return Response([report for report in REPORTS if all(word in str(report["title"]).lower() for word in words)])


class Export(APIView):
    """Limited to a few requests per hour on the Free plan."""

    permission_classes = (IsAuthenticated,)
    throttle_scope = "exports"

    def get(self, request: Request) -> Response:
        return Response({"rows": len(REPORTS)})


@ratequota(scope="status")
def status(request: HttpRequest) -> JsonResponse:
    """A plain Django view, open to everybody."""
    return JsonResponse({"status": "ok"})


def completions(request: HttpRequest) -> Any:
    """A stream whose cost is known afterwards: one unit per word sent, also if the client disconnects."""
    decision = check_request(request, scope="completions", cost=20)
    if not decision.allowed:
        return refusal_response(request, decision)

    def words() -> Iterator[str]:
        sent = 0
        try:
            for word in "as many words as there are units to pay for".split():
                sent += 1
                yield f"{word} "
        finally:
            settled = decision.settle(sent)
        yield "" if settled.remaining is None else f"({settled.remaining} units left)"

    return StreamingHttpResponse(words(), content_type="text/plain")
