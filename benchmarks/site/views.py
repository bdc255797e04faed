"""The measured views: a small JSON answer each, with as little as possible beside it."""

from __future__ import annotations

from django.conf import settings
from django.http import HttpRequest, JsonResponse
from django.utils.module_loading import import_string
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from django_ratequota.decorators import ratequota

ANSWER = {"items": [{"id": 1, "name": "one"}, {"id": 2, "name": "two"}], "next": None}


class Items(APIView):
    """The DRF view."""

    throttle_scope = "items"

    def get(self, request: Request) -> Response:
        return Response(ANSWER)


class Refused(Items):
    """The same, refused from each caller's second request on where there are limits."""

    throttle_scope = "refused"
    throttle_classes = [import_string(path) for path in settings.VARIANT.refusing]


def plain(request: HttpRequest) -> JsonResponse:
    """A sync Django view."""
    return JsonResponse(ANSWER)


async def aplain(request: HttpRequest) -> JsonResponse:
    """An async Django view."""
    return JsonResponse(ANSWER)


limited = ratequota("items")(plain)
alimited = ratequota("items")(aplain)
