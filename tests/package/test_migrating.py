"""docs/migrating.md: its snippets limit a project."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import server

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "migrating.md").read_text()

SETTINGS = """
SECRET_KEY = "guide"
ROOT_URLCONF = "urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "django_ratequota"]
ALLOWED_HOSTS = ["testserver"]
RATEQUOTA = {"PREFIX": "rqtest.guide", "TIMEOUT": 5.0, "DENY_CACHE_SECONDS": 0}
"""
URLS = """
from django.urls import path
from rest_framework.response import Response
from rest_framework.views import APIView
import views

class Api(APIView):
    def get(self, request):
        return Response()

urlpatterns = [path("api/", Api.as_view()), path("login/", views.login), path("report/", views.report)]
"""
DRIVE = """
import django
django.setup()
from django.core.management import call_command
from django.test import Client
call_command("check", fail_level="WARNING")
call_command("migrate", verbosity=0)
get = Client().get
# No window ends while this runs.
from django_ratequota.compat.ratelimit import core
limiter_of, noon = core.limiter_of, lambda: 1_763_726_400 * 10**6
core.limiter_of = lambda *cache, **options: limiter_of(*cache, clock=noon, **options)
"""
IMPORT = """
from django.conf import settings
from rest_framework.settings import api_settings
from django.test.utils import override_settings
from settings_policies import REST_FRAMEWORK as then
call_command("ratequota", "import", "drf.yaml", stdout=__import__("io").StringIO())
from urls import Api
with override_settings(REST_FRAMEWORK=then):
    Api.throttle_classes = api_settings.DEFAULT_THROTTLE_CLASSES
    print([get("/api/").status_code for _ in range(4)])
"""


def snippet(name: str) -> str:
    found = re.search(rf"```(?:python|yaml)\n(# {re.escape(name)}\n.*?)```", GUIDE, re.DOTALL)
    assert found, name
    return found[1]


def run(home: Path, code: str) -> list[str]:
    (home / "project.py").write_text(SETTINGS + server_line() + snippet("settings.py"))
    (home / "urls.py").write_text(URLS)
    for name in ("throttles.py", "settings_policies.py", "drf.yaml", "views.py"):
        (home / name).write_text(snippet(name))
    environment = os.environ | {"DJANGO_SETTINGS_MODULE": "project", "PYTHONPATH": f"{ROOT}{os.pathsep}{home}"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", DRIVE + code],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[1:]


def server_line() -> str:
    backend = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": server.url()}
    return f"CACHES = {{'default': {backend!r}}}\n"


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("print([get('/api/').status_code for _ in range(5)])", ["[200, 200, 200, 429, 429]"]),
        ("print([get('/login/').status_code for _ in range(7)])", ["[200, 200, 200, 200, 200, 403, 403]"]),
        (
            "from django.contrib.auth.models import AnonymousUser\n"
            "from django.test import RequestFactory\n"
            "from asgiref.sync import async_to_sync\n"
            "import views\n"
            "def ask():\n"
            "    request = RequestFactory().get('/')\n"
            "    request.user = AnonymousUser()\n"
            "    return async_to_sync(views.report)(request).content.decode()\n"
            "print([ask() for _ in range(3)])",
            ["['here it is', 'here it is', 'later']"],
        ),
        (IMPORT, ["[200, 200, 200, 429]"]),
    ],
    ids=["DRF's throttles", "django-ratelimit", "async", "policies"],
)
def test_snippets(redis_client: object, tmp_path: Path, code: str, lines: list[str]) -> None:
    assert run(tmp_path, code) == lines


def test_every_snippet_is_run() -> None:
    named = re.findall(r"```python\n# (\S+)\n", GUIDE)
    assert sorted(named) == ["settings.py", "settings_policies.py", "throttles.py", "views.py"]
    assert GUIDE.count("```python") == len(named)
