"""When the changes of a transaction are published, however it ends, and what happens if they cannot be."""

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
    """An error raised by a test."""


def fail() -> None:
    raise Failure


def stored() -> int:
    return default_limiter().stored_revision()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_published_after_an_earlier_hook_raised(change: Callable[[RatePolicy], Any]) -> None:
    """Django drops the hooks after one that raises: the edit applied only after POLL_SECONDS."""
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


def test_changes_made_after_a_hook_raised_are_published(published: list[int | None]) -> None:
    try:
        with transaction.atomic():
            transaction.on_commit(fail)
            Plan.objects.create(name="Free", slug="free")
    except Failure:
        # The traceback still references the dropped hooks.
        between = stored()
        Plan.objects.create(name="Pro", slug="pro")
    assert 0 < between < stored()
    assert published == [stored()]


def test_an_edit_made_by_a_hook_is_published(published: list[int | None]) -> None:
    with transaction.atomic():
        transaction.on_commit(lambda: RatePolicy.objects.create(rates="1/s"))
        Plan.objects.create(name="Free", slug="free")
    assert len(published) == 2
    assert published[0] is not None
    assert stored() == max(revision or 0 for revision in published)


def test_a_failed_commit_publishes_nothing(monkeypatch: pytest.MonkeyPatch, published: list[int | None]) -> None:
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
    assert len(published) == 1
    assert not publication_pending()


def test_an_error_while_publishing_does_not_fail_the_commit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, published: list[int | None]
) -> None:
    """The edit was committed, and then raised an exception."""

    def broken() -> Any:
        raise Failure("no limiter")

    monkeypatch.setattr("django_ratequota.recording.publication.default_limiter", broken)
    Plan.objects.create(name="Free", slug="free")
    assert Plan.objects.count() == 1
    assert published == [None]
    [line] = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert line.startswith("a policy change is saved but could not be published (no limiter)")


def test_receivers_may_use_the_database() -> None:
    """The transaction is over, as in any on_commit hook."""
    found: list[int] = []

    def receive(**_: Any) -> None:
        with transaction.atomic(durable=True):
            found.append(Plan.objects.count())

    policies_changed.connect(receive)
    try:
        with transaction.atomic():
            Plan.objects.create(name="Free", slug="free")
    finally:
        policies_changed.disconnect(receive)
    assert found == [1]


def test_when_unpublished_is_called_if_a_publication_fails(settings: Any) -> None:
    """Also if the commit comes later, and only for changes made inside the context."""
    called: list[str] = []
    with when_unpublished(lambda: called.append("reached")):
        Plan.objects.create(name="Free", slug="free")
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0"}
    with transaction.atomic(), when_unpublished(lambda: called.append("mine")):
        Plan.objects.create(name="Pro", slug="pro")
        Plan.objects.create(name="Team", slug="team")
    Plan.objects.create(name="Max", slug="max")
    assert called == ["mine"]


def test_captured_hooks_publish_each_time() -> None:
    """A test that never commits may run its hooks: only the first of two edits had one."""
    with transaction.atomic():
        for name in ("Free", "Pro"):
            before = stored()
            with TestCase.captureOnCommitCallbacks(execute=True):
                Plan.objects.create(name=name, slug=name.lower())
            assert stored() > before
            assert publication_pending(), "nothing is committed yet"
        transaction.set_rollback(True)
    assert not publication_pending()


def test_captured_hooks_publish_after_unpublished_edits(published: list[int | None]) -> None:
    """After policies of ``setUpTestData``, which are never published, captured hooks published nothing."""
    with transaction.atomic():
        free = Plan.objects.create(name="Free", slug="free")
        before = stored()
        with TestCase.captureOnCommitCallbacks(execute=True):
            free.slug = "gratis"
            free.save()
            free.delete()
        assert (stored() > before, published) == (True, [stored()])
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
            "published = []; listener = lambda revision, **_: published.append(revision)\n"
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
def test_without_autocommit_the_commit_of_the_project_publishes(
    manual: Process, change: str, redis_client: redis.Redis
) -> None:
    """Django runs no on_commit hook there, and refuses one outside ``atomic``."""
    manual.run(change)
    assert manual.run("answer = stored(), publication_pending(), published") == [0, True, []]
    manual.run("transaction.commit()")
    revision, pending, published = manual.run("answer = stored(), publication_pending(), published")
    assert (revision > 0, pending, published) == (True, False, [revision])
    manual.run("transaction.commit()")
    assert manual.run("answer = stored(), published") == [revision, [revision]]


def test_without_autocommit_a_rollback_publishes_nothing(manual: Process) -> None:
    manual.run("Plan.objects.count(); Plan.objects.create(name='Free', slug='free'); transaction.rollback()")
    manual.run("Plan.objects.count(); transaction.commit()")
    assert manual.run("answer = stored(), publication_pending(), published") == [0, False, []]
