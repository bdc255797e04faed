"""The measured views: one with as little as possible beside the limit, and one as real ones are."""

from __future__ import annotations

from django.contrib.auth.models import User
from rest_framework.generics import ListAPIView
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import (
    CharField,
    HyperlinkedIdentityField,
    ModelSerializer,
    SerializerMethodField,
)
from rest_framework.views import APIView

ANSWER = {"items": [{"id": 1, "name": "one"}, {"id": 2, "name": "two"}], "next": None}


class Trivial(APIView):
    """A small JSON answer."""

    throttle_scope = "items"

    def get(self, request: Request) -> Response:
        return Response(ANSWER)


class UserSerializer(ModelSerializer[User]):
    url = HyperlinkedIdentityField("listing-row")
    full_name = CharField(source="get_full_name")
    initials = SerializerMethodField()

    class Meta:
        model = User
        exclude = ("password", "groups", "user_permissions")

    def get_initials(self, user: User) -> str:
        return f"{user.first_name[:1]}{user.last_name[:1]}"


class Listing(ListAPIView[User]):
    """One query, 60 rows serialized."""

    throttle_scope = "items"
    queryset = User.objects.order_by("pk")
    serializer_class = UserSerializer
