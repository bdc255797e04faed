"""A client chooses the language, and with it how a route is spelt: no language is a way around an endpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from django.conf.urls.i18n import i18n_patterns
from django.core.exceptions import ValidationError
from django.test import Client
from django.urls import include, path, re_path, resolve
from django.utils import translation
from django.utils.functional import lazy
from rest_framework.urlpatterns import format_suffix_patterns

from django_ratequota import check_request
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.operations.advice import about_endpoint, matched_routes
from django_ratequota.operations.explain import ExplainQuery
from django_ratequota.policies.requests import translated_routes as module
from django_ratequota.policies.requests.routes import find_route, known_routes, resolved
from tests.project import views

LIMIT = 4


def translated(**texts: str) -> Any:
    """What ``gettext_lazy`` makes of a route: its text in the active language."""
    return lazy(lambda: texts.get(translation.get_language() or "en", texts["en"]), str)()


INSIDE = [
    path("", views.plain, name="home"),
    path("x/", views.plain, name="x"),
    re_path(r"^old/(?P<pk>\d+)/$", views.plain),
    path(translated(en="about/", de="ueber/"), include([path("us/", views.plain, name="us")])),
    *format_suffix_patterns([path("data/", views.plain)]),
]
OUTSIDE = [
    path("shop/x/", views.plain),
    path("fixed/", views.plain),
    path(translated(en="contact/", de="kontakt/"), views.plain, name="contact"),
]


class Urlconf:
    """A module would do as well."""

    def __init__(self, *, prefix_default_language: bool) -> None:
        self.urlpatterns = [*OUTSIDE, *i18n_patterns(*INSIDE, prefix_default_language=prefix_default_language)]


BARE, PREFIXED = Urlconf(prefix_default_language=False), Urlconf(prefix_default_language=True)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


@pytest.fixture(autouse=True)
def project(settings: Any) -> None:
    settings.LANGUAGES = [("en", "English"), ("de", "German"), ("fr", "French"), ("pt-br", "Portuguese")]
    settings.LANGUAGE_CODE = "en"
    settings.ROOT_URLCONF = BARE
    sessions, *others = settings.MIDDLEWARE
    settings.MIDDLEWARE = [sessions, "django.middleware.locale.LocaleMiddleware", *others]
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}


def limit(routes: str) -> Endpoint:
    endpoint = Endpoint.objects.create(name="guarded", routes=routes)
    RatePolicy.objects.create(endpoint=endpoint, rates=f"{LIMIT}/hour")
    return endpoint


def admitted(client: Client, paths: list[str]) -> int:
    """How many of three rounds pass."""
    statuses = [client.get(path).status_code for _ in range(3) for path in paths]
    assert set(statuses) <= {200, 429}
    return statuses.count(200)


X = ["/x/", "/de/x/", "/fr/x/", "/pt-br/x/"]


@pytest.mark.parametrize(
    ("urlconf", "route"),
    [*((BARE, route) for route in (*X, "/fr/*")), *((PREFIXED, route) for route in ("/en/x/", "/de/x/", "/pt-br/*"))],
)
def test_the_same_page_in_another_language(client: Client, settings: Any, urlconf: Urlconf, route: str) -> None:
    settings.ROOT_URLCONF = urlconf
    limit(route)
    assert admitted(client, ["/en/x/" if urlconf is PREFIXED else "/x/", *X[1:]]) == LIMIT
    assert admitted(client, ["/fixed/", "/shop/x/"]) == 6


@pytest.mark.parametrize(
    ("route", "paths", "others"),
    [
        ("/", ["/", "/de/", "/fr/"], ["/x/", "/de/x/"]),
        ("/de/", ["/", "/de/", "/fr/"], ["/x/", "/de/x/"]),
        (r"/old/(?P<pk>\d+)/", ["/old/1/", "/de/old/2/"], ["/x/"]),
        (r"/fr/old/(?P<pk>\d+)/", ["/old/1/", "/de/old/2/"], ["/x/"]),
        ("/about/us/", ["/about/us/", "/de/ueber/us/", "/fr/about/us/"], ["/x/", "/de/x/"]),
        ("/de/ueber/*", ["/about/us/", "/de/ueber/us/", "/fr/about/us/"], ["/x/", "/de/x/"]),
        ("/de/about/*", [], ["/about/us/", "/de/ueber/us/"]),  # German has no such route
        ("/data/", ["/data/", "/data.json", "/de/data.json", "/fr/data/"], ["/x/"]),
        ("/de/data/", ["/data/", "/data.json", "/de/data.json", "/fr/data/"], ["/x/"]),
    ],
)
def test_routes_of_every_kind_match_in_every_language(
    client: Client, route: str, paths: list[str], others: list[str]
) -> None:
    limit(route)
    assert admitted(client, paths * 2) == (LIMIT if paths else 0)
    assert admitted(client, others) == 3 * len(others)


@pytest.mark.parametrize("route", ["/contact/", "/kontakt/"])
def test_a_translated_route_without_a_prefix(client: Client, settings: Any, route: str) -> None:
    settings.ROOT_URLCONF = PREFIXED  # else such a path is in the default language alone
    limit(route)
    asked = [("/contact/", "en"), ("/kontakt/", "de"), ("/contact/", "fr")] * 3
    statuses = [client.get(path, headers={"Accept-Language": code}).status_code for path, code in asked]
    assert statuses == [200] * LIMIT + [429] * (9 - LIMIT)


def test_a_urlconf_of_the_requests_own(settings: Any) -> None:
    settings.ROOT_URLCONF = "tests.project.urls"
    limit("/x/")
    allowed = 0
    for code in ["en", "de", "fr"] * 3:
        request = views.request_from(urlconf=BARE)
        with translation.override(code):
            request.resolver_match = resolve("/x/" if code == "en" else f"/{code}/x/", BARE)
            allowed += check_request(request).allowed
    assert allowed == LIMIT


def test_a_language_that_the_settings_do_not_name(settings: Any) -> None:
    """Middleware may activate any."""
    with translation.override("de-at"):
        assert resolved(resolve("/de-at/x/")) == ("/x/", "x")


# --- What operators see. ---


@pytest.mark.parametrize("code", ["en", "de", None])
def test_pages_know_routes_in_the_default_language_alone(code: str | None) -> None:
    with translation.override(code):
        routes = dict(known_routes())
        assert {"/", "/x/", "/about/us/", "/contact/", "/shop/x/"} <= routes.keys()
        assert not [route for route in routes if "/de/" in route or "ueber" in route]
        for route in ("/x/", "/de/x/", "/fr/x/"):
            endpoint = Endpoint(name="guarded", routes=route)
            assert matched_routes(endpoint, known_routes()) == [("/x/", "x")]
            assert about_endpoint(endpoint) == []
        assert about_endpoint(Endpoint(name="guarded", routes="/xx/x/")) != []


@pytest.mark.parametrize("code", ["en", "de"])
@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/x/", "/x/"),
        ("/de/x/", "/x/"),
        ("/fr/x/?a=b", "/x/"),
        ("/de/ueber/us/", "/about/us/"),
        ("/kontakt/", "/contact/"),
        (r"/de/old/(?P<pk>\d+)/", r"/old/(?P<pk>\d+)/"),
        ("/de/old/7/", r"/old/(?P<pk>\d+)/"),
        ("/shop/x/", "/shop/x/"),
    ],
)
def test_explain_finds_a_path_of_any_language(code: str, path: str, route: str) -> None:
    with translation.override(code):
        assert ExplainQuery(path=path).request_arguments()["route"] == route
        assert translation.get_language() == code
        with pytest.raises(ValidationError):
            ExplainQuery(path="/xx/x/").request_arguments()
        assert find_route("/xx/x/") is None


def test_a_text_that_two_patterns_have_is_both() -> None:
    """One's German is the other's English."""
    first = path(translated(en="items/", de="artikel/"), views.plain)
    second = path(translated(en="articles/", de="items/"), views.plain)
    languages = module.Languages(SimpleNamespace(url_patterns=[first, second]))  # type: ignore[arg-type]
    assert set(languages.spellings("/items/")) == {"/items/", "/artikel/", "/articles/"}


def test_urlconfs_are_walked_once_whatever_clients_ask(client: Client) -> None:
    for n in range(5):
        client.get(f"/de/old/{n}/")
        client.get(f"/l{n}/x/")
    assert (module.languages_of.cache_info().misses, module.canonical.cache_info().currsize) == (1, 1)
