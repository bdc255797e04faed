"""An edit in one process is obeyed by the very next request in another: real processes, real servers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.db import connections

ROOT = Path(__file__).parent.parent


class Process:
    """A worker process; it answers one line at a time."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def check(self, user: str = "alice", scope: str = "search") -> Any:
        return self.tell(f"check {user} {scope}")

    def run(self, code: str) -> Any:
        return self.tell(f"run {code}")

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the worker ended"
        return json.loads(line)

    def tell(self, line: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.terminate()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait(timeout=30)


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite file with the tables, to be copied."""
    file = tmp_path_factory.mktemp("propagation") / "migrated.sqlite3"
    environment = {"RATEQUOTA_TEST_DATABASE": f"sqlite:///{file}", "DJANGO_SETTINGS_MODULE": "tests.settings"}
    command = [sys.executable, "manage.py", "migrate", "--verbosity", "0"]
    unset = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    subprocess.run(command, cwd=ROOT, env=unset | environment, check=True)
    return file


@pytest.fixture
def environment(tmp_path: Path, migrated: Path, redis_client: redis.Redis, transactional_db: None) -> dict[str, str]:
    """What the workers run with: this test's PostgreSQL database, or an SQLite file, as memory is not shared."""
    settings = connections["default"].settings_dict
    if settings["ENGINE"].endswith("postgresql"):
        # This test's own connection must not stay open while the database is dropped.
        name, port = settings["NAME"], settings["PORT"]
        url = f"postgres://{settings['USER']}@{settings['HOST']}:{port}/{name}"
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


SEARCH = "Endpoint.objects.get_or_create(name='search')[0]"
CLIENT = "from django.test import Client; c = Client(); c.login(username='root', password='root'); "


def allowed(process: Process, times: int, **who: str) -> list[bool]:
    return [process.check(**who)["allowed"] for _ in range(times)]


def test_the_first_policy_ever_binds_the_next_request(processes: tuple[Process, Process]) -> None:
    server, editor = processes
    assert allowed(server, 3) == [True, True, True]
    editor.run("RatePolicy.objects.create(rates='1/hour')")
    assert allowed(server, 2) == [True, False]


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param("p = RatePolicy.objects.get(); p.rates = '3/hour'; p.save()", id="save"),
        pytest.param("RatePolicy.objects.update(rates='3/hour')", id="update"),
        pytest.param("RatePolicy.objects.all().delete()", id="delete of a queryset"),
        pytest.param("RatePolicy.objects.get().delete()", id="delete"),
        pytest.param(
            "p = RatePolicy.objects.get(); p.rates = '3/hour'; RatePolicy.objects.bulk_update([p], ['rates'])",
            id="bulk_update",
        ),
        pytest.param(
            "RatePolicy.objects.bulk_create([RatePolicy(user=User.objects.get(username='alice'), rates='3/hour')])",
            id="bulk_create of an override",
        ),
        pytest.param(
            CLIENT + "answer = c.post('/admin/django_ratequota/ratepolicy/%d/change/' % RatePolicy.objects.get().pk,"
            " {'rates': '3/hour', 'counted_per': 'caller', 'algorithm': 'token_bucket', 'mode': 'enforce'})"
            "; answer = answer.status_code; assert answer == 302, answer",
            id="admin form",
        ),
    ],
)
def test_an_edit_by_any_means_binds_the_next_request(edit: str, processes: tuple[Process, Process]) -> None:
    server, editor = processes
    editor.run("RatePolicy.objects.create(rates='1/hour')")
    assert allowed(server, 2) == [True, False]
    editor.run(edit)
    assert server.check()["allowed"]


def test_the_edit_that_lifts_a_block_binds_the_next_request(processes: tuple[Process, Process]) -> None:
    server, editor = processes
    editor.run("RatePolicy.objects.create(rates='blocked')")
    assert allowed(server, 2) == [False, False]
    editor.run("RatePolicy.objects.update(rates='unlimited')")
    assert allowed(server, 2) == [True, True]
    editor.run("RatePolicy.objects.update(rates='blocked')")
    assert not server.check()["allowed"]


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


def test_endpoint_edits_bind_the_next_request(processes: tuple[Process, Process]) -> None:
    server, editor = processes
    editor.run(f"RatePolicy.objects.create(endpoint={SEARCH}, rates='10/hour')")
    assert server.check()["remaining"] == [9]
    editor.run("Endpoint.objects.update(cost=3)")
    assert server.check()["remaining"] == [6]
    editor.run("Endpoint.objects.update(name='find')")
    assert server.check()["remaining"] == []
    assert server.check(scope="find")["remaining"] == [3], "a renamed endpoint keeps its counters"


def test_an_edit_keeps_what_was_used(processes: tuple[Process, Process]) -> None:
    server, editor = processes
    editor.run("RatePolicy.objects.create(rates='100/hour')")
    for _ in range(90):
        server.check()
    editor.run("RatePolicy.objects.update(rates='200/hour')")
    assert server.check()["remaining"] == [109]


def test_a_redis_that_lost_its_data_does_not_lose_edits(
    processes: tuple[Process, Process], redis_client: redis.Redis
) -> None:
    server, editor = processes
    editor.run("RatePolicy.objects.create(rates='1/hour')")
    before = server.check()["revision"]
    redis_client.delete("rqtest:revision")
    editor.run("RatePolicy.objects.update(rates='7/hour')")
    after = server.check()
    assert after["revision"] > before
    redis_client.delete("rqtest:revision")
    assert server.check()["revision"] == after["revision"], "the process keeps its revision, and stores it anew"
    assert int(redis_client.get("rqtest:revision")) == after["revision"]


def test_publish_carries_raw_sql_to_other_processes(processes: tuple[Process, Process]) -> None:
    server, editor = processes
    editor.run("RatePolicy.objects.create(rates='1/hour')")
    assert allowed(server, 2) == [True, False]
    editor.run(
        "from django.db import connection; connection.cursor().execute("
        "\"UPDATE django_ratequota_ratepolicy SET rates = '9/hour'\")"
    )
    assert not server.check()["allowed"]
    editor.run(
        "from django.core.management import call_command as call; import io; "
        "call('ratequota', 'publish', stdout=io.StringIO())"
    )
    assert server.check()["allowed"]


def test_no_decision_is_made_by_a_superseded_policy(processes: tuple[Process, Process]) -> None:
    """Eight threads ask without pause while another process edits: what follows a publication obeys it."""
    server, editor = processes
    editor.run("RatePolicy.objects.create(rates='unlimited')")
    server.tell("hammer")
    try:
        for number in range(30):
            editor.run(f"RatePolicy.objects.update(rates='{number + 1}000/hour')")
            assert server.tell("progress"), "requests went on"
    finally:
        found = server.tell("rest")
    assert {error for _, _, error in found} == {""}
    assert len({revision for _, revision, _ in found}) >= 30, "the threads saw every edit pass by"
    late = [(published, revision) for published, revision, _ in found if revision < published]
    assert not late
