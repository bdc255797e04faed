"""Projects with replicas, with policies on another alias, without ``default``, and with ATOMIC_REQUESTS."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.db import connection, connections, transaction
from django.http import HttpResponse
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import path

from django_ratequota import check_request
from django_ratequota.models import RatePolicy
from django_ratequota.policies.cache import policies
from django_ratequota.policies.entries import Entries
from tests.enforcement.test_propagation import WITH_SUBJECTS, Process, migrated  # noqa: F401 - a fixture
from tests.support.properties import thorough_after

Start = Callable[..., tuple[Process, ...]]


@pytest.fixture
def start(tmp_path: Path, migrated: Path, redis_client: redis.Redis) -> Iterator[Start]:  # noqa: F811
    """Start processes of a project with these aliases, each an SQLite file with all tables."""
    with ExitStack() as running:

        def begin(*aliases: str, router: str = "", processes: int = 1) -> tuple[Process, ...]:
            databases: dict[str, Any] = {"default": {}}
            for alias in aliases:
                shutil.copy(migrated, tmp_path / f"{alias}.sqlite3")
                databases[alias] = {"url": f"sqlite:///{tmp_path / alias}.sqlite3"}
            environment = os.environ | {
                "DJANGO_SETTINGS_MODULE": "tests.project.settings_aliases",
                "RATEQUOTA_TEST_ALIASES": json.dumps(databases),
                "RATEQUOTA_TEST_ROUTER": f"tests.project.routers.{router}" if router else "",
            }
            return tuple(running.enter_context(closing(Process(environment))) for _ in range(processes))

        yield begin


# Replicas.


def replicate(home: Path, replica: str) -> None:
    with (
        closing(sqlite3.connect(home / "default.sqlite3")) as primary,
        closing(sqlite3.connect(home / f"{replica}.sqlite3")) as copy,
    ):
        primary.backup(copy)


ASK = (
    "from django.test import RequestFactory; from django_ratequota import check_request\n"
    "def limits(pk, scope='search'):\n"
    "    request = RequestFactory().get('/')\n"
    "    request.user = User(pk=pk)\n"
    "    return [status.limit for status in check_request(request, scope=scope).statuses]\n"
)


def test_overrides_apply_while_one_of_two_replicas_lags(start: Start, tmp_path: Path) -> None:
    """If one replica had the history row and the other not yet the override, 12 of 40 overrides never applied."""
    worker, editor = start("default", "replica1", "replica2", router="Replicas", processes=2)
    editor.run("[User.objects.create(pk=pk, username=pk) for pk in range(1, 16)]")
    for replica in ("replica1", "replica2"):
        replicate(tmp_path, replica)
    worker.run(ASK)
    assert worker.run("answer = [limits(pk) for pk in range(1, 16)]") == [[]] * 15
    at_once = []
    for pk in range(1, 16):
        editor.run(f"RatePolicy.objects.create(user_id={pk}, rates='{pk}/hour')")
        replicate(tmp_path, "replica1")
        at_once.append(worker.run(f"answer = limits({pk})"))
        replicate(tmp_path, "replica2")
    assert at_once == [[pk] for pk in range(1, 16)]
    assert worker.run("answer = [limits(pk) for pk in range(1, 16)]") == [[pk] for pk in range(1, 16)]


def test_plans_of_subjects_are_read_from_the_primary(start: Start) -> None:
    (worker,) = start("default", "replica1", "replica2", router="Replicas")
    worker.run(WITH_SUBJECTS)
    worker.run("plan = Plan.objects.create(name='Pro', slug='pro')")
    worker.run("RatePolicy.objects.create(plan=plan, rates='9/hour')")
    assert worker.run("answer = limits('acme')") == []
    worker.run("a = PlanAssignment.objects.create(subject='tenant:acme', plan=plan)")
    assert worker.run("answer = limits('acme')") == [9]
    worker.run("a.subject = 'tenant:globex'; a.save()")
    assert worker.run("answer = limits('acme'), limits('globex')") == [[], [9]]


def test_the_history_is_recorded_and_read_from_the_primary(start: Start, tmp_path: Path) -> None:
    (worker,) = start("default", "replica1", "replica2", router="Replicas")
    worker.run("plan = Plan.objects.create(name='Free', slug='free')")
    worker.run("policy = plan.policies.create(rates='5/hour')")
    worker.run("Plan.objects.filter(slug='free').update(name='Basic'); plan.policies.update(rates='7/hour')")
    seen = "answer = [p.rates for p in plan.policies.all()], RatePolicy.objects.get().plan.name"
    assert worker.run(seen) == [["7/hour"], "Basic"]
    rows = worker.run("answer = [[r.model, r.before, r.after] for r in PolicyChange.objects.order_by('pk')]")
    assert [row[0] for row in rows] == ["plan", "ratepolicy", "plan", "ratepolicy"]
    assert (rows[3][1]["rates"], rows[3][2]["rates"]) == ("5/hour", "7/hour")
    worker.run("policy.refresh_from_db()")
    assert worker.run("answer = policy.rates, policy._state.db") == ["7/hour", "default"]
    assert worker.run("answer = Plan.objects.count(), Plan.objects.using('replica1').count()") == [1, 0]


def test_references_are_validated_on_the_primary(start: Start) -> None:
    """An endpoint created just before was refused: "endpoint instance with id 1 is not a valid choice"."""
    (worker,) = start("default", "replica1", "replica2", router="Replicas")
    worker.run("Endpoint.objects.create(name='e'); Plan.objects.create(name='p', slug='p')")
    worker.run("User.objects.create(pk=1); from django.core.exceptions import ValidationError")
    for policy, refused in (
        ("endpoint=Endpoint.objects.get(), plan=Plan.objects.get()", []),
        ("user_id=1", []),
        ("endpoint=Endpoint.objects.get(), plan_id=99", ["plan"]),
        ("endpoint_id=98, plan_id=99", ["endpoint", "plan"]),
        ("endpoint_id='x'", ["endpoint"]),
    ):
        assert refused == worker.run(
            "answer = []\n"
            f"try: RatePolicy(rates='9/s', {policy}).clean_fields()\n"
            "except ValidationError as error: answer = sorted(error.error_dict)"
        )


# Policies on another alias.

ANYBODY = (
    "from django.db import transaction\n"
    "from django.test import RequestFactory; from django_ratequota import check_request\n"
    "def allowed(): return check_request(RequestFactory().get('/')).allowed\n"
)


@pytest.fixture(params=thorough_after(1, ["OwnAlias", "NoDefault"]))
def own_alias(request: Any, start: Start) -> tuple[str, Process, Process]:
    """The alias of the policies, and two processes; ``default`` is another database, or undefined."""
    if request.param == "OwnAlias":
        alias, aliases = "policies", ("default", "policies")
    else:
        alias, aliases = "main", ("main",)
    server, editor = start(*aliases, router=request.param, processes=2)
    server.run(ANYBODY)
    editor.run(ANYBODY)
    return alias, server, editor


def test_a_rolled_back_edit_does_not_apply_after_a_request_read_it(own_alias: tuple[str, Process, Process]) -> None:
    alias, server, editor = own_alias
    editor.run("RatePolicy.objects.create(rates='1000/hour')")
    assert [server.run("answer = allowed()"), editor.run("answer = allowed()")] == [True, True]
    inside = editor.run(
        f"with transaction.atomic(using={alias!r}):\n"
        "    RatePolicy.objects.update(rates='blocked')\n"
        "    answer = allowed()\n"
        f"    transaction.set_rollback(True, using={alias!r})\n"
    )
    assert inside is False, "a transaction reads its own edits"
    assert [editor.run("answer = allowed()"), server.run("answer = allowed()")] == [True, True]


def test_commands_and_edits_work_on_another_alias(own_alias: tuple[str, Process, Process]) -> None:
    alias, server, editor = own_alias
    editor.run("from django.core.management import call_command as call; import io")
    editor.run("RatePolicy.objects.create(rates='1000/hour')")
    assert server.run("answer = allowed()")
    editor.run("RatePolicy.objects.update(rates='blocked')")
    assert not server.run("answer = allowed()")
    editor.run(
        f"from django.db import connections; c = connections[{alias!r}].cursor(); "
        "c.execute(\"UPDATE django_ratequota_ratepolicy SET rates = 'unlimited'\")"
    )
    assert not server.run("answer = allowed()")
    printed = editor.run("out = io.StringIO(); call('ratequota', 'publish', stdout=out); answer = out.getvalue()")
    assert printed.startswith("Published version ")
    assert server.run("answer = allowed()")
    for verb in ("status", "rollup", "export"):
        editor.run(f"call('ratequota', {verb!r}, stdout=io.StringIO())")
    editor.run(f"call('check', databases=[{alias!r}], stdout=io.StringIO())")


# Transactions of the project.


def counting(request: Any) -> HttpResponse:
    decision = check_request(request, scope="search")
    return HttpResponse(f"{decision.error} {User.objects.count()}")


urlpatterns = [path("counting/", counting)]


@pytest.fixture
def missing_column(transactional_db: None, fresh_policies: None) -> Iterator[Callable[[str], None]]:
    """Rename a column of a table, so that it is missing as in an old schema under new code."""
    with ExitStack() as undo:

        def take(table: str) -> None:
            def rename(old: str, new: str) -> None:
                with connection.cursor() as cursor:
                    cursor.execute(f"ALTER TABLE django_ratequota_{table} RENAME COLUMN {old} TO {new}")

            rename("id", "other")
            undo.callback(rename, "other", "id")

        yield take


@pytest.mark.urls(__name__)
@pytest.mark.parametrize("when", ["at first", "on a newer revision", "for a user"])
def test_a_failed_read_does_not_abort_the_transaction_of_the_view(
    missing_column: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """On PostgreSQL each request was a 500: the query of the view failed in an aborted transaction."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    client = Client()
    client.force_login(User.objects.create(username="alice"))
    if when == "at first":
        missing_column("plan")
        assert [client.get("/counting/").content for _ in range(2)] == [b"database 1"] * 2
        return
    RatePolicy.objects.create(rates="1000/hour")
    assert client.get("/counting/").content == b" 1"
    if when == "for a user":
        policies._entries = Entries()
    else:
        RatePolicy.objects.update(rates="2000/hour")
    missing_column("policychange" if when == "on a newer revision" else "ratepolicy")
    assert [client.get("/counting/").content for _ in range(2)] == [b" 1"] * 2


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies")
def test_reads_within_a_transaction_use_a_savepoint() -> None:
    def savepoints() -> int:
        policies.forget()
        with CaptureQueriesContext(connection) as captured:
            check_request(RequestFactory().get("/"))
        return sum(query["sql"].startswith("SAVEPOINT") for query in captured)

    assert savepoints() == 0
    with transaction.atomic():
        assert savepoints() == 1
