"""When a transaction's changes are published, whatever ends it, and who hears where they could not be."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import redis
from django.db import OperationalError, connections, transaction
from django.test import TestCase

from django_ratequota.models import Plan, RatePolicy
from django_ratequota.recording.publication import publication_pending, when_unpublished
from django_ratequota.runtime import default_limiter
from django_ratequota.signals import policies_changed
from tests.enforcement.test_propagation import Process, environment, migrated  # noqa: F401 - fixtures
from tests.recording.test_recorder import CHANGES

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


class Failure(Exception):
    """What goes wrong in a test."""


def fail() -> None:
    raise Failure


def stored() -> int:
    return default_limiter().stored_revision()


@pytest.fixture
def heard() -> Iterator[list[int | None]]:
    """The revisions that ``policies_changed`` was sent with."""
    revisions: list[int | None] = []

    def note(revision: int | None, **_: Any) -> None:
        revisions.append(revision)

    policies_changed.connect(note)
    yield revisions
    policies_changed.disconnect(note)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_earlier_hook_that_raises_loses_no_publication(change: Callable[[RatePolicy], Any]) -> None:
    """Django drops the hooks behind one that raises: the edit bound after POLL_SECONDS only."""
    policy = RatePolicy.objects.create(rates="1/s")
    before = stored()

    @transaction.atomic
    def edit() -> None:
        transaction.on_commit(fail)
        change(policy)

    with pytest.raises(Failure):
        edit()
    assert stored() > before
    assert not publication_pending()


def test_what_follows_a_hook_that_raised_is_published_too(heard: list[int | None]) -> None:
    try:
        with transaction.atomic():
            transaction.on_commit(fail)
            Plan.objects.create(name="Free", slug="free")
    except Failure:
        # The failure still holds on to the hooks that were dropped.
        between = stored()
        Plan.objects.create(name="Pro", slug="pro")
    assert 0 < between < stored()
    assert heard == [stored()]


def test_an_edit_made_by_a_hook_is_published(heard: list[int | None]) -> None:
    with transaction.atomic():
        transaction.on_commit(lambda: RatePolicy.objects.create(rates="1/s"))
        Plan.objects.create(name="Free", slug="free")
    assert len(heard) == 2
    assert heard[0] is not None
    assert stored() == max(revision or 0 for revision in heard)


def test_a_commit_that_fails_publishes_nothing(monkeypatch: pytest.MonkeyPatch, heard: list[int | None]) -> None:
    Plan.objects.create(name="Free", slug="free")
    before = stored()

    def refuse() -> None:
        raise OperationalError("no commit")

    @transaction.atomic
    def edit() -> None:
        Plan.objects.create(name="Pro", slug="pro")
        monkeypatch.setattr(connections["default"], "_commit", refuse)

    with pytest.raises(OperationalError):
        edit()
    monkeypatch.undo()
    assert Plan.objects.count() == 1
    assert stored() == before
    assert len(heard) == 1
    assert not publication_pending()


def test_an_error_of_the_publication_fails_no_commit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, heard: list[int | None]
) -> None:
    """The edit was committed, and looked as if it had failed."""

    def broken() -> Any:
        raise Failure("no limiter")

    monkeypatch.setattr("django_ratequota.recording.publication.default_limiter", broken)
    Plan.objects.create(name="Free", slug="free")
    assert Plan.objects.count() == 1
    assert heard == [None]
    [line] = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert line.startswith("a policy change is saved but could not be published (no limiter)")


def test_receivers_may_use_the_database() -> None:
    """As in any hook of on_commit: the transaction is over."""
    found: list[int] = []

    def look(**_: Any) -> None:
        with transaction.atomic(durable=True):
            found.append(Plan.objects.count())

    policies_changed.connect(look)
    try:
        with transaction.atomic():
            Plan.objects.create(name="Free", slug="free")
    finally:
        policies_changed.disconnect(look)
    assert found == [1]


def test_when_unpublished_is_called_if_a_publication_fails(settings: Any) -> None:
    """However late the commit comes, and for its own changes only."""
    heard: list[str] = []
    with when_unpublished(lambda: heard.append("reached")):
        Plan.objects.create(name="Free", slug="free")
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0"}
    with transaction.atomic(), when_unpublished(lambda: heard.append("mine")):
        Plan.objects.create(name="Pro", slug="pro")
        Plan.objects.create(name="Team", slug="team")
    Plan.objects.create(name="Max", slug="max")
    assert heard == ["mine"]


def test_captured_hooks_publish_each_time() -> None:
    """A test that never commits may run its hooks; only the first of two edits was among them."""
    with transaction.atomic():
        for name in ("Free", "Pro"):
            before = stored()
            with TestCase.captureOnCommitCallbacks(execute=True):
                Plan.objects.create(name=name, slug=name.lower())
            assert stored() > before
            assert publication_pending(), "nothing is committed yet"
        transaction.set_rollback(True)
    assert not publication_pending()


def test_captured_hooks_publish_though_an_edit_came_before(heard: list[int | None]) -> None:
    """A test's ``setUpTestData`` makes policies that no hook has published: those captured later were silent."""
    with transaction.atomic():
        free = Plan.objects.create(name="Free", slug="free")
        before = stored()
        with TestCase.captureOnCommitCallbacks(execute=True):
            free.slug = "gratis"
            free.save()
            free.delete()
        assert (stored() > before, heard) == (True, [stored()])
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
            "from django.db import transaction; from django_ratequota.runtime import default_limiter\n"
            "from django_ratequota.recording.publication import publication_pending\n"
            "from django_ratequota.recording.recorder import record_publication\n"
            "from django_ratequota.signals import policies_changed\n"
            "heard = []; listener = lambda revision, **_: heard.append(revision)\n"
            "policies_changed.connect(listener)\n"
            "stored = lambda: default_limiter().stored_revision()"
        )
        yield process


@pytest.mark.parametrize(
    "change",
    [
        "Plan.objects.create(name='Free', slug='free')",
        "Plan.objects.bulk_create([Plan(name='Free', slug='free')])",
        "record_publication('by hand')",
    ],
)
def test_without_autocommit_the_projects_own_commit_publishes(
    manual: Process, change: str, redis_client: redis.Redis
) -> None:
    """Django runs no hook of on_commit there, and refuses them outside of ``atomic``."""
    manual.run(change)
    assert manual.run("answer = stored(), publication_pending(), heard") == [0, True, []]
    manual.run("transaction.commit()")
    revision, pending, heard = manual.run("answer = stored(), publication_pending(), heard")
    assert (revision > 0, pending, heard) == (True, False, [revision])
    manual.run("transaction.commit()")
    assert manual.run("answer = stored(), heard") == [revision, [revision]]


def test_without_autocommit_a_rollback_publishes_nothing(manual: Process) -> None:
    manual.run("Plan.objects.count(); Plan.objects.create(name='Free', slug='free'); transaction.rollback()")
    manual.run("Plan.objects.count(); transaction.commit()")
    assert manual.run("answer = stored(), publication_pending(), heard") == [0, False, []]
