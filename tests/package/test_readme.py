"""The README's snippets run as they stand, and its table of settings is the code's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from django_ratequota.conf import KEYS, Settings
from tests.support import server
from tests.support.snippets import ROOT, links, snippet

PAGE = ROOT / "README.md"
README = PAGE.read_text()

#: What a project has before it adds the app; the README's lines come below.
SETTINGS = """
SECRET_KEY = "readme"
ROOT_URLCONF = "urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes"]
MIDDLEWARE = []
ALLOWED_HOSTS = ["testserver"]
RATEQUOTA = {"PREFIX": "rqtest.readme", "TIMEOUT": 5.0}
"""
URLS = """
from django.urls import path
import metered, views
urlpatterns = [path("s/", views.Search.as_view()), path("e/", views.export), path("c/", metered.complete)]
"""
DRIVE = """
import django
django.setup()
from django.core.management import call_command
from django.test import Client
call_command("migrate", verbosity=0)
from django_ratequota.models import Endpoint, RatePolicy
for name, rates in {"search": "12/hour", "exports": "1/hour", "completions": "400/hour"}.items():
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name=name), rates=rates)
get = Client().get
print([get("/s/").status_code for _ in range(3)], get("/s/")["X-RateLimit-Remaining"])
print([get("/e/").status_code for _ in range(2)], get("/e/")["RateLimit-Policy"])
print(get("/c/").json(), get("/c/").json(), get("/c/").status_code)
"""


def test_the_snippets_limit_a_new_project(redis_client: object, tmp_path: Path) -> None:
    lines = snippet(PAGE, "settings.py")
    assert len(lines.splitlines()) == 5, "an app is wired in a comment and four lines"
    added = lines.replace("redis://127.0.0.1:6379/0", server.url())
    assert server.url() in added
    (tmp_path / "settings.py").write_text(SETTINGS + added)
    (tmp_path / "views.py").write_text(snippet(PAGE, "views.py"))
    (tmp_path / "metered.py").write_text(snippet(PAGE, "metered.py"))
    (tmp_path / "urls.py").write_text(URLS)
    environment = os.environ | {"DJANGO_SETTINGS_MODULE": "settings", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    result = subprocess.run(
        [sys.executable, "-c", DRIVE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.splitlines() == [
        "[200, 200, 429] 2",
        '[200, 429] "exports/hour";q=1;w=3600',
        "{'remaining': 250} {'remaining': 100} 429",
    ], result.stderr


def rows() -> dict[str, str]:
    return dict(re.findall(r"^\| `([A-Z0-9_]+)` \| (.*?) \|", README, re.MULTILINE))


def test_the_table_has_every_setting() -> None:
    assert set(rows()) == set(KEYS)


@pytest.mark.parametrize("key", sorted(set(rows()) - {"TIME_ZONE"}))
def test_the_table_has_the_right_defaults(key: str) -> None:
    default = getattr(Settings(), key.lower())
    shown = rows()[key].strip("`").replace('"', "'")
    assert shown == repr(list(default) if isinstance(default, tuple) else default)


def test_the_text_before_the_first_link_is_short() -> None:
    before = re.split(r"(?<!!)\[[^\]]+\]\(", README)[0]
    assert len(before.split()) < 400
    assert [link for link in links(PAGE) if not (ROOT / link).exists()] == []
