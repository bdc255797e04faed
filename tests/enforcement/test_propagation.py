"""An edit in one process is obeyed by the very next request in another: real processes, real servers."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def test_an_edit_of_a_route_binds_the_next_request(processes: tuple[Process, Process]) -> None:
    server, editor = processes
    editor.run("e = Endpoint.objects.create(name='bare', routes='/elsewhere/')")
    editor.run("RatePolicy.objects.create(endpoint=e, rates='blocked')")
    assert server.get("/bare/") == 200
    for routes, status in (("/bare/", 429), ("nothing", 200), ("ba*", 429), ("", 200)):
        editor.run(f"e.routes = {routes!r}; e.save()")
        assert server.get("/bare/") == status, routes
    editor.run("e.routes = '/*'; e.methods = 'POST'; e.save()")
    assert server.get("/bare/") == 200


def test_an_edit_of_an_override_binds_the_next_request(processes: tuple[Process, Process]) -> None:
    """The server holds alice in memory, with her override; what changes is hers alone, or also bob's."""
    server, editor = processes

    def limits() -> list[Any]:
        return [server.check(user=name)["limits"] for name in ("alice", "bob")]

    editor.run("alice, bob = (User.objects.get(username=name) for name in ('alice', 'bob'))")
    editor.run("RatePolicy.objects.create(rates='5/hour')")
    assert limits() == [[5], [5]]
    editor.run("p = RatePolicy.objects.create(user=alice, rates='7/hour')")
    assert limits() == [[7], [5]]
    editor.run("p.rates = '9/hour'; p.save()")
    assert limits() == [[9], [5]]
    editor.run("p.rates = '6/hour'; RatePolicy.objects.bulk_update([p], ['rates'])")
    assert limits() == [[6], [5]]
    editor.run("p.user = bob; p.save()")
    assert limits() == [[5], [6]]
    editor.run("RatePolicy.objects.filter(user=bob).update(mode='off')")
    assert limits() == [[5], [5]]
    editor.run("RatePolicy.objects.bulk_update([RatePolicy(pk=p.pk, mode='enforce', rates='8/hour')], ['mode'])")
    assert limits() == [[5], [6]]
    editor.run("p.delete()")
    assert limits() == [[5], [5]]
    editor.run("RatePolicy.objects.bulk_create([RatePolicy(user=u, rates='3/hour') for u in (alice, bob)])")
    assert limits() == [[3], [3]]
    editor.run("alice.ratequota_policies.all().delete()")
    assert limits() == [[5], [3]]


def test_a_change_of_the_default_plan_binds_the_next_request(processes: tuple[Process, Process]) -> None:
    server, editor = processes
    editor.run("free, pro = (Plan.objects.create(name=n, slug=n) for n in ('free', 'pro'))")
    editor.run("[RatePolicy.objects.create(plan=p, rates=r) for p, r in ((free, '5/hour'), (pro, '9/hour'))]")
    assert server.check()["limits"] == []
    editor.run("free.default_for = 'authenticated'; free.save()")
    assert server.check()["limits"] == [5]
    editor.run(
        "from django.db import transaction\n"
        "with transaction.atomic():\n"
        "    Plan.objects.filter(pk=free.pk).update(default_for='')\n"
        "    Plan.objects.filter(pk=pro.pk).update(default_for='authenticated')\n"
    )
    assert server.check()["limits"] == [9]
    editor.run("pro.delete()")
    assert server.check()["limits"] == []


def test_what_goes_with_a_plan_binds_the_next_request(processes: tuple[Process, Process]) -> None:
    server, editor = processes
    editor.run("free, pro = (Plan.objects.create(name=n, slug=n) for n in ('free', 'pro'))")
    editor.run("[RatePolicy.objects.create(plan=p, rates=r) for p, r in ((free, '5/hour'), (pro, '9/hour'))]")
    editor.run("alice = User.objects.get(username='alice')")
    editor.run("a = PlanAssignment.objects.create(user=alice, plan=free)")
    assert server.check()["limits"] == [5]
    editor.run("pro.assignments.add(a)")
    assert server.check()["limits"] == [9]
    editor.run("pro.delete()")
    assert server.check()["limits"] == []


IDENTIFIERS = {"tenant": "tests.project.views.tenant", "api_key": "tests.project.views.api_key"}
#: Lets a process look up subjects: limits("acme") of a tenant.
WITH_SUBJECTS = f"""
from django.conf import settings
from django.test import override_settings
from django_ratequota import check_caller
from django_ratequota.policies.cache import policies
override_settings(RATEQUOTA={{**settings.RATEQUOTA, "IDENTIFIERS": {IDENTIFIERS!r}}}).enable()
limits = lambda name, kind="tenant": [s.limit for s in check_caller(identifiers={{kind: name}}).statuses]
"""


def test_an_edit_of_a_subjects_plan_binds_the_next_request_and_drops_nothing_else(
    processes: tuple[Process, Process],
) -> None:
    server, editor = processes
    for process in processes:
        process.run(WITH_SUBJECTS)
    editor.run("pro, free = (Plan.objects.create(name=n, slug=n) for n in ('pro', 'free'))")
    editor.run("[RatePolicy.objects.create(plan=p, rates=r) for p, r in ((free, '5/hour'), (pro, '9/hour'))]")
    assert server.run("answer = limits('acme')") == []
    editor.run("a = PlanAssignment.objects.create(subject='tenant:acme', plan=free)")
    editor.run("PlanAssignment.objects.create(subject='tenant:globex', plan=free)")
    assert server.run("answer = limits('acme'), limits('globex')") == [[5], [5]]
    server.run("before, reloads = dict(policies._entries), policies.reloads")
    editor.run("a.plan = pro; a.save()")
    assert server.run("answer = limits('acme')") == [9]
    assert server.run("answer = [k for k in before if policies._entries.get(k) is not before[k]]") == [
        ["tenant", "acme"]
    ]
    assert server.run("answer = policies.reloads - reloads") == 0
    editor.run("PlanAssignment.objects.filter(pk=a.pk).update(subject='api_key:k1')")
    assert server.run("answer = limits('acme'), limits('k1', 'api_key')") == [[], [9]]
    editor.run("pro.delete()")
    assert server.run("answer = limits('k1', 'api_key'), limits('globex')") == [[], [5]]


def test_an_edit_that_is_rolled_back_binds_nobody(processes: tuple[Process, Process]) -> None:
    server, editor = processes
    editor.run("RatePolicy.objects.create(rates='5/hour')")
    before = server.check()
    editor.run(
        "from django.db import transaction\n"
        "with transaction.atomic():\n"
        "    RatePolicy.objects.update(rates='blocked')\n"
        "    transaction.set_rollback(True)\n"
    )
    after = server.check()
    assert (after["limits"], after["revision"]) == ([5], before["revision"])


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
    anew = server.check()["revision"]
    assert anew > after["revision"], "what else was published may be lost, so every process looks again"
    assert int(redis_client.get("rqtest:revision")) == anew


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


def test_a_published_edit_outlives_the_loss_of_redis_data(
    processes: tuple[Process, Process], redis_client: redis.Redis
) -> None:
    """Lost between publication and next request: the process put its own revision back and went on by it."""
    server, editor = processes
    editor.run("RatePolicy.objects.create(rates='1/hour')")
    assert server.check()["limits"] == [1]
    editor.run("RatePolicy.objects.update(rates='7/hour')")
    redis_client.delete("rqtest:revision")
    assert server.check()["limits"] == [7]


def test_no_decision_is_made_by_a_superseded_policy(processes: tuple[Process, Process]) -> None:
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


def test_a_redis_flushed_under_load_loses_what_was_admitted_since_the_checkpoint(
    processes: tuple[Process, Process], redis_client: redis.Redis
) -> None:
    """Sixteen threads of two processes count one quota: none is restored twice, none is forgotten."""
    for process in processes:
        process.run(
            "from django_ratequota.monitoring import background, checkpoints; "
            "background.Background.keep = lambda _: None"
        )
    processes[1].run("RatePolicy.objects.create(rates='1000000/month')")
    used = "answer = list(QuotaWindow.objects.filter(subject__startswith='user:').values_list('used', flat=True))"
    for process in processes:
        process.tell("hammer")
        process.tell("progress")
    try:
        for process in processes:
            process.run("checkpoints.flush()")
            process.tell("progress")
        [kept] = processes[0].run(used)
        [key] = redis_client.keys("rqtest:{user:*")
        before, _ = redis_client.pipeline(transaction=True).get(key).flushall().execute()
        for process in processes:
            process.tell("progress")
    finally:
        found = [entry for process in processes for entry in process.tell("rest")]
    for process in processes:
        process.run("checkpoints.flush()")
    admitted = [error for name, _, _, _, error in found if name]
    assert set(admitted) == {""}
    _, counted, _ = struct.unpack(">ddd", before)
    assert counted > kept > 0
    [in_the_end] = processes[0].run(used)
    assert len(admitted) == in_the_end + counted - kept
