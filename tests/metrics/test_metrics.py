"""Metrics: decisions are counted by endpoint, policy and outcome, without callers, and without work in requests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from django.contrib.auth.models import User
from django.test import Client
from django.urls import path
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from django_ratequota import check_request
from django_ratequota.exceptions import StoreError
from django_ratequota.metrics import METRICS, opentelemetry, prometheus, tally
from django_ratequota.models import Endpoint, Plan, RatePolicy
from django_ratequota.monitoring import health
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.health import NO_BREAKER
from django_ratequota.policies.cache import policies
from django_ratequota.runtime import default_limiter
from tests.project import urls
from tests.project.views import request_from
from tests.support import server

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies"),
    pytest.mark.urls("tests.metrics.test_metrics"),
]
urlpatterns = [*urls.urlpatterns, path("metrics/", prometheus.view)]

DOCS = Path(__file__).parents[2] / "docs"
DOWN = {"REDIS_URL": "redis://127.0.0.1:1/0", "STATISTICS_SECONDS": 1}


@pytest.fixture(autouse=True)
def counting(recording: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count decisions from zero, when the test calls ``flush``."""
    monkeypatch.setattr(health, "_degraded", type(health._degraded)())
    tally.tally.clear()
    yield
    tally.tally.clear()


def scrape(client: Client | None = None) -> dict[str, float]:
    """Return the values that Prometheus reads, by ``name{label="value",...}``."""
    if client is None:
        registry = CollectorRegistry()
        prometheus.register(registry)
        text = generate_latest(registry).decode()
    else:
        text = client.get("/metrics/").content.decode()
    return read(text)


def read(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def decisions(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if "decisions_total" in name}


def ask_search(*, scope: str = "search", **who: Any) -> None:
    check_request(request_from(**who), scope=scope)
    collector.flush()


def by_policy(endpoint: str, outcome: str, policy: str) -> str:
    return f'ratequota_policy_decisions_total{{endpoint="{endpoint}",outcome="{outcome}",policy="{policy}"}}'


def test_decisions_are_counted_by_endpoint_policy_and_outcome(client: Client, search: Endpoint) -> None:
    free = Plan.objects.create(name="Free", slug="free", default_for="anonymous")
    own = RatePolicy.objects.create(endpoint=search, plan=free, rates="2/hour")
    every = RatePolicy.objects.create(rates="100/hour", counted_per="everyone")
    trial = RatePolicy.objects.create(endpoint=search, rates="1/hour", counted_per="ip", mode="log")
    assert [client.get("/search/").status_code for _ in range(3)] == [200, 200, 429]
    client.get("/reports/")
    client.get("/bare/")
    collector.flush()
    assert decisions(scrape(client)) == {
        'ratequota_decisions_total{endpoint="(none)",outcome="admitted"}': 1,
        'ratequota_decisions_total{endpoint="search",outcome="admitted"}': 1,
        'ratequota_decisions_total{endpoint="search",outcome="would_refuse"}': 1,
        'ratequota_decisions_total{endpoint="search",outcome="refused"}': 1,
        by_policy("all", "admitted", f"everyone-{every.pk}"): 3,
        by_policy("search", "admitted", f"free-{own.pk}"): 2,
        by_policy("search", "refused", f"free-{own.pk}"): 1,
        by_policy("search", "admitted", f"everyone-{trial.pk}"): 1,
        by_policy("search", "would_refuse", f"everyone-{trial.pk}"): 1,
    }


def test_a_flood_of_subjects_adds_no_series(search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="1/hour")
    users = [User.objects.create(username=f"user{number}") for number in range(20)]
    RatePolicy.objects.bulk_create([RatePolicy(endpoint=search, user=user, rates="1/hour") for user in users])
    RatePolicy.objects.create(endpoint=search, subject="ip:203.0.113.5", rates="1/hour")

    def ask(numbers: range) -> dict[str, float]:
        for number in numbers:
            for client in ({"address": f"203.0.113.{number}"}, {"user": users[number]}):
                for _ in range(2):
                    check_request(request_from(**client), scope="search")
        collector.flush()
        return scrape()

    few, many = ask(range(4, 6)), ask(range(20))
    assert few.keys() == many.keys()
    assert many['ratequota_decisions_total{endpoint="search",outcome="admitted"}'] == 40
    overrides = by_policy("(any)", "admitted", "(overrides)")
    assert (few[overrides], many[overrides]) == (3, 21)
    assert not re.search(r"203\.0\.113|user\d", "".join(many))


def test_the_number_of_series_is_bounded(search: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "MAX_SERIES", 2)
    for name in ("a", "b", "c", "d"):
        Endpoint.objects.filter(pk=search.pk).update(name=name)
        ask_search(scope=name)
    assert dict(tally.tally.by_endpoint()) == {("a", "admitted"): 1, ("b", "admitted"): 1, ("(other)", "admitted"): 2}


def test_decisions_before_a_deletion_are_counted_under_the_policys_name(search: Endpoint) -> None:
    policy = RatePolicy.objects.create(endpoint=search, rates="9/hour")
    ask_search()
    check_request(request_from(), scope="search")
    name = f"everyone-{policy.pk}"
    assert dict(tally.tally.by_policy()) == {("search", name, "admitted"): 1}, "the thread that sends counts counts"
    policy.delete()
    policies.reload(default_limiter().stored_revision())
    collector.flush()
    assert dict(tally.tally.by_policy()) == {("search", name, "admitted"): 2}


def test_metrics_keep_counts_that_redis_does_not_take(search: Endpoint, settings: Any) -> None:
    RatePolicy.objects.create(endpoint=search, rates="9/hour")
    settings.RATEQUOTA = DOWN
    assert all(check_request(request_from(), scope="search").degraded for _ in range(3))
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1"):
        collector.flush()
    found = scrape()
    assert found['ratequota_decisions_total{endpoint="search",outcome="admitted"}'] == 3
    assert found['ratequota_degraded_decisions_total{reason="connection"}'] == 3
    assert found['ratequota_store_up{server="127.0.0.1:1"}'] == 0


def test_metrics_of_latency_store_and_policies(search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="9/hour")
    before = scrape()
    check_request(request_from(), scope="search")
    found = scrape()
    assert [name for name in found if name.startswith("ratequota_store_up{")] != []
    assert found["ratequota_policies_revision"] == policies.current().revision  # type: ignore[union-attr]
    assert 0 < found["ratequota_policies_age_seconds"] < 60
    assert found["ratequota_policies_reloads_total"] == 1
    assert 0 < found["ratequota_policies_reload_seconds_total"] < 5
    grown = found["ratequota_decision_seconds_count"] - before.get("ratequota_decision_seconds_count", 0)
    assert grown == 1
    buckets = [value for name, value in found.items() if name.startswith("ratequota_decision_seconds_bucket")]
    assert buckets == sorted(buckets)
    assert max(buckets) == found["ratequota_decision_seconds_count"] == sum(default_limiter().latency.counts)


def test_the_memory_of_a_server_that_is_limited(redis_client: redis.Redis) -> None:
    def ratios() -> list[float]:
        return [value for name, value in scrape().items() if name.startswith("ratequota_store_memory_ratio{")]

    assert ratios() == []
    with server.memory_limit(redis_client, used=0.5):
        assert ratios() == [pytest.approx(0.5, rel=0.2)]
        redis_client.config_set("maxmemory-policy", "allkeys-lru")
        assert ratios() == []


def test_registering_twice_registers_once_and_without_redis(settings: Any) -> None:
    settings.RATEQUOTA = {"REDIS_URL": "nonsense://"}
    registry = CollectorRegistry()
    for _ in range(2):
        prometheus.register(registry)
    text = generate_latest(registry).decode()
    assert text.count("# TYPE ratequota_decisions_total counter") == 1
    assert "ratequota_decision_seconds_count 0.0" in text


def test_scrapes_are_not_limited(client: Client, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}
    RatePolicy.objects.create(rates="blocked")
    assert client.get("/plain/").status_code == 429
    response = client.get("/metrics/")
    assert (response.status_code, response["Content-Type"].split(";")[0]) == (200, "text/plain")


def test_opentelemetry_has_the_same_values(search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="1/hour")
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    for _ in range(2):
        opentelemetry.instrument(provider)
        check_request(request_from(), scope="search")
    collector.flush()
    found: dict[str, Any] = {}
    for metric in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics:
        points = {tuple(point.attributes.items()): point.value for point in metric.data.data_points}
        assert found.setdefault(metric.name, points) is points
    assert found["ratequota.decisions"] == {
        (("endpoint", "search"), ("outcome", "admitted")): 1,
        (("endpoint", "search"), ("outcome", "refused")): 1,
    }
    assert found["ratequota.policies_revision"][()] == policies.current().revision  # type: ignore[union-attr]
    assert set(found["ratequota.store_up"].values()) == {1.0}
    assert found["ratequota.decision_duration_count"][()] == sum(default_limiter().latency.counts)
    quantiles = found["ratequota.decision_duration"]
    assert {labels[0][1] for labels in quantiles} == {"0.5", "0.9", "0.99"}
    assert all(0 < seconds < 10 for seconds in quantiles.values())
    provider.shutdown()


# --- Several processes behind one port. ---

PROCESSES = """
import os, sys, django
from django.conf import settings
settings.configure(
    SECRET_KEY="metrics", ALLOWED_HOSTS=["testserver"], USE_TZ=True, ROOT_URLCONF="__main__",
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}},
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django_ratequota"],
    RATEQUOTA={"PREFIX": "rqtest:metrics", "REDIS_URL": sys.argv[2], "TIMEOUT": 5, "STATISTICS_SECONDS": 20,
               "DENY_CACHE_SECONDS": 0},
)
django.setup()
from django.core.management import call_command
from django.db import connections
from django.http import HttpResponse
from django.test import Client
from django.urls import path
from django_ratequota.decorators import ratequota
from django_ratequota.metrics import prometheus
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.workers import redis_worker
from django_ratequota.runtime import default_limiter

redis_worker.keep = lambda: None
search = ratequota(scope="search")(lambda request: HttpResponse())
urlpatterns = [path("search/", search), path("metrics/", prometheus.view)]
prometheus.register()
call_command("migrate", verbosity=0)
policy = RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="search"), rates="5/hour")
get = Client().get

def work(times):
    for _ in range(times):
        get("/search/")
        collector.flush()

work(1)
connections.close_all()
for times in (2, 3):
    child = os.fork()
    if not child:
        work(times)
        default_limiter().store.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print(get("/metrics/").content.decode())
"""


@pytest.mark.slow
def test_in_multiprocess_mode_each_process_exposes_all_processes(redis_client: redis.Redis, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    inherited = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    shared = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "files"), "PYTHONPATH": str(DOCS.parent)}
    result = subprocess.run(
        [sys.executable, "-c", PROCESSES, str(tmp_path / "db.sqlite3"), server.url()],
        env={**inherited, **shared},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    found = read(result.stdout)
    assert {name: value for name, value in decisions(found).items() if "policy_" not in name} == {
        'ratequota_decisions_total{endpoint="search",outcome="admitted"}': 5,
        'ratequota_decisions_total{endpoint="search",outcome="refused"}': 1,
    }
    decisions_count = found["ratequota_decision_seconds_count"]
    assert 6 <= decisions_count <= 12, "six decisions, and reads of the revision"
    assert found['ratequota_decision_seconds_bucket{le="+Inf"}'] == decisions_count
    assert 0 < found["ratequota_decision_seconds_sum"] < 5
    assert [value for name, value in found.items() if name.startswith("ratequota_store_up{")] == [1]
    revisions = {name: value for name, value in found.items() if name.startswith("ratequota_policies_revision{pid=")}
    assert (len(revisions), len(set(revisions.values()))) == (3, 1)


# --- Dashboard, alerts and page of the docs. ---


def known_series() -> set[str]:
    names = {f"ratequota_{m.name}{'_total' if m.kind == 'counter' else ''}" for m in METRICS}
    return names | {f"ratequota_decision_seconds_{part}" for part in ("bucket", "count", "sum")}


def series(expression: str) -> set[str]:
    return set(re.findall(r"ratequota_\w+", expression))


def labels(expression: str) -> set[str]:
    grouped = re.findall(r"\bby ?\(([^)]*)\)", expression)
    matched = re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression)
    return {name.strip() for text in grouped for name in text.split(",")} | set(matched)


OUR_LABELS = {label for metric in METRICS for label in metric.labels} | {"le"}
SCRAPE_LABELS = {"job", "instance"}


def uses_existing_metrics(expression: str) -> bool:
    known = series(expression) <= known_series() and labels(expression) <= OUR_LABELS | SCRAPE_LABELS
    return known and bool(series(expression))


def test_the_dashboard_queries_existing_metrics() -> None:
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 8
    assert [expression for expression in queries if not uses_existing_metrics(expression)] == []
    assert set().union(*map(series, queries)) >= known_series() - {"ratequota_policies_age_seconds"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_alerts_query_existing_metrics() -> None:
    groups = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 4
    assert [rule["expr"] for rule in rules if not uses_existing_metrics(rule["expr"])] == []
    assert all(set(rule["annotations"]) == {"summary", "description"} for rule in rules)
    [errors] = [rule["expr"] for rule in rules if rule["alert"] == "RateQuotaErrors"]
    [reasons] = re.findall(r'reason=~"([a-z|]+)"', errors)
    assert set(reasons.split("|")) == NO_BREAKER, "errors that open no breaker have an alert"


def test_the_runbook_has_each_alert() -> None:
    alerts = re.findall(r"- alert: (\w+)", (DOCS / "alerts.yml").read_text())
    listed = re.findall(r"^### (\w+)$", (DOCS / "runbook.md").read_text(), re.MULTILINE)
    assert listed == alerts


def test_the_metrics_page_of_the_docs_lists_every_metric() -> None:
    page = (DOCS / "metrics.md").read_text()
    listed = set(re.findall(r"^\| `(ratequota_\w+)", page, re.MULTILINE))
    assert listed == {re.sub("_(bucket|count|sum)$", "", name) for name in known_series()}
