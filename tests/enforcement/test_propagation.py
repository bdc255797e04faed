"""An edit in one process is obeyed by the very next request in another: real processes, real servers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from django.db import connections

from tests.support.worker import Process

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite file with the tables, to be copied."""
    file = tmp_path_factory.mktemp("propagation") / "migrated.sqlite3"
    environment = {"RATEQUOTA_TEST_DATABASE": f"sqlite:///{file}", "DJANGO_SETTINGS_MODULE": "tests.project.settings"}
    command = [sys.executable, "manage.py", "migrate", "--verbosity", "0"]
    unset = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    subprocess.run(command, cwd=ROOT, env=unset | environment, check=True)
    return file


@pytest.fixture
def environment(tmp_path: Path, migrated: Path, redis_client: redis.Redis, transactional_db: None) -> dict[str, str]:
    """What the workers run with: this test's database on a server, or an SQLite file, as memory is not shared."""
    settings = connections["default"].settings_dict
    if not settings["ENGINE"].endswith("sqlite3"):
        # This test's own connection must not stay open while the database is dropped.
        name, port = settings["NAME"], settings["PORT"]
        scheme = connections["default"].vendor.replace("postgresql", "postgres")
        url = f"{scheme}://{settings['USER']}@{settings['HOST']}:{port}/{name}"
        return os.environ | {"DATABASE_URL": url}
    shutil.copy(migrated, tmp_path / "workers.sqlite3")
    return os.environ | {"RATEQUOTA_TEST_DATABASE": f"sqlite:///{tmp_path / 'workers.sqlite3'}"}


@pytest.fixture
def processes(environment: dict[str, str]) -> Iterator[tuple[Process, Process]]:
    """(serves requests, edits); alice and a superuser exist, no policy does."""
    pair = [Process(environment), Process(environment)]
    try:
        pair[1].run("[User.objects.create(username=name) for name in ('alice', 'bob')]")
        pair[1].run("User.objects.create_superuser('root', password='root')")
        yield pair[0], pair[1]
    finally:
        for process in pair:
            process.close()


def allowed(process: Process, times: int, **who: str) -> list[bool]:
    return [process.check(**who)["allowed"] for _ in range(times)]


def test_the_first_policy_ever_binds_the_next_request(processes: tuple[Process, Process]) -> None:
    server, editor = processes
    assert allowed(server, 3) == [True, True, True]
    editor.run("RatePolicy.objects.create(rates='1/hour')")
    assert allowed(server, 2) == [True, False]


def test_the_first_override_ever_binds_the_next_request_of_its_user(processes: tuple[Process, Process]) -> None:
    """Until there is one, no process looks for a user's own policies."""
    server, editor = processes
    assert allowed(server, 3) == [True, True, True]
    editor.run("RatePolicy.objects.create(user=User.objects.get(username='alice'), rates='1/hour')")
    assert allowed(server, 2) == [True, False]
    assert allowed(server, 2, user="bob") == [True, True]


def test_a_users_own_changes_bind_the_next_request(processes: tuple[Process, Process]) -> None:
    server, editor = processes
    editor.run("Plan.objects.create(name='Free', slug='free', default_for='authenticated')")
    editor.run("RatePolicy.objects.create(plan=Plan.objects.get(slug='free'), rates='1/hour')")
    editor.run("RatePolicy.objects.create(plan=Plan.objects.create(name='Pro', slug='pro'), rates='100/hour')")
    assert allowed(server, 2) == [True, False]
    assert server.check(user="bob")["allowed"]
    editor.run(
        "PlanAssignment.objects.create(user=User.objects.get(username='alice'), plan=Plan.objects.get(slug='pro'))"
    )
    assert server.check()["remaining"] == [98]
    assert not server.check(user="bob")["allowed"]
    editor.run("PlanAssignment.objects.update(user=User.objects.get(username='bob'))")
    assert not server.check()["allowed"]
    assert server.check(user="bob")["remaining"] == [98]
    editor.run("Plan.objects.filter(slug='free').update(default_for='')")
    assert server.check()["remaining"] == []


IDENTIFIERS = {"tenant": "tests.project.views.tenant", "api_key": "tests.project.views.api_key"}
#: Lets a process look up subjects: limits("acme") of a tenant.
WITH_SUBJECTS = f"""
from django.conf import settings
from django.test import override_settings
from django_ratequota import check_caller
from django_ratequota.policies.cache import policies
override_settings(RATEQUOTA={{**settings.RATEQUOTA, "IDENTIFIERS": {IDENTIFIERS!r}}}).enable()
limits = lambda name, kind="tenant": [s.limit for s in check_caller(ip=None, identifiers={{kind: name}}).statuses]
"""


def test_an_edit_binds_once_it_is_committed(processes: tuple[Process, Process]) -> None:
    """Not before: other requests go on by what is committed while an edit is still open."""
    server, editor = processes
    editor.run("RatePolicy.objects.create(rates='5/hour')")
    assert server.check()["limits"] == [5]
    editor.run("from django.db import transaction; t = transaction.atomic(); t.__enter__()")
    editor.run("RatePolicy.objects.update(rates='9/hour')")
    assert server.check()["limits"] == [5]
    editor.run("t.__exit__(None, None, None)")
    assert server.check()["limits"] == [9]


def test_requests_to_a_worker_with_old_policies(processes: tuple[Process, Process]) -> None:
    """Eight threads ask without pause while another process edits: what follows a publication obeys it.

    Each edit raises its limit, so a decision's own limit tells which edit judged it: for everyone, by the snapshot,
    and for alice, by her entry in memory.
    """
    server, editor = processes
    edits: dict[str, list[tuple[int, int]]] = {"": [], "alice": []}
    editor.run("from django_ratequota.runtime import default_limiter as limiter")
    editor.run("RatePolicy.objects.create(rates='1000/hour')")
    editor.run("RatePolicy.objects.create(user=User.objects.get(username='alice'), rates='1000/hour')")
    server.tell("hammer")
    try:
        for number in range(2, 32):
            name = ("", "alice")[number % 2]
            edit = f"RatePolicy.objects.filter(user__isnull={not name}).update(rates='{number}000/hour')"
            edits[name].append((editor.run(f"{edit}; answer = limiter().stored_revision()"), number * 1000))
            assert server.tell("progress"), "requests went on"
    finally:
        found = server.tell("rest")
    assert {error for *_, error in found} == {""}
    assert len({revision for _, _, revision, _, _ in found}) >= 30, "the threads saw every edit pass by"
    assert not [row for row in found if row[2] < row[1]], "judged by an older revision than was published"
    for name, made in edits.items():
        limits = [(revision, limit) for asked_by, _, revision, (limit,), _ in found if asked_by == name]
        assert {limit for _, limit in limits} >= {limit for _, limit in made}
        for revision, limit in limits:
            assert limit >= max((least for published, least in made if published <= revision), default=1000)
