"""Guessing one account's password under names that a login takes for the same, and bodies that hide the name."""

from __future__ import annotations

import itertools
import json
import random
import unicodedata
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.auth import authenticate
from django.contrib.auth.models import User, UserManager
from django.contrib.auth.views import LoginView
from django.db import connection
from django.http import HttpResponse
from django.test import Client, RequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from django.views.decorators.csrf import csrf_exempt
from hypothesis import example, given
from hypothesis import strategies as st
from rest_framework.authtoken.serializers import AuthTokenSerializer
from rest_framework.parsers import JSONParser
from rest_framework.response import Response
from rest_framework.views import APIView

from django_ratequota.decorators import ratequota
from django_ratequota.identifiers import login_field, login_name, login_pair
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.policies.requests import login_names
from tests.support.properties import examples

NAME, PASSWORD = "finchley", "the right one"
LIMIT = 20
OURS = "django_ratequota.identifiers"


class FormLogin(LoginView):
    """Django's own view, which answers a wrong password without a template here."""

    def form_invalid(self, form: Any) -> HttpResponse:
        return HttpResponse(status=400)


class ApiLogin(APIView):
    authentication_classes: list[Any] = []
    throttle_scope = "login"

    def post(self, request: Any) -> Response:
        serializer = AuthTokenSerializer(data=request.data, context={"request": request})
        serializer.is_valid(raise_exception=True)
        return Response({}, status=302)


class JsonOnlyLogin(ApiLogin):
    parser_classes = [JSONParser]


@csrf_exempt
@ratequota(scope="login")
def json_login(request: Any) -> HttpResponse:
    """Reads JSON and asks for no content type, as many views do."""
    given = json.loads(request.body)
    user = authenticate(request, username=given["username"], password=given["password"])
    return HttpResponse(status=302 if user else 400)


@method_decorator(ratequota(scope="login"), name="dispatch")
class OuterLogin(ApiLogin):
    throttle_classes: list[Any] = []


urlpatterns = [
    path("outer/", OuterLogin.as_view()),
    path("form/", ratequota(scope="login")(FormLogin.as_view()), name="form"),
    path("api/", ApiLogin.as_view()),
    path("api-json/", JsonOnlyLogin.as_view()),
    path("json/", json_login),
    path("done/", json_login),
]

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "login")]


@pytest.fixture
def login(settings: Any) -> User:
    """An account, and ``LIMIT`` attempts an hour at its name."""
    settings.ROOT_URLCONF = __name__
    settings.LOGIN_REDIRECT_URL = "/done/"
    settings.RATEQUOTA = {
        **settings.RATEQUOTA,
        "IDENTIFIERS": {"login_name": f"{OURS}.login_name", "login_pair": f"{OURS}.login_pair"},
    }
    endpoint = Endpoint.objects.create(name="login", methods="POST")
    RatePolicy.objects.create(endpoint=endpoint, counted_per="login_name", rates=f"{LIMIT}/hour sliding_window_log")
    return User.objects.create_user(NAME, password=PASSWORD)


def spellings(name: str, count: int) -> list[str]:
    """Different texts that Django's login form takes for this name, written in lower-case ASCII letters."""
    alphabets = [ord("a"), 0xFF41, 0x1D41A, 0x1D4EA, 0x1D5BA, 0x24D0]
    chosen, found = random.Random(7), [name]
    while len(found) < count:
        text = "".join(chr(chosen.choice(alphabets) + ord(letter) - ord("a")) for letter in name)
        text = chosen.choice(["", " ", "\u3000", "\xa0\t"]) + text + chosen.choice(["", "\n", "\u2003"])
        if text not in found:
            found.append(text)
    assert {unicodedata.normalize("NFKC", text.strip()) for text in found} == {name}
    return found


def test_one_account_under_many_spellings() -> None:
    """300 of 300 guesses passed: Django normalizes the name, the function of the docs only folded its case."""
    statuses = [
        Client().post("/form/", {"username": text, "password": PASSWORD}).status_code for text in spellings(NAME, 300)
    ]
    # With the right password all that pass are at the account: the spellings do reach it.
    assert statuses == [302] * LIMIT + [429] * (300 - LIMIT)


@pytest.mark.parametrize("where", ["/api/", "/json/"])
def test_a_json_login_counts_numbers_and_blanks_as_the_same_name(where: str) -> None:
    """``{"username": 4915}`` raised in the function of the docs, and 200 of 200 passed."""
    User.objects.create_user("4915", password=PASSWORD)
    texts: list[Any] = [4915, "4915"] if where == "/json/" else [4915, "4915", " 4915", "4915\n", "\u30004915 "]
    bodies = [{"username": texts[n % len(texts)], "password": PASSWORD} for n in range(300)]
    statuses = [Client().post(where, body, content_type="application/json").status_code for body in bodies]
    assert statuses == [302] * LIMIT + [429] * (300 - LIMIT)


GUESS = {"username": NAME, "password": PASSWORD}
#: A body for the n-th guess, and its content type: the view reads the same name from each.
HIDDEN: dict[str, Callable[[int], tuple[str | bytes, str]]] = {
    "no type": lambda n: (json.dumps(GUESS), ""),
    "plain text": lambda n: (json.dumps(GUESS), "text/plain"),
    "a form's type": lambda n: (json.dumps(GUESS), "application/x-www-form-urlencoded"),
    "a form inside": lambda n: (
        json.dumps({**GUESS, "more": f"&username=user{n}&rest="}),
        "application/x-www-form-urlencoded",
    ),
    "padding": lambda n: (json.dumps({**GUESS, "more": "x" * 70_000}), "application/json"),
    "blanks first": lambda n: (" " * 70_000 + json.dumps(GUESS), "application/json"),
    "UTF-16": lambda n: (json.dumps(GUESS).encode("utf-16"), "application/json; charset=utf-16"),
    "said twice": lambda n: (f'{{"username": "user{n}", "username": "{NAME}", "password": "{PASSWORD}"}}', ""),
    "escapes": lambda n: (json.dumps(GUESS).replace("f", "\\u0066", n % 2 + 1), "application/json"),
}


@pytest.mark.parametrize("trick", HIDDEN)
def test_a_body_that_hides_the_name(trick: str) -> None:
    statuses = []
    for number in range(LIMIT + 10):
        body, kind = HIDDEN[trick](number)
        response = Client().generic("POST", "/json/", body, content_type=kind)
        statuses.append(response.status_code)
    assert statuses == [302] * LIMIT + [429] * 10


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "application/json"])
def test_reading_the_name_first_takes_nothing_from_rest_framework(kind: str | None) -> None:
    body: Any = urlencode(GUESS) if kind and "form" in kind else GUESS
    more = {} if kind is None else {"content_type": kind}
    statuses = [Client().post("/outer/", body, **more).status_code for _ in range(LIMIT + 2)]
    assert statuses == [302] * LIMIT + [429] * 2


#: What raises in the function: it is counted, though it names nobody.
UNREADABLE = [
    b"{" * 20_000,
    b'{"username": ' + b"[" * 30_000,
    b"\xff\xfe\xff",
    b'{"username": ' + b"9" * 5000 + b"}",
    b'{"username": "' + b"x" * 5000 + b'"}',
]


def test_bodies_that_cannot_be_read_share_one_counter(caplog: Any) -> None:
    client = Client(raise_request_exception=False)
    bodies = [UNREADABLE[n % len(UNREADABLE)] for n in range(LIMIT + 10)]
    statuses = [client.generic("POST", "/json/", body, "application/json").status_code for body in bodies]
    assert [status == 429 for status in statuses] == [False] * LIMIT + [True] * 10
    assert client.post("/json/", GUESS, content_type="application/json").status_code == 302
    assert len([one for one in caplog.records if f"{OURS}.login_name failed" in one.message]) == 1


def request_of(body: Any, kind: str = "application/json") -> Any:
    text = json.dumps(body) if not isinstance(body, bytes) else body
    return RequestFactory().post("/", text, content_type=kind)


def test_the_name_of_a_json_body() -> None:
    for written, name in {
        "Alice": "alice",
        " Ａlice\u3000": "alice",
        "Straße": "strasse",
        "ﬁnch": "finch",
        "x" * 200: "x" * 150,
        4915: "4915",
        True: "true",
        None: None,
        "": None,
        " \t": None,
    }.items():
        assert login_name(request_of({"username": written})) == name
    assert login_name(request_of({"username": ["a"]})) == "['a']"
    for nobody in ({"email": "a@example.com"}, [{"username": "alice"}], 7, b""):
        assert login_name(request_of(nobody)) is None
    with pytest.raises(ValueError, match="Expecting property name"):
        login_name(request_of(b"{"))


def test_two_accounts_in_one_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """With either field first, a client could hide the one that the view reads."""
    monkeypatch.setattr(User, "USERNAME_FIELD", "email")
    assert login_name(request_of({"email": "A@example.com"})) == "a@example.com"
    assert login_name(request_of({"username": "A@example.com"})) == "a@example.com"
    assert login_name(request_of({"username": "a@example.com", "email": "A@Example.com "})) == "a@example.com"
    both = {"username": "alice", "email": "bob@example.com"}
    with pytest.raises(ValueError, match="two accounts to log in to, in username or email"):
        login_name(request_of(both))
    assert login_field("email")(request_of(both)) == "bob@example.com"
    assert login_field("login")(request_of({**both, "login": "Carol"})) == "carol"


def test_forms_with_files_and_repeated_fields() -> None:
    form = RequestFactory().post("/", {"username": ["bob", "Alice"]})
    assert (form.content_type, login_name(form)) == ("multipart/form-data", "alice")
    assert form.POST["username"] == "Alice", "which the view reads as well"
    assert login_name(RequestFactory().post("/", {"name": "alice"})) is None
    assert login_name(RequestFactory().get("/", {"username": "alice"})) is None


@given(st.text(max_size=200))
@example("\u0345\u0301a")
@example("İ")
@example("½" * 150)
@examples(300)
def test_what_django_s_form_takes_for_one_name_counts_as_one(text: str) -> None:
    seen = unicodedata.normalize("NFKC", text.strip())
    assert login_names.normalize(text) == login_names.normalize(seen)
    assert len(login_names.normalize(text)) <= 150


# --- Logins that find accounts by more than the exact name. ---


def test_an_account_that_is_found_by_two_names_has_one_counter(monkeypatch: pytest.MonkeyPatch, login: User) -> None:
    login.email = "finch@example.com"
    login.save()

    def by_either(self: Any, name: str) -> Any:
        return self.get(email=name) if "@" in name else self.get(username__iexact=name)

    assert not login_names.is_looked_up(User, User._meta.get_field("username")) or connection.vendor == "mysql"
    monkeypatch.setattr(UserManager, "get_by_natural_key", by_either)
    names = ["finch@example.com", NAME, NAME.upper()] * LIMIT
    statuses = [Client().post("/form/", {"username": n, "password": PASSWORD}).status_code for n in names]
    assert statuses == [302] * LIMIT + [429] * 2 * LIMIT
    assert login_name(request_of({"username": "Nobody"})) == "nobody"


def test_what_the_database_takes_for_one_name_counts_as_one() -> None:
    """On MySQL and MariaDB é is e, and marks may be nothing; elsewhere no such guess gets there."""
    names = ["".join(letters) for letters in itertools.product("f", "iíì", "nñ", "cç", "h", "l", "eéè", "yý")][1:]
    names += [NAME[:at] + mark + NAME[at:] for mark in "\u0301\u0308\u200b\u00ad\x00" for at in range(1, len(NAME))]
    statuses = [
        Client(raise_request_exception=False)
        .post("/json/", {"username": name, "password": PASSWORD}, content_type="application/json")
        .status_code
        for name in names
    ]
    assert statuses.count(302) == (LIMIT if connection.vendor == "mysql" else 0)


def test_no_query_is_made_where_names_are_compared_exactly(django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(1 if connection.vendor == "mysql" else 0):
        login_name(request_of({"username": NAME}))


# --- What the view sees of it. ---


@pytest.mark.parametrize(
    ("where", "body", "kind", "status"),
    [
        ("/api/", b"{", "application/json", 400),
        ("/api-json/", b"username=a", "application/x-www-form-urlencoded", 415),
        ("/api-json/", b'{"username": "a"}', "text/plain", 415),
    ],
)
def test_rest_framework_s_view_still_hears_what_is_wrong_with_a_body(
    where: str, body: bytes, kind: str, status: int
) -> None:
    response = Client().generic("POST", where, body, content_type=kind)
    assert response.status_code == status
    assert list(response.json()) == ["detail"], "not a word about fields"


def test_a_pair_is_the_address_and_the_name() -> None:
    request = RequestFactory().post("/", {"username": "Alice"}, REMOTE_ADDR="2001:db8::7")
    assert login_pair(request) == "2001:db8::/64 alice"
    assert login_pair(RequestFactory().post("/", {"username": "Alice"}, REMOTE_ADDR="")) == "unknown alice"
    assert login_pair(RequestFactory().post("/")) is None
