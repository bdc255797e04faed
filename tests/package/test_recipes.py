"""docs/howto/recipes.md: what each recipe does to the requests of a project."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path

from tests.enforcement.test_check import CLOSED
from tests.support.snippets import ROOT

PAGE = (ROOT / "docs/howto/recipes.md").read_text()
RECIPES = dict(re.findall(r"^## (.+?)\n.*?^```yaml\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def view(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


ROUTES = ("health/", "api/items/", "api/exports/", "completions/")
urlpatterns = [path(route, view) for route in ROUTES]

#: Recipe -> who asks for what, and the limits that the response shows, or its status if it shows none.
EXPECTED: dict[str, list[tuple[str, str, str]]] = {
    "100 requests a minute for each client": [("alice", "/api/items/", '"all/min";q=100;w=60')],
    "100 requests a minute for each API key": [
        ("key-of-acme", "/api/items/", '"all/min per api_key";q=100;w=60, "all/min per ip";q=300;w=60'),
        ("made-up", "/api/items/", '"all/min per ip";q=300;w=60'),
    ],
    "10 requests a second with bursts of 50": [("alice", "/api/items/", '"all/s";q=10;w=1')],
    "1,000 requests each calendar day": [("alice", "/api/items/", '"all/day fixed_window";q=1000;w=86400')],
    "A free and a paid plan": [("alice", "/api/items/", '"all/min";q=60;w=60, "all/month";q=10000')],
    "Less for anonymous clients": [
        ("alice", "/api/items/", '"all/min";q=100;w=60'),
        ("", "/api/items/", '"all/min";q=10;w=60'),
    ],
    "A monthly quota of tokens and a limit of requests": [("alice", "/completions/", '"completions/month"')],
    "Fewer writes than reads": [
        ("alice", "/api/items/", '"reads/min";q=100;w=60'),
        ("alice", "POST /api/items/", '"writes/min";q=10;w=60'),
    ],
    "A higher limit for one user until a date": [
        ("alice", "/api/items/", '"all/min";q=1000;w=60'),
        ("", "/api/items/", '"all/min";q=100;w=60'),
    ],
    "Block a network": [("alice", "/api/items/", "429"), ("elsewhere", "/api/items/", "200")],
    "A feature for one plan only": [("alice", "/api/exports/", "429"), ("alice", "/api/items/", "200")],
    "A limit that all clients share": [("alice", "/api/exports/", '"exports/min per everyone";q=20;w=60')],
    "Stay closed while Redis is down": [("alice", "/api/exports/", '"exports/hour";q=10;w=3600')],
    "Try a limit before you enforce it": [("alice", "/api/items/", "200")],
    "Never limit health checks": [("alice", "/health/", "200"), ("alice", "/api/items/", '"all/min";q=100;w=60')],
}


def test_every_recipe_is_tried() -> None:
    assert set(RECIPES) == set(EXPECTED)


def use(recipe: str, settings: Any, folder: Path) -> None:
    identifiers = {"api_key": "tests.package.test_recipes.api_key"}
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True, "IDENTIFIERS": identifiers}
    User.objects.create_user("alice", password="secret")
    file = folder / "policies.yaml"
    file.write_text(RECIPES[recipe])
    call_command("ratequota", "import", str(file), stdout=io.StringIO())


def api_key(request: HttpRequest) -> str | None:
    key = request.headers.get("X-API-Key")
    return key if key == "key-of-acme" else None


def ask(who: str, what: str) -> HttpResponse:
    address = "198.51.100.7" if who == "elsewhere" else "203.0.113.7"
    client = Client(REMOTE_ADDR=address)
    if who == "alice":
        client.force_login(User.objects.get())
    method, _, route = what.rpartition(" ")
    return client.generic(method or "GET", route, headers={"X-API-Key": who} if "-" in who else {})


@pytest.mark.urls(__name__)
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies")
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_limits_as_its_title_says(recipe: str, settings: Any, tmp_path: Path) -> None:
    use(recipe, settings, tmp_path)
    for who, what, expected in EXPECTED[recipe]:
        response = ask(who, what)
        found = response.headers.get("RateLimit-Policy", str(response.status_code))
        assert expected in found, f"{who} {what}: {found}"
        if expected.isdecimal():
            assert found == expected


@pytest.mark.urls(__name__)
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies")
def test_an_endpoint_that_denies_is_closed_without_redis(settings: Any, tmp_path: Path) -> None:
    use("Stay closed while Redis is down", settings, tmp_path)
    assert ask("alice", "/api/exports/").status_code == 200
    settings.RATEQUOTA = {**CLOSED, "ENFORCE_ALL": True}
    assert [ask("alice", route).status_code for route in ("/api/exports/", "/api/items/")] == [503, 200]
