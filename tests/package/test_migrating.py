"""docs/migrating.md: its snippets limit a project."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import server
from tests.support.projects import run_project
from tests.support.snippets import ROOT, snippets

FILES = {
    one.text.splitlines()[0].removeprefix("# "): one.text
    for one in snippets(ROOT / "docs" / "migrating.md")
    if one.language in ("python", "yaml") and one.text.startswith("# ")
}
SETTINGS = """
INSTALLED_APPS += ["django_ratequota"]
RATEQUOTA = {"PREFIX": "rqtest.guide", "TIMEOUT": 5.0, "DENY_CACHE_SECONDS": 0}
CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": %r}}
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
NOON = """
# No window ends while this runs.
from django_ratequota.compat.ratelimit import core
limiter_of, noon = core.limiter_of, lambda: 1_763_726_400 * 10**6
core.limiter_of = lambda *cache, **options: limiter_of(*cache, clock=noon, **options)
"""
ASYNC = """
from django.contrib.auth.models import AnonymousUser
from django.test import RequestFactory
from asgiref.sync import async_to_sync
import views
def ask():
    request = RequestFactory().get("/")
    request.user = AnonymousUser()
    return async_to_sync(views.report)(request).content.decode()
print([ask() for _ in range(3)])
"""
IMPORT = """
from django.conf import settings
from rest_framework.settings import api_settings
from django.test.utils import override_settings
from settings_policies import REST_FRAMEWORK as then
call_command("ratequota", "import", "drf.yaml", stdout=io.StringIO())
from urls import Api
with override_settings(REST_FRAMEWORK=then):
    Api.throttle_classes = api_settings.DEFAULT_THROTTLE_CLASSES
    print([get("/api/").status_code for _ in range(4)])
"""


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("print([get('/api/').status_code for _ in range(5)])", "[200, 200, 200, 429, 429]"),
        ("print([get('/login/').status_code for _ in range(7)])", "[200, 200, 200, 200, 200, 403, 403]"),
        (ASYNC, "['here it is', 'here it is', 'later']"),
        (IMPORT, "[200, 200, 200, 429]"),
    ],
    ids=["DRF's throttles", "django-ratelimit", "async", "policies"],
)
def test_snippets(redis_client: object, tmp_path: Path, code: str, line: str) -> None:
    settings = SETTINGS % server.url() + FILES["settings.py"]
    assert run_project(tmp_path, {**FILES, "urls.py": URLS, "settings.py": settings}, NOON + code) == [line]


def test_every_snippet_is_run() -> None:
    assert sorted(FILES) == ["drf.yaml", "settings.py", "settings_policies.py", "throttles.py", "views.py"]
    assert (ROOT / "docs" / "migrating.md").read_text().count("```python") == 4
