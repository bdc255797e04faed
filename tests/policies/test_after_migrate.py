"""What flush and data migrations leave is obeyed by the next request, of this process and of others."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.sql import emit_post_migrate_signal
from django.db.models import QuerySet
from django.test import RequestFactory

from django_ratequota import check_request
from django_ratequota.models import PolicyChange, RatePolicy
from django_ratequota.policies.after_migrate import publish_after_migrate
from django_ratequota.policies.cache import PolicyCache
from django_ratequota.runtime import default_limiter
from tests.enforcement.test_propagation import Process, environment, migrated  # noqa: F401 - fixtures

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


def limits() -> list[int]:
    return [status.limit for status in check_request(RequestFactory().get("/")).statuses]


@pytest.mark.parametrize("recorded", [True, False])
def test_after_a_flush_the_next_request_finds_nothing(recorded: bool) -> None:
    """As between the tests of a TransactionTestCase: the policies of one were enforced in the next."""
    policy = RatePolicy(rates="5/hour")
    if recorded:
        policy.save()
    else:
        QuerySet(RatePolicy).bulk_create([policy])
    assert limits() == [5]
    call_command("flush", interactive=False, verbosity=0)
    assert limits() == []


def test_a_signal_without_a_plan_that_leaves_policies_is_recorded() -> None:
    """Test runners send it after their own migrations: no table was emptied then."""
    RatePolicy.objects.create(rates="5/hour")
    other = PolicyCache()
    other.reload(default_limiter().stored_revision())
    QuerySet(RatePolicy).update(rates="9/hour")
    emit_post_migrate_signal(verbosity=0, interactive=False, db="default")
    assert limits() == [9]
    groups = other.reload(default_limiter().stored_revision()).groups
    assert [policy.text for policy in groups[None]["caller"].policies] == ["9/hour"]


def test_another_alias_is_ignored() -> None:
    RatePolicy.objects.create(rates="5/hour")
    before = default_limiter().stored_revision()
    publish_after_migrate(using="replica")
    assert (default_limiter().stored_revision(), PolicyChange.objects.count()) == (before, 1)


def test_a_flush_needs_no_redis(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0"}
    call_command("flush", interactive=False, verbosity=0)
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


@pytest.fixture
def processes(environment: dict[str, str]) -> Iterator[tuple[Process, Process]]:  # noqa: F811
    """(serves requests, edits); a policy is there, and served."""
    url = environment.get("DATABASE_URL") or environment["RATEQUOTA_TEST_DATABASE"]
    ours = {
        "DJANGO_SETTINGS_MODULE": "tests.project.settings_aliases",
        "RATEQUOTA_TEST_ALIASES": json.dumps({"default": {"url": url}}),
    }
    with ExitStack() as running:
        server, editor = (running.enter_context(closing(Process(os.environ | environment | ours))) for _ in range(2))
        server.run(
            "from django.test import RequestFactory; from django_ratequota import check_request\n"
            "limits = lambda: [s.limit for s in check_request(RequestFactory().get('/')).statuses]"
        )
        editor.run("RatePolicy.objects.create(rates='5/hour')")
        editor.run("from django.core.management import call_command as call")
        assert server.run("answer = limits()") == [5]
        yield server, editor
        editor.run("call('migrate', 'shop', 'zero', verbosity=0)")


def test_other_processes_obey_a_flush(processes: tuple[Process, Process]) -> None:
    server, editor = processes
    editor.run("call('flush', interactive=False, verbosity=0)")
    assert server.run("answer = limits()") == []


def test_other_processes_obey_a_data_migration(processes: tuple[Process, Process]) -> None:
    """Historical models send no signal that is listened to: nobody read the policies again."""
    server, editor = processes
    editor.run("call('migrate', 'shop', verbosity=0)")
    assert server.run("answer = limits()") == [9]
    row = editor.run("r = PolicyChange.objects.first(); answer = r.model, r.action, r.reason, r.actor_id")
    assert row == ["*", "publish", "migrate: shop.0001_policies", None]
    editor.run("call('migrate', 'shop', verbosity=0)")
    assert editor.run("answer = PolicyChange.objects.count()") == 2, "nothing was applied"


def test_the_process_that_migrates_obeys_it_too(processes: tuple[Process, Process]) -> None:
    server, _ = processes
    server.run("from django.core.management import call_command as call; call('migrate', 'shop', verbosity=0)")
    assert server.run("answer = limits()") == [9]


def test_a_data_migration_that_finds_no_policies_is_not_recorded(processes: tuple[Process, Process]) -> None:
    _, editor = processes
    editor.run("call('flush', interactive=False, verbosity=0)")
    editor.run("call('migrate', 'shop', verbosity=0)")
    assert editor.run("answer = PolicyChange.objects.count()") == 0


def test_migrations_of_tables_alone_publish_nothing() -> None:
    RatePolicy.objects.create(rates="5/hour")
    before = default_limiter().stored_revision()
    call_command("migrate", "sessions", "zero", verbosity=0)
    call_command("migrate", "sessions", verbosity=0)
    assert default_limiter().stored_revision() == before
    assert PolicyChange.objects.count() == 1
