"""Identifiers of keys, OAuth clients and tokens: what each answers, and that nothing unproved gets a counter.

The three packages are not installed: objects stand in that have the attributes of theirs (djangorestframework-api-key
3.1, django-oauth-toolkit 3.0, djangorestframework-simplejwt 5.5).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from django.core.exceptions import ObjectDoesNotExist, ValidationError
from django.test import RequestFactory
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.permissions import BasePermission, IsAuthenticated
from rest_framework.response import Response
from rest_framework.views import APIView

from django_ratequota.identifiers import header_api_key, header_key, jwt_claim
from django_ratequota.models import RatePolicy

OURS = "django_ratequota.identifiers"

tenant_claim = jwt_claim("tenant")


# --- Keys in headers. ---


def get(**headers: str) -> Any:
    return RequestFactory().get("/", headers={name.replace("_", "-"): value for name, value in headers.items()})


def test_a_key_in_a_header_counts_by_its_digest() -> None:
    assert header_api_key(get(X_API_Key="key-1")) == header_api_key(get(x_api_key=" key-1 "))
    assert header_api_key(get(X_API_Key="key-1")) != header_api_key(get(X_API_Key="KEY-1"))
    assert len(header_api_key(get(X_API_Key="key-1")) or "") == 32
    assert header_api_key(get(X_API_Key="  ")) is None
    assert header_api_key(get()) is None
    assert header_api_key(get(X_API_Key="\udcff"))


def test_a_scheme_stands_before_the_key() -> None:
    identify = header_key("Authorization", scheme="Api-Key")
    spellings = ["Api-Key key-1", "api-key key-1", "API-KEY   key-1 "]
    assert {identify(get(Authorization=text)) for text in spellings} == {header_api_key(get(X_API_Key="key-1"))}
    assert {identify(get(Authorization=text)) for text in ("Bearer key-1", "Api-Key", "Api-Key ", "key-1")} == {None}


def test_only_known_keys_have_a_counter_where_that_can_be_asked() -> None:
    identify = header_key("X-API-Key", known={"key-1"}.__contains__)
    assert identify(get(X_API_Key="key-1")) == header_api_key(get(X_API_Key="key-1"))
    assert identify(get(X_API_Key="made-up")) is None


# --- What an authentication has proved. ---


class Keys:
    """The manager of djangorestframework-api-key's model."""

    rows = {
        "good": SimpleNamespace(prefix="good", hashed_key="#", has_expired=False),
        "old": SimpleNamespace(prefix="old", hashed_key="#", has_expired=True),
    }

    def get_from_key(self, key: str) -> Any:
        prefix, _dot, secret = key.partition(".")
        if prefix not in self.rows:
            raise ObjectDoesNotExist
        if secret != "secret":
            raise ValidationError("Key is not valid.")
        return self.rows[prefix]


class KeyModel:
    objects = Keys()


class HasAPIKey(BasePermission):
    """Its permission."""

    model = KeyModel

    def get_key(self, request: Any) -> str | None:
        word, _blank, key = request.META.get("HTTP_AUTHORIZATION", "").partition(" ")
        return key if word == "Api-Key" else None

    def has_permission(self, request: Any, view: Any) -> bool:
        try:
            return not self.model.objects.get_from_key(self.get_key(request) or "").has_expired
        except (ObjectDoesNotExist, ValidationError):
            return False


class Authentication(BaseAuthentication):
    """``Test NAME`` makes ``request.auth`` what ``PROVED`` has by that name."""

    def authenticate(self, request: Any) -> Any:
        scheme, _blank, name = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Test":
            return None
        if name not in PROVED:
            raise AuthenticationFailed
        return SimpleNamespace(pk=1, is_authenticated=True), PROVED[name]


class Token:
    """simplejwt's token."""

    def __init__(self, **payload: Any) -> None:
        self.payload = payload


PROVED: dict[str, Any] = {
    "oauth": SimpleNamespace(application=SimpleNamespace(client_id="shop", name="A shop")),
    "oauth of nobody": SimpleNamespace(application=None),
    "jwt": Token(tenant="acme", sub=7),
    "jwt of a number": Token(tenant=7),
    "jwt without": Token(sub=7),
    "jwt of a list": Token(tenant=["acme"]),
    "jwt of a truth": Token(tenant=True),
    "a dict": {"tenant": "acme"},
    "text": "eyJ0ZW5hbnQiOiJhY21lIn0",
    "key": Keys.rows["good"],
}


class Open(APIView):
    authentication_classes = [Authentication]

    def get(self, request: Any) -> Response:
        return Response({})


class Either(Open):
    permission_classes = [IsAuthenticated | HasAPIKey | ~IsAuthenticated]


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies")
@pytest.mark.parametrize(
    ("kind", "counted"),
    [
        (f"{OURS}.oauth_client", {"Test oauth": "shop", "Test oauth of nobody": None, "Test jwt": None, "": None}),
        (
            f"{__name__}.tenant_claim",
            {"Test jwt": "acme", "Test jwt of a number": "7", "Test a dict": "acme", "Test text": None, "": None}
            | dict.fromkeys(("Test jwt without", "Test jwt of a list", "Test jwt of a truth")),
        ),
        (
            f"{OURS}.drf_api_key",
            {"Api-Key good.secret": "good", "Test key": "good", "Test jwt": None, "": None}
            | dict.fromkeys(("Api-Key good.guess", "Api-Key made-up.secret", "Api-Key old.secret")),
        ),
    ],
)
def test_what_rest_framework_s_throttle_counts_by(settings: Any, kind: str, counted: dict[str, str | None]) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"client": kind}}
    RatePolicy.objects.create(counted_per="client", rates="5/hour")
    for header, value in counted.items():
        request = RequestFactory().get("/", headers={"Authorization": header} if header else {})
        assert Either.as_view()(request).status_code == 200
        subjects = [status.bucket.subject for status in request.ratequota.statuses]
        assert subjects == ([] if value is None else [f"client:{value}"]), header


@pytest.mark.parametrize("kind", ["drf_api_key", "oauth_client"])
def test_before_the_view_nothing_is_proved(kind: str) -> None:
    from django_ratequota import identifiers

    request = RequestFactory().get("/", headers={"Authorization": "Api-Key good.secret"})
    assert getattr(identifiers, kind)(request) is None
    assert tenant_claim(request) is None
