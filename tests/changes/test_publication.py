"""When the changes of a transaction are published, however it ends, and what happens if they cannot be."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.sql import emit_post_migrate_signal
from django.db import OperationalError, connections, transaction
from django.db.models import QuerySet
from django.test import Client, RequestFactory, TestCase

from django_ratequota import check_request
from django_ratequota.changes.publication import publication_pending
from django_ratequota.changes.writer import changed_by, write_counted, write_publication
from django_ratequota.models import Plan, PolicyChange, RatePolicy
from django_ratequota.runtime import default_limiter
from tests.admin.test_admin import BASE, list_form, plan_form
from tests.enforcement.test_propagation import Process, environment, migrated  # noqa: F401 - fixtures
from tests.support.failure import Failure, fail

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

DOWN = "redis://127.0.0.1:1/0"


def stored() -> int:
    return default_limiter().stored_revision()


def limits() -> list[int]:
    return [status.limit for status in check_request(RequestFactory().get("/")).statuses]


def test_what_an_open_transaction_has_changed_is_pending_until_it_is_undone() -> None:
    with transaction.atomic():
        with transaction.atomic():
            Plan.objects.create(name="Free", slug="free")
            transaction.set_rollback(True)
        assert not publication_pending()
        Plan.objects.create(name="Pro", slug="pro")
        with transaction.atomic():
            Plan.objects.create(name="Max", slug="max")
            transaction.set_rollback(True)
        assert publication_pending()
        transaction.set_rollback(True)
    assert (stored(), publication_pending()) == (0, False)


def test_what_no_request_can_see_is_not_pending(published: list[int | None]) -> None:
    plan = Plan.objects.create(name="Free", slug="free")
    before = stored()
    with transaction.atomic():
        plan.description = "For everyone"
        plan.save()
        write_counted("everyone", "reset", before={}, after={})
        assert not publication_pending()
    assert (stored(), len(published)) == (before, 1)


def test_an_edit_made_by_a_hook_is_published(published: list[int | None]) -> None:
    with transaction.atomic():
        transaction.on_commit(lambda: RatePolicy.objects.create(rates="1/s"))
        Plan.objects.create(name="Free", slug="free")
    assert len(published) == 2
    assert published[0] is not None
    assert stored() == max(revision or 0 for revision in published)


def test_behind_a_hook_that_raises_changes_are_found_later(settings: Any) -> None:
    """Django drops the hooks after one that raises."""
    policy = RatePolicy.objects.create(rates="5/hour")
    assert limits() == [5]

    @transaction.atomic
    def edit() -> None:
        transaction.on_commit(fail)
        RatePolicy.objects.filter(pk=policy.pk).update(rates="9/hour")

    before = stored()
    with pytest.raises(Failure):
        edit()
    assert (stored(), publication_pending(), limits()) == (before, False, [5])
    settings.RATEQUOTA = {**settings.RATEQUOTA, "POLL_SECONDS": 0}
    assert limits() == [9]
    Plan.objects.create(name="Pro", slug="pro")
    assert stored() > before, "later changes are published"


def test_a_failed_commit_publishes_nothing(monkeypatch: pytest.MonkeyPatch, published: list[int | None]) -> None:
    def refuse() -> None:
        raise OperationalError("no commit")

    @transaction.atomic
    def edit() -> None:
        Plan.objects.create(name="Pro", slug="pro")
        monkeypatch.setattr(connections["default"], "_commit", refuse)

    with pytest.raises(OperationalError):
        edit()
    monkeypatch.undo()
    assert (Plan.objects.count(), stored(), published, publication_pending()) == (0, 0, [], False)


def test_an_error_while_publishing_does_not_fail_the_commit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, published: list[int | None]
) -> None:
    """The edit was committed, and then raised an exception."""
    monkeypatch.setattr("django_ratequota.runtime.default_limiter", fail)
    Plan.objects.create(name="Free", slug="free")
    assert Plan.objects.count() == 1
    assert published == [None]
    [line] = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert line.startswith("a policy change is saved but could not be published (")


def test_an_author_is_told_once_that_a_publication_failed(settings: Any) -> None:
    told: list[str] = []
    with changed_by(None, unpublished=lambda: told.append("reached")):
        Plan.objects.create(name="Free", slug="free")
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": DOWN}
    with transaction.atomic(), changed_by(None, unpublished=lambda: told.append("mine")):
        Plan.objects.create(name="Pro", slug="pro")
        Plan.objects.create(name="Team", slug="team")
    with changed_by(None, unpublished=lambda: told.append("nothing changed")):
        pass
    Plan.objects.create(name="Max", slug="max")
    assert told == ["mine"]


def test_captured_hooks_publish_each_time(published: list[int | None]) -> None:
    """Only the first of two edits had a hook; after policies of ``setUpTestData`` captured ones published nothing."""
    with transaction.atomic():
        free = Plan.objects.create(name="Free", slug="free")
        for edits in ([free.save, free.delete], [Plan(name="Pro", slug="pro").save]):
            free.slug = "gratis"
            with TestCase.captureOnCommitCallbacks(execute=True):
                for edit in edits:
                    edit()
            assert published[-1:] == [stored()]
            assert publication_pending(), "nothing is committed yet"
        assert len(set(published)) == len(published) == 2
        transaction.set_rollback(True)
    assert not publication_pending()


@pytest.fixture
def manual(environment: dict[str, str]) -> Iterator[Process]:  # noqa: F811
    """A process whose transactions the project manages: AUTOCOMMIT is False."""
    url = environment.get("DATABASE_URL") or environment["RATEQUOTA_TEST_DATABASE"]
    aliases = {"default": {"url": url, "AUTOCOMMIT": False}}
    ours = {"DJANGO_SETTINGS_MODULE": "tests.project.settings_aliases", "RATEQUOTA_TEST_ALIASES": json.dumps(aliases)}
    with closing(Process(os.environ | environment | ours)) as process:
        process.run(
            "from django.db import connection, transaction\n"
            "from django.test import RequestFactory; from django_ratequota import check_request\n"
            "from django_ratequota.runtime import default_limiter\n"
            "from django_ratequota.changes.publication import publication_pending\n"
            "stored = lambda: default_limiter().stored_revision()\n"
            "limits = lambda: [s.limit for s in check_request(RequestFactory().get('/')).statuses]"
        )
        yield process


def test_without_autocommit_a_change_is_recorded_and_published_by_hand(manual: Process) -> None:
    """Django runs no on_commit hook there."""
    manual.run("before = stored(); RatePolicy.objects.create(rates='5/hour')")
    assert manual.run("answer = publication_pending(), limits()") == [True, [5]]
    manual.run("transaction.commit()")
    assert manual.run("answer = stored() == before, PolicyChange.objects.count(), limits()") == [True, 1, [5]]
    manual.run("connection.close()")
    assert manual.run("answer = publication_pending(), limits()") == [False, [5]]
    manual.run("RatePolicy.objects.update(rates='9/hour'); transaction.rollback()")
    assert manual.run("answer = publication_pending(), stored() == before") == [False, True]


def test_without_autocommit_the_ledger_commits_what_it_adds(manual: Process) -> None:
    manual.run("RatePolicy.objects.create(rates='5/month', counted_per='everyone'); transaction.commit(); limits()")
    manual.run("from django_ratequota.ledger import book; from django_ratequota.models import QuotaWindow")
    # The check has begun a transaction, in which PostgreSQL does not let the ledger commit.
    manual.run("transaction.rollback(); book.flush(); transaction.rollback()")
    assert manual.run("answer = [w.used for w in QuotaWindow.objects.all()]") == [1]


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A file by ``dumpdata``, with its history, of a database that has been emptied since."""
    RatePolicy.objects.create(rates="5/hour")
    file = tmp_path / "dump.json"
    call_command("dumpdata", "django_ratequota", output=str(file), verbosity=0)
    call_command("flush", interactive=False, verbosity=0)
    return file


def test_a_dump_brings_its_own_history(dump: Path) -> None:
    """On PostgreSQL, rows recorded while loading took ids of the dump: "duplicate key value violates ..."."""
    assert limits() == []
    call_command("loaddata", str(dump), verbosity=0)
    assert [(row.action, row.after["rates"]) for row in PolicyChange.objects.all()] == [("create", "5/hour")]
    RatePolicy.objects.update(rates="9/hour")
    assert [row.after["rates"] for row in PolicyChange.objects.order_by("pk")] == ["5/hour", "9/hour"]
    assert limits() == [9]


def test_a_fixture_is_obeyed_inside_its_transaction_and_published_by_hand(
    tmp_path: Path, published: list[int | None]
) -> None:
    fixture = tmp_path / "policies.json"
    row = {"model": "django_ratequota.ratepolicy", "pk": 1, "fields": {"rates": "5/hour"}}
    fixture.write_text(json.dumps([row]))
    assert limits() == []
    with transaction.atomic():
        call_command("loaddata", str(fixture), verbosity=0)
        assert limits() == [5]
        transaction.set_rollback(True)
    assert limits() == []
    call_command("loaddata", str(fixture), verbosity=0)
    assert (PolicyChange.objects.count(), published) == (0, [])
    write_publication("fixtures")
    assert limits() == [5]


def test_after_a_flush_the_next_request_finds_nothing() -> None:
    """As between the tests of a TransactionTestCase: the policies of one were enforced in the next."""
    RatePolicy.objects.create(rates="5/hour")
    assert limits() == [5]
    call_command("flush", interactive=False, verbosity=0)
    assert limits() == []


def test_the_process_that_migrates_reads_policies_again() -> None:
    """Historical models send no signal that is listened to."""
    RatePolicy.objects.create(rates="5/hour")
    assert limits() == [5]
    QuerySet(RatePolicy).update(rates="9/hour")
    emit_post_migrate_signal(verbosity=0, interactive=False, db="default")
    assert limits() == [9]


# --- The message after an edit that is saved while Redis is down. ---


DOWN_MESSAGE = (
    "The change is saved, but Redis did not answer. Every worker applies it within 7 seconds (POLL_SECONDS)."
)


@pytest.fixture
def policy() -> RatePolicy:
    return RatePolicy.objects.create(plan=Plan.objects.create(name="Free", slug="free"), rates="1/s")


def messages_after(operator: Client, path: str, form: dict[str, Any]) -> list[str]:
    response = operator.post(f"{BASE}/{path}", form, follow=True)
    assert len(response.redirect_chain) == 1, response.content
    return [str(message) for message in response.context["messages"]]


@pytest.mark.parametrize("atomic", [False, True], ids=["autocommit", "ATOMIC_REQUESTS"])
def test_an_unpublished_edit_shows_when_it_will_apply(
    operator: Client, policy: RatePolicy, atomic: bool, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only message was "changed successfully", while workers used the old policy for up to POLL_SECONDS."""
    plan = Plan.objects.get(pk=policy.plan_id)
    added = messages_after(operator, "plan/add/", plan_form(Plan(name="Pro", slug="pro"), {"rates": "9/s"}))
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic)
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": DOWN, "POLL_SECONDS": 7}
    unchanged = messages_after(operator, f"plan/{plan.pk}/change/", plan_form(plan))
    assert "Redis" not in " ".join(added + unchanged)
    copy = {"name": "Max", "slug": "max", "factor": "1", "reason": "Ticket 4711"}
    for path, form in (("ratepolicy/", list_form(policy, mode="log")), (f"plan/{plan.pk}/copy/", copy)):
        found = messages_after(operator, path, form)
        assert (len(found) >= 2, found.count(DOWN_MESSAGE)) == (True, 1), path
