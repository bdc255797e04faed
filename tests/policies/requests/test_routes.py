"""Routes as Django resolves them, never as clients spell them; scopes that the URLconf's views name."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from django.test import Client
from django.urls import include, path, re_path, resolve
from django.views.decorators.cache import never_cache
from rest_framework.urlpatterns import format_suffix_patterns

from django_ratequota.decorators import ratequota
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.policies.requests.routes import known_routes, known_scopes, resolved, spellings
from django_ratequota.policies.requests.translated_routes import readable
from django_ratequota.policies.requests.view_facts import facts_of
from tests.project import views

PK = "(?P<pk>[^/.]+)"
FORMAT = r"\.(?P<format>[a-z0-9]+)/?"
#: A route in any case, with or without the last slash.
FILES = "/[fF][iI][lL][eE][sS]/?"


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        ("", "/"),
        ("/plain/", "/plain/"),
        (f"api/^reports/{PK}/$", f"/api/reports/{PK}/"),
        (rf"api/^reports/{PK}/\Z", f"/api/reports/{PK}/"),
        (rf"api/^reports/{PK}/\z", f"/api/reports/{PK}/"),
        ("^api/^reports/$", "/api/reports/"),
        # anchors only at the ends, character classes left whole
        ("^a[^/]b/$", "/a[^/]b/"),
        ("price/$/", "/price/$/"),
    ],
)
def test_readable(route: str, expected: str) -> None:
    assert readable(route) == expected


@pytest.mark.parametrize(
    ("path", "route", "name"),
    [
        ("/plain/", "/plain/", "plain"),
        ("/v1/items/0007/", "/v1/items/<int:pk>/", "v1:item"),
        ("/api/reports/7/", f"/api/reports/{PK}/", "report-detail"),
        ("/api/reports/7.json", f"/api/reports/{PK}{FORMAT}", "report-detail"),
        ("/files", FILES, "files"),
        ("/nameless/", "/nameless/", "tests.project.views.plain"),
        ("/admin/login/", "/admin/login/", "admin:login"),
    ],
)
def test_resolved(path: str, route: str, name: str) -> None:
    assert resolved(resolve(path)) == (route, name)


def reports(request: Any, **kwargs: Any) -> None:
    """Any view."""


@pytest.mark.parametrize("kwarg", ["format", "kind"])
@pytest.mark.parametrize("allowed", [None, ["json"], ["json", "html"]])
@pytest.mark.parametrize(
    "pattern", [re_path("^reports/$", reports), re_path("^reports$", reports), path("reports/", reports)]
)
def test_a_format_suffix_is_one_spelling_of_its_route(
    settings: Any, pattern: Any, allowed: list[str] | None, kwarg: str
) -> None:
    settings.REST_FRAMEWORK = {"FORMAT_SUFFIX_KWARG": kwarg}
    plain, suffixed = format_suffix_patterns([path("api/", include([pattern]))], allowed=allowed)[0].url_patterns
    assert spellings(readable(f"api/{plain.pattern}")) == (readable(f"api/{plain.pattern}"),)
    route = readable(f"api/{suffixed.pattern}")
    assert spellings(route) == (route, "/api/reports", "/api/reports/")
    settings.REST_FRAMEWORK = {"FORMAT_SUFFIX_KWARG": "other"}
    assert spellings(route) == (route,)


@pytest.mark.parametrize("root", [re_path("^$", reports), path("", reports)])
def test_a_root_with_a_format_suffix_is_the_root(root: Any) -> None:
    _plain, suffixed = format_suffix_patterns([root])
    route = readable(f"api/{suffixed.pattern}")
    assert spellings(route) == (route, "/api/")


def test_other_routes_have_one_spelling() -> None:
    for route in (
        "/files/(?P<name>[^/]+)/",
        r"/files\.(?P<ext>[a-z0-9]+)/?",
        r"/files/\.(?P<format>[a-z0-9]+)/x/",
        "/files/<str:format>",
    ):
        assert spellings(route) == (route,)


def test_an_unresolved_request_has_no_route() -> None:
    assert resolved(None) == (None, None)


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies")
@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        (
            "/v1/items/<int:pk>/",
            ["/v1/items/7/", "/v1/items/0007/", "/v1/items/8/?x=/plain/", "/v1/%69tems/9/", "/v1//../x"],
            ["/plain/", "/plain/?next=/v1/items/7/", "/plain/?/v1/items/7/"],
        ),
        (FILES, ["/files/", "/files", "/FILES", "/fIlEs/"], ["/plain/"]),
        (
            "/api/reports/*",
            ["/api/reports/7/", "/api/reports/7.json", "/api/reports/", "/api/reports.json"],
            ["/api/", "/api/.json"],
        ),
        ("/api/reports/", ["/api/reports/", "/api/reports.json", "/api/reports.json/"], ["/api/", "/api/reports/7/"]),
        (f"/api/reports/{PK}/", ["/api/reports/7/", "/api/reports/7.json"], ["/api/reports/", "/api/reports.json"]),
        (f"/api/reports{FORMAT}", ["/api/reports.json"], ["/api/reports/", "/api/reports/7.json"]),
        ("report-*", ["/api/reports/7/", "/api/reports/7.json", "/api/reports/"], ["/api/"]),
        ("v1:*", ["/v1/items/7/"], ["/plain/", "/nameless/"]),
    ],
)
def test_no_spelling_of_a_path_leaves_its_endpoint(
    client: Client, settings: Any, pattern: str, inside: list[str], outside: list[str]
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="guarded", routes=pattern), rates="blocked")
    assert {client.get(path).status_code for path in inside} <= {429, 404}
    assert client.get(inside[0]).status_code == 429
    assert {client.get(path).status_code for path in outside} == {200}


@pytest.mark.parametrize(
    ("path", "scope", "itself"),
    [
        ("/plain/", None, False),
        ("/aplain/", None, False),
        ("/decorated/", "search", True),
        ("/adecorated/", "search", True),
        ("/bare/", None, True),
        ("/class/", "search", True),
        ("/aclass/", "search", True),
        ("/search/", "search", True),
        ("/api-search/", "search", True),
        ("/unthrottled/", None, False),
        ("/api/reports/", None, True),
        # an action that replaces its viewset's throttles
        ("/api/reports/export/", None, False),
        ("/admin/login/", None, False),
    ],
)
def test_the_scope_that_a_view_declares(path: str, scope: str | None, itself: bool) -> None:
    view = resolve(path).func
    assert facts_of(view).scope() == scope
    assert facts_of(view).enforces_itself() is itself
    wrapped = never_cache(view)
    assert (facts_of(wrapped).scope(), facts_of(wrapped).enforces_itself()) == (scope, itself)


def test_a_decorator_that_is_applied_later_and_a_patch_of_a_test_are_seen() -> None:
    """A project's tests switch throttles off so, and a URLconf may be imported with its first request."""
    view = type("View", (views.Search,), {}).as_view()
    assert facts_of(view).enforces_itself()
    with patch.object(view.cls, "throttle_classes", []):
        assert not facts_of(view).enforces_itself()
    assert facts_of(view).late_check("GET") == ("search", None)
    bare = type("View", (views.Search,), {"throttle_classes": []}).as_view()
    assert facts_of(bare).late_check("GET") is None
    assert facts_of(ratequota("other")(bare)).late_check("GET") == ("other", None)


@pytest.mark.parametrize(
    ("own", "given", "scope"),
    [
        ("search", {}, "search"),
        ("search", {"throttle_scope": "export"}, "export"),
        ("search", {"throttle_scope": None}, None),
        (None, {"throttle_scope": "export"}, "export"),
        (7, {}, None),
        ("", {}, None),
    ],
)
def test_arguments_of_as_view_precede_class_attributes(own: Any, given: dict[str, Any], scope: str | None) -> None:
    assert facts_of(type("View", (views.Search,), {"throttle_scope": own}).as_view(**given)).scope() == scope


def test_known_routes_are_the_urlconfs_without_the_admins() -> None:
    routes = known_routes()
    assert ("/v1/items/<int:pk>/", "v1:item") in routes
    assert (f"/api/reports/{PK}/", "report-detail") in routes
    assert ("/nameless/", "") in routes
    assert routes.index(("/plain/", "plain")) < routes.index(("/aplain/", "aplain"))
    assert not [name for _, name in routes if name.startswith("admin:")]


def test_known_scopes_are_those_that_views_declare() -> None:
    assert list(known_scopes()) == ["search", "usage"]
