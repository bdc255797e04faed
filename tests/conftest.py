"""Fixtures of the whole suite: a limiter with an injected clock, on a real server emptied around each test."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from asgiref.sync import SyncToAsync, async_to_sync
from django.core.management.color import no_style
from django.db import connections
from django.test import TransactionTestCase, override_settings

from django_ratequota import Decision, Limiter
from tests.support import properties, server
from tests.support.connections import close_connections

#: ``check_request``, or its async twin.
Check = Callable[..., Decision]
#: ``charge`` or ``refund`` of a decision, named by the second argument, with a cost.
Settle = Callable[[Decision, str, Any], Decision]
#: ``get`` of a test client.
Get = Callable[..., Any]

#: 2025-11-21 05:20:00 UTC, in µs: where injected clocks begin.
NOON_US = 1_763_702_400_000_000


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the workers of ``-n auto``: more than processors, as many slow tests wait for others."""
    if server.IS_SHARED:  # tests empty their server
        return 1
    return (os.cpu_count() or 1) + (not _is_quick(config))


def pytest_configure(config: pytest.Config) -> None:
    if sys.version_info < (3, 13):  # ``SSLContext.wrap_socket`` leaves its socket open where the peer has reset it
        config.addinivalue_line("filterwarnings", "ignore:unclosed <ssl.SSLSocket:ResourceWarning")


#: Folders and modules that start processes, stop servers, fill tables, render pages by the dozen, or are about one
#: surface only. ``make quick`` leaves them out, and single tests that are marked ``slow``.
SLOW = """
    admin/test_admin admin/test_assignments admin/test_every_page admin/test_explain admin/test_history
    admin/test_home admin/test_invoices_page
    admin/test_lists admin/test_matrix admin/test_permissions admin/test_plans
    admin/test_estimate admin/test_quota_history admin/test_quotas_page admin/test_search admin/test_sizes
    admin/test_health admin/test_traffic
    changes/test_databases changes/test_publication changes/test_reasons
    enforcement/test_exempt_views enforcement/test_propagation enforcement/test_settlement enforcement/test_slots
    engine/test_concurrency front/test_ninja front/test_openapi ledger/test_exact ledger/test_months
    operations/test_blocks operations/test_boost_all operations/test_boosts operations/test_concurrent_limits
    operations/test_invoice_lines operations/test_near
    operations/test_organisations operations/test_revert
    utils/test_forks utils/test_optional
    compat faults package policyfile security testing
""".split()


def _is_slow(path: Path) -> bool:
    name = path.relative_to(Path(__file__).parent).with_suffix("").as_posix()
    return any(name == slow or name.startswith(f"{slow}/") for slow in SLOW)


def _is_quick(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "not slow")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Save ``make quick`` the import of slow modules."""
    return True if _is_quick(config) and _is_slow(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of ``SLOW``; leave out those marked ``thorough`` unless the profile or ``-m`` asks for them."""
    for item in items:
        if _is_slow(item.path):
            item.add_marker(pytest.mark.slow)
    if not properties.is_thorough() and "thorough" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]


def pytest_collection_finish() -> None:
    """Keep modules and collected tests out of later garbage collections: that saves a third of the time."""
    gc.collect()
    gc.freeze()


#: Tables whose rows ``migrate`` makes. Tests never change them.
_MIGRATED = {"django_migrations", "django_content_type", "auth_permission"}


def _empty_tables(test_case: TransactionTestCase) -> None:
    """Delete the rows of a test, in place of ``flush``, which takes ten times as long to create permissions again."""
    for alias in test_case._databases_names(include_mirrors=False):
        connection = connections[alias]
        tables = set(connection.introspection.django_table_names(only_existing=True, include_views=False))
        statements = connection.ops.sql_flush(no_style(), sorted(tables - _MIGRATED))
        connection.ops.execute_sql_flush(statements)


TransactionTestCase._fixture_teardown = _empty_tables


class Clock:
    """An injected clock: µs since the Unix epoch, moved by hand."""

    def __init__(self, now_us: int = NOON_US) -> None:
        self.now_us = now_us

    def __call__(self) -> int:
        return self.now_us

    def advance(self, seconds: float = 0, *, us: int = 0) -> None:
        self.now_us += round(seconds * 10**6) + us


def _forget_keys(client: redis.Redis) -> None:
    for key in client.scan_iter("rqtest:*", count=1000):
        client.delete(key)


@pytest.fixture(scope="session")
def _connected() -> Iterator[redis.Redis]:
    """A client that stays connected: most tests need one only to have the keys deleted."""
    with redis.Redis.from_url(server.url()) as client:
        yield client


@pytest.fixture
def redis_client(_connected: redis.Redis) -> Iterator[redis.Redis]:
    """A client of the test server; the suite's keys are deleted before and after."""
    _forget_keys(_connected)
    with redis.Redis.from_url(server.url()) as client:
        yield client
    _forget_keys(_connected)


@pytest.fixture
def fresh_policies(redis_client: redis.Redis) -> Iterator[None]:
    """A process as if just started: no snapshot, no user in memory, no key in Redis, nothing recorded."""
    from django_ratequota.monitoring import health
    from django_ratequota.policies.cache import policies

    policies.forget()
    health.forget()
    yield
    policies.forget()


@pytest.fixture
def too_many_entries(monkeypatch: pytest.MonkeyPatch, fresh_policies: None) -> None:
    """Users and subjects have more entries than are held, so that the others are read when they are needed."""
    from django_ratequota.policies import entries

    keep = entries.Entries.keep

    def keep_few(self: Any, part: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if not self.whole:
                patch.setattr(entries, "MOST_ENTRIES", 0)
                part = part._replace(entries={"too": entries.NOBODY, "many": entries.NOBODY})
            keep(self, part)

    monkeypatch.setattr(entries.Entries, "keep", keep_few)


@pytest.fixture
def recording(settings: Any, monkeypatch: pytest.MonkeyPatch, redis_client: redis.Redis) -> Iterator[None]:
    """Record decisions, and send them when the test calls ``flush``."""
    from django_ratequota.monitoring import collector, health
    from tests.support.threads import by_hand

    by_hand(monkeypatch, collector.counting, health.reporting)
    settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 1}
    monkeypatch.setattr(collector, "_CHUNK_SECONDS", 0.0)
    collector.collector.clear()
    yield
    collector.collector.clear()


@pytest.fixture(scope="session", autouse=True)
def _threads_leave_no_connection() -> Iterator[None]:
    """Threads that work beside requests hang up after each round."""
    from django_ratequota.monitoring import workers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "close_old_connections", close_connections)
        yield


@pytest.fixture(autouse=True)
def _workers_end_with_their_test() -> Iterator[None]:
    """The threads do nothing during the next test, which starts others where it needs them."""
    from django_ratequota.monitoring.workers import database_worker, receivers_worker, redis_worker
    from tests.support.threads import leave

    yield
    for worker in (database_worker, redis_worker, receivers_worker):
        if worker.pid or worker.ending:
            leave(worker)


@pytest.fixture
def checkpointing(monkeypatch: pytest.MonkeyPatch, redis_client: redis.Redis) -> Iterator[None]:
    """Keep durable counts, and write them when the test calls ``book.flush``."""
    from django_ratequota import monitoring
    from django_ratequota.ledger import book
    from django_ratequota.monitoring import outages
    from tests.support.threads import by_hand

    by_hand(monkeypatch, book.writing, book.dropping, book.raising)
    monkeypatch.setattr(monitoring, "writes_rows", True)
    for noted in (book.ledger, outages.outages):  # what earlier tests have noted is not to be written either
        noted.clear()
    yield
    for noted in (book.ledger, outages.outages):
        noted.clear()


@pytest.fixture
def published() -> Iterator[list[int | None]]:
    """The revisions that ``policies_changed`` was sent with during the test."""
    from django_ratequota.signals import policies_changed

    revisions: list[int | None] = []

    def receive(revision: int | None, **_: Any) -> None:
        revisions.append(revision)

    policies_changed.connect(receive)
    yield revisions
    policies_changed.disconnect(receive)


@pytest.fixture
def heard() -> Iterator[list[dict[str, Any]]]:
    """What receivers of ``request_refused`` were given."""
    from django_ratequota.signals import request_refused

    heard: list[dict[str, Any]] = []

    def receive(signal: Any, **kwargs: Any) -> None:
        heard.append(kwargs)

    request_refused.connect(receive)
    yield heard
    request_refused.disconnect(receive)


@pytest.fixture
def hops(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that awaited code has called in a thread during the test."""
    hops: list[Any] = []
    hop = SyncToAsync.__call__

    def counted(self: SyncToAsync[Any, Any], *args: Any, **kwargs: Any) -> Any:
        hops.append(getattr(self.func, "func", self.func))
        return hop(self, *args, **kwargs)

    monkeypatch.setattr(SyncToAsync, "__call__", counted)
    return hops


@pytest.fixture
def operator() -> Any:
    """A client that is logged in as a superuser."""
    from tests.support.operators import client_of

    return client_of(superuser=True)


@pytest.fixture
def tenants(settings: Any) -> None:
    """Requests tell their tenant."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "tests.project.views.tenant"}}


@pytest.fixture
def api_keys(settings: Any) -> None:
    """Requests tell their tenant by a key in a header."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "tests.project.views.api_key"}}


@pytest.fixture
def enforce_all(settings: Any) -> None:
    """The middleware enforces every view."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}


@pytest.fixture
def alice() -> Any:
    from django.contrib.auth.models import User

    return User.objects.create(username="alice")


@pytest.fixture
def free() -> Any:
    from django_ratequota.models import Plan

    return Plan.objects.create(name="Free", slug="free")


@pytest.fixture
def search() -> Any:
    from django_ratequota.models import Endpoint

    return Endpoint.objects.create(name="search")


@pytest.fixture(params=["sync", "async"])
def check(request: Any) -> Check:
    """``check_request``, or its async twin under an event loop."""
    from django_ratequota import acheck_request, check_request

    return check_request if request.param == "sync" else async_to_sync(acheck_request)


@pytest.fixture(params=["sync", "async"])
def settle(request: Any) -> Settle:
    """Calls ``charge``, ``refund`` or ``settle`` of a decision, or their async twins."""

    def run(decision: Decision, verb: str, cost: Any) -> Decision:
        if request.param == "sync":
            return getattr(decision, verb)(cost)
        return async_to_sync(getattr(decision, f"a{verb}"))(cost)

    return run


@pytest.fixture(params=["wsgi", "asgi"])
def get(request: Any) -> Get:
    """GET through Django's sync or async handler."""
    from django.test import AsyncClient, Client

    return Client().get if request.param == "wsgi" else async_to_sync(AsyncClient().get)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limiter(redis_client: redis.Redis, clock: Clock) -> Iterator[Limiter]:
    """An engine on the test server under the injected clock."""
    limiter = Limiter(client=redis_client, clock=clock, prefix="rqtest", timeout=5)
    yield limiter
    limiter.store.close()


@pytest.fixture(params=["redis", "memory"])
def either(request: Any, limiter: Limiter, clock: Clock) -> Limiter:
    """An engine on the test server, then one that counts in this process."""
    if request.param == "redis":
        return limiter
    with override_settings(RATEQUOTA={"REDIS_URL": "memory://"}, CACHES={}):
        return Limiter(clock=clock)


@pytest.fixture
def edited(free: Any, search: Any) -> Any:
    """One save that edits two policies, creates one and deletes one; returns its last row."""
    from django.contrib.auth.models import User

    from django_ratequota.changes.writer import changed_by
    from django_ratequota.models import PolicyChange, RatePolicy

    RatePolicy.objects.create(plan=free, rates="1/s")
    RatePolicy.objects.create(plan=free, endpoint=search, rates="2/s")
    RatePolicy.objects.create(rates="9/s", counted_per="ip")
    with changed_by(User.objects.create(username="anna"), "Ticket 4711"):
        RatePolicy.objects.filter(plan=free).update(mode="log")
        RatePolicy.objects.create(endpoint=search, rates="3/s")
        RatePolicy.objects.filter(counted_per="ip").delete()
    return PolicyChange.objects.latest("pk")
