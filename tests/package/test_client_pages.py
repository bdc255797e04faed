"""docs/api.md and docs/metrics.md: every snippet runs, and the bodies shown are those sent."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import redis

from tests.support import server

ROOT = Path(__file__).parents[2]

SETTINGS = """
SECRET_KEY = "pages"
ROOT_URLCONF = "project_urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
INSTALLED_APPS = [
    "django.contrib.auth", "django.contrib.contenttypes", "rest_framework", "drf_spectacular",
    "drf_standardized_errors", "django_ratequota", "shop",
]
MIDDLEWARE = ["django_ratequota.middleware.RateQuotaMiddleware"]
ALLOWED_HOSTS = ["testserver"]
RATEQUOTA = {"PREFIX": "rqtest.pages", "REDIS_URL": %r, "TIMEOUT": 5.0, "STATISTICS_SECONDS": 20}
"""
URLS = """
from django.urls import include, path
import api, metrics_urls, urls
from rest_framework.response import Response
from rest_framework.views import APIView

class Search(APIView):
    throttle_scope = "search"
    def get(self, request):
        return Response([])

urlpatterns = [
    path("api/", include(urls)), path("ninja/", api.api.urls), path("", include(metrics_urls)),
    path("search/", Search.as_view()),
]
"""
DRIVE = """
import asyncio, json, django
django.setup()
import errors, schema, telemetry
from django.core.management import call_command
from django.test import Client
call_command("migrate", verbosity=0)
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.sending import sending
from django_ratequota.models import Endpoint, RatePolicy
from drf_spectacular.generators import SchemaGenerator
sending.keep = lambda: None
RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="search"), rates="10/h burst 11")
get = Client().get
seen = {"drf": [get("/search/").status_code for _ in range(6)]}
seen["usage"] = get("/api/quota/usage/?scope=search").json()
seen["ninja"] = [get("/ninja/search").status_code for _ in range(2)] + [get("/ninja/reports").status_code]
seen["problems"] = [get("/search/"), get("/ninja/search")]
seen["types"] = [answer["Content-Type"] for answer in seen["problems"]]
seen["problems"] = [answer.json() for answer in seen["problems"]]
found = SchemaGenerator().get_schema(public=True)
seen["documented"] = sorted(found["paths"]["/search/"]["get"]["responses"])
bases = [base.__name__ for base in schema.AutoSchema.__bases__]
seen["both"] = [hasattr(errors.exception_handler, "returns_problems"), bases]
collector.flush()
seen["metrics"] = get("/metrics/").content.decode()
from prometheus_client import generate_latest
seen["registered"] = generate_latest().decode()
from types import SimpleNamespace
telemetry.metrics.get_meter_provider().force_flush()
exec(open("gunicorn.conf.py").read())
child_exit(None, SimpleNamespace(pid=1))
print(json.dumps(seen))
"""


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def named(page: str, name: str) -> list[str]:
    found = [block for block in blocks(page) if block.startswith(f"# {name}\n")]
    assert found, (page, name)
    return found


def test_the_snippets_together_make_a_working_project(redis_client: redis.Redis, tmp_path: Path) -> None:
    merged = [f"{block}\nrest |= REST_FRAMEWORK" for block in named("api.md", "settings.py")]
    settings = [SETTINGS % server.url(), "rest = {}", *merged, "REST_FRAMEWORK = rest"]
    (tmp_path / "settings.py").write_text("\n".join(settings))
    (tmp_path / "project_urls.py").write_text(URLS)
    (tmp_path / "urls.py").write_text(*named("api.md", "urls.py"))
    (tmp_path / "errors.py").write_text(*named("api.md", "errors.py"))
    (tmp_path / "schema.py").write_text(*named("api.md", "schema.py"))
    (tmp_path / "api.py").write_text("\n".join(named("api.md", "api.py")))
    (tmp_path / "metrics_urls.py").write_text(*named("metrics.md", "urls.py"))
    (tmp_path / "telemetry.py").write_text(*named("metrics.md", "telemetry.py"))
    (tmp_path / "gunicorn.conf.py").write_text(*named("metrics.md", "gunicorn.conf.py"))
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "shop" / "apps.py").write_text(*named("metrics.md", "apps.py"))
    # A block that is none of these, nobody runs.
    assert len(blocks("api.md") + blocks("metrics.md")) == 11

    environment = os.environ | {"DJANGO_SETTINGS_MODULE": "settings", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    environment |= {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", DRIVE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    seen = json.loads(next(line for line in result.stdout.splitlines() if line.startswith('{"drf"')))

    assert seen["drf"] == [200] * 6
    assert seen["ninja"] == [200, 429, 200]
    assert seen["types"] == ["application/problem+json"] * 2
    assert seen["documented"] == ["200", "429", "503"]
    assert seen["both"] == [True, ["QuotaSchema", "AutoSchema"]]
    assert 'ratequota_decisions_total{endpoint="search",outcome="admitted"}' in seen["metrics"]
    assert "ratequota_" not in seen["registered"], "in multiprocess mode they are in the files"
    assert '"ratequota.decisions"' in result.stdout

    usage, _history, problem = (json.loads(block) for block in blocks("api.md", "json"))
    assert usage.keys() == seen["usage"].keys()
    assert usage["limits"][0].keys() == seen["usage"]["limits"][0].keys()
    for sent in seen["problems"]:
        assert sent.keys() == problem.keys()
        assert [sent[name] for name in ("type", "title", "status")] == [
            problem[name] for name in ("type", "title", "status")
        ]
