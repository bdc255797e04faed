"""The database goes away and comes back, for real: a PostgreSQL that lets a process in no more, and then again."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import redis

from tests.enforcement.test_propagation import Process, environment, migrated  # noqa: F401 - fixtures

from . import poll

SQL = "from django.db import connection; c = connection.cursor(); c.execute({!r}); "


class Database:
    """Changes the permissions of one process's role from another."""

    def __init__(self, editor: Process) -> None:
        self._editor = editor
        editor.run(SQL.format("DROP ROLE IF EXISTS worker") + "c.execute('CREATE ROLE worker SUPERUSER LOGIN')")

    def go_away(self) -> None:
        """End the process's connections, and let it make none."""
        self._editor.run(SQL.format("ALTER ROLE worker NOLOGIN"))
        ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = 'worker'"
        self._editor.run(SQL.format(ended))

    def come_back(self) -> None:
        self._editor.run(SQL.format("ALTER ROLE worker LOGIN"))


@pytest.fixture
def editor(environment: dict[str, str]) -> Iterator[Process]:  # noqa: F811
    """A process that always reaches the database; alice and bob exist."""
    process = Process(environment)
    try:
        process.run("[User.objects.create(pk=pk, username=name) for pk, name in ((1, 'alice'), (2, 'bob'))]")
        yield process
    finally:
        process.close()


@pytest.fixture
def database(editor: Process) -> Database:
    return Database(editor)


@pytest.fixture
def worker(environment: dict[str, str], database: Database) -> Iterator[Process]:  # noqa: F811
    """A process that serves requests, with a role of its own."""
    url = urlsplit(environment["DATABASE_URL"])
    there = url._replace(netloc=f"worker@{url.hostname}:{url.port}").geturl()
    process = Process({**environment, "DATABASE_URL": there})
    try:
        yield process
    finally:
        process.close()


HEARD = (
    "import logging; lines = []; "
    "logging.getLogger('django_ratequota').addHandler(type('H', (logging.Handler,), "
    "{'emit': lambda self, record: lines.append(record.getMessage())})())"
)
# As in a bot, which serves no requests: nobody else drops a connection that broke.
ASK = (
    "from django.test import RequestFactory; from django_ratequota import check_request; "
    "request = RequestFactory().get('/'); request.user = User(pk={pk}); d = check_request(request, scope='search'); "
    "answer = [d.allowed, [s.limit for s in d.statuses], d.error]"
)


def ask(worker: Process, pk: int) -> list[object]:
    return worker.run(ASK.format(pk=pk))


def test_the_last_policies_go_on(database: Database, worker: Process, editor: Process) -> None:
    editor.run("RatePolicy.objects.create(rates='5/hour')")
    worker.run(HEARD)
    assert ask(worker, 1) == [True, [5], ""]
    database.go_away()
    assert ask(worker, 1) == [True, [5], ""]
    # An edit that cannot be read yet; a caller whose own policies cannot be read: the shared ones hold both.
    editor.run("RatePolicy.objects.update(rates='3/hour')")
    assert ask(worker, 1) == [True, [5], ""]
    assert [ask(worker, 2)[0] for _ in range(6)] == [True] * 5 + [False]
    database.come_back()
    poll(lambda: ask(worker, 1)[1] == [3], 30, "the edit binds once it can be read")
    lines = worker.run("answer = lines")
    assert len(lines) == 2, lines
    assert lines[0].startswith("the policies cannot be read, the last known ones go on: ")
    assert lines[1] == "the policies can be read again"


@pytest.mark.parametrize("autocommit", [True, False])
def test_an_edit_binds_the_next_check_after_the_database_has_restarted(
    database: Database, worker: Process, editor: Process, autocommit: bool
) -> None:
    """A bot's connection breaks while it is idle: its next check went on by the last policies.

    With AUTOCOMMIT off all later checks did, and nobody ended the transaction that the first one had begun.
    """
    editor.run("RatePolicy.objects.create(rates='5/hour')")
    worker.run(HEARD)
    worker.run(f"from django.db import connection; connection.settings_dict['AUTOCOMMIT'] = {autocommit}")
    assert ask(worker, 1) == [True, [5], ""]
    idle = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'worker' AND state LIKE 'idle in transaction%'"
    assert editor.run(SQL.format(idle) + "answer = c.fetchone()[0]") == 0
    for rate in (4, 3):
        database.go_away()
        database.come_back()
        editor.run(f"RatePolicy.objects.update(rates='{rate}/hour')")
        assert ask(worker, 1) == [True, [rate], ""]
    assert worker.run("answer = lines") == []


PERSISTENT = (
    "from django.db import connection; connection.settings_dict.update(CONN_MAX_AGE=None, AUTOCOMMIT={}); "
    "connection.close()"
)
LEFT = ASK + "; answer = d.remaining; d.settle(1)"


@pytest.mark.parametrize("autocommit", [True, False])
def test_counts_are_written_and_restored_after_the_database_has_restarted(
    database: Database, worker: Process, editor: Process, redis_client: redis.Redis, autocommit: bool
) -> None:
    """The threads' connections break while they are idle: with AUTOCOMMIT off the ledger wrote nothing any more."""
    editor.run("RatePolicy.objects.create(rates='100/month'); from django_ratequota.models import QuotaWindow")
    used = "answer = sum(QuotaWindow.objects.values_list('charged', flat=True))"
    worker.run(PERSISTENT.format(autocommit))
    for count in (1, 2, 3):
        assert worker.run(LEFT.format(pk=1)) == 100 - count
        poll(lambda expected=count: editor.run(used) == expected, 30, "the count is written")
        database.go_away()
        database.come_back()
        redis_client.delete(*redis_client.keys("rqtest:{user:1}*"))


@pytest.mark.parametrize(("on_error", "allowed"), [("allow", True), ("deny", False)])
def test_a_process_that_never_read_any(
    database: Database, worker: Process, editor: Process, on_error: str, allowed: bool
) -> None:
    editor.run("RatePolicy.objects.create(rates='1/hour')")
    worker.run(HEARD)
    worker.run(
        "from django.conf import settings; from django.test import override_settings; "
        f"override_settings(RATEQUOTA={{**settings.RATEQUOTA, 'ON_ERROR': {on_error!r}}}).enable()"
    )
    database.go_away()
    assert [ask(worker, 1) for _ in range(2)] == [[allowed, [], "database"]] * 2
    lines = worker.run("answer = lines")
    assert len(lines) == 2, lines
    assert lines[0].startswith("the policies cannot be read: ")
    assert lines[1].startswith("no policies from the database, applying on_error: ")
    database.come_back()
    assert ask(worker, 1) == [True, [1], ""]
    assert ask(worker, 1) == [False, [1], ""]
