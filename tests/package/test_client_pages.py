"""docs/api.md, with the API of howto/ninja.md, and docs/metrics.md: snippets run, and the bodies shown are sent."""

from __future__ import annotations

import json
from pathlib import Path

import redis

from tests.support import server
from tests.support.projects import run_project
from tests.support.snippets import ROOT, snippets

SETTINGS = """
INSTALLED_APPS += ["rest_framework", "drf_spectacular", "drf_standardized_errors", "django_ratequota", "shop"]
MIDDLEWARE = ["django_ratequota.middleware.RateQuotaMiddleware"]
RATEQUOTA = {"PREFIX": "rqtest.pages", "REDIS_URL": %r, "TIMEOUT": 5.0, "STATISTICS_SECONDS": 20}
ROOT_URLCONF = "project_urls"
"""
URLS = """
from django.urls import include, path
import limited, metrics_urls, urls
from rest_framework.response import Response
from rest_framework.views import APIView

class Search(APIView):
    throttle_scope = "search"
    def get(self, request):
        return Response([])

urlpatterns = [
    path("api/", include(urls)), path("ninja/", limited.api.urls), path("", include(metrics_urls)),
    path("search/", Search.as_view()),
]
"""
DRIVE = """
import json
import errors, schema, telemetry
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.workers import redis_worker
from django_ratequota.models import Endpoint, RatePolicy
from drf_spectacular.generators import SchemaGenerator
redis_worker.keep = lambda: None
RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="search"), rates="10/h burst 11")
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


def blocks(page: str, language: str = "python", name: str = "") -> list[str]:
    found = [one.text for one in snippets(ROOT / "docs" / page) if one.language == language]
    return [text for text in found if not name or text.startswith(f"# {name}\n")]


def test_the_snippets_together_make_a_working_project(redis_client: redis.Redis, tmp_path: Path) -> None:
    merged = [f"{block}\nrest |= REST_FRAMEWORK" for block in blocks("api.md", name="settings.py")]
    settings = [SETTINGS % server.url(), "rest = {}", *merged, "REST_FRAMEWORK = rest"]
    files = {"settings.py": "\n".join(settings), "project_urls.py": URLS, "shop/__init__.py": ""}
    for page, file, name in (
        ("api.md", "urls.py", "urls.py"),
        ("api.md", "errors.py", "errors.py"),
        ("api.md", "schema.py", "schema.py"),
        ("howto/ninja.md", "limited.py", "mysite/api.py"),
        ("metrics.md", "metrics_urls.py", "urls.py"),
        ("metrics.md", "telemetry.py", "telemetry.py"),
        ("metrics.md", "gunicorn.conf.py", "gunicorn.conf.py"),
        ("metrics.md", "shop/apps.py", "apps.py"),
    ):
        files[file] = "\n".join(blocks(page, name=name))
        assert files[file], (page, name)
    # A block that is none of these, nobody runs; security/test_shared_counters.py runs usage.py.
    assert len(blocks("api.md") + blocks("metrics.md")) == 10

    printed = run_project(tmp_path, files, DRIVE, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    seen = json.loads(next(line for line in printed if line.startswith('{"drf"')))

    assert seen["drf"] == [200] * 6
    assert seen["ninja"] == [200, 429, 200]
    assert seen["types"] == ["application/problem+json"] * 2
    assert seen["documented"] == ["200", "429", "503"]
    assert seen["both"] == [True, ["QuotaSchema", "AutoSchema"]]
    assert 'ratequota_decisions_total{endpoint="search",outcome="admitted"}' in seen["metrics"]
    assert "ratequota_" not in seen["registered"], "in multiprocess mode they are in the files"
    assert '"ratequota.decisions"' in "".join(printed)

    usage, _history, problem = (json.loads(block) for block in blocks("api.md", "json"))
    assert usage.keys() == seen["usage"].keys()
    assert usage["limits"][0].keys() == seen["usage"]["limits"][0].keys()
    for sent in seen["problems"]:
        assert sent.keys() == problem.keys()
        assert {name: sent[name] for name in ("type", "title", "status")}.items() <= problem.items()
