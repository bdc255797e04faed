"""System checks of the database."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core.checks import run_checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import IntegrityError, connection
from django.db.migrations.recorder import MigrationRecorder
from django.utils import timezone

from django_ratequota.changes.validators import unsupported_constraints
from django_ratequota.checks.database import check_collations, check_kinds, check_migrated
from django_ratequota.conf import COUNTED_PER
from django_ratequota.models import Plan, PlanAssignment, RatePolicy
from django_ratequota.models.fields import exact_collation
from tests.checks import ids
from tests.support.projects import run_python

DATABASES = ["default"]


@pytest.mark.django_db(transaction=True)
def test_a_write_that_breaks_an_unenforced_constraint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on MariaDB: a query for conflicting rows replaces the constraint."""
    monkeypatch.setattr(connection.features, "supports_partial_indexes", False)
    RatePolicy.objects.create(rates="1/s")
    RatePolicy.objects.create(rates="1/s", mode="log")
    (rule,) = unsupported_constraints(RatePolicy, "default")
    monkeypatch.setattr(rule, "expressions", rule.expressions[:-1])  # without the mode these policies conflict
    with pytest.raises(IntegrityError, match="two rows break the constraint ratequota_policy_one_undated"):
        RatePolicy.objects.create(rates="1/s", subject="ip:::1")
    assert RatePolicy.objects.count() == 2


@pytest.mark.django_db
def test_unapplied_migrations_are_a_warning(monkeypatch: pytest.MonkeyPatch, django_assert_num_queries: Any) -> None:
    assert check_migrated() == []
    recorder = MigrationRecorder(connection)
    recorder.record_unapplied("django_ratequota", "0001_initial")
    [warning] = check_migrated()
    assert ids([warning]) == ["W009"]
    assert warning.msg == "Migrations of django_ratequota are not applied to 'default': 0001_initial."
    with pytest.raises(SystemCheckError, match=r"django_ratequota\.W009"):
        call_command("check", databases=DATABASES, fail_level="WARNING")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("django_ratequota.changes.databases.policy_alias", lambda: "replica")
        assert run_checks(tags=["database"], databases=DATABASES) == []
    with django_assert_num_queries(0):
        assert run_checks(tags=["database"], databases=[]) == []
        monkeypatch.setattr(sys, "argv", ["manage.py", "migrate"])
        assert run_checks(tags=["database"], databases=DATABASES) == []


@pytest.mark.django_db(transaction=True)
def test_what_refers_to_an_identifier_that_does_not_exist_is_reported(settings: Any) -> None:
    names = {"tenant": "tests.project.views.tenant", "api_key": "tests.project.views.api_key"}
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": names}
    plan = Plan.objects.create(name="Pro", slug="pro")
    for kind in names:
        PlanAssignment.objects.create(subject=f"{kind}:acme", plan=plan)
        RatePolicy.objects.create(subject=f"{kind}:acme", rates="9/min")
    for counted_per in (*COUNTED_PER, *names):
        RatePolicy.objects.create(counted_per=counted_per, rates="9/min")
    RatePolicy.objects.create(subject="ip:203.0.113.0/24", rates="9/min")
    RatePolicy.objects.create(counted_per="user", rates="9/min", mode="off")
    RatePolicy.objects.create(counted_per="user", rates="9/min", ends_at=timezone.now())
    assert check_kinds() == []
    del names["api_key"]
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": names}
    found = check_kinds()
    assert ids(found) == ["W025"] * 3
    assert all("RATEQUOTA['IDENTIFIERS'] has no 'api_key'" in message.msg for message in found)
    starts = ["Policies counted per 'api_key'", "Policies for subjects of", "Plans of subjects of"]
    assert all(message.msg.startswith(start) for message, start in zip(found, starts, strict=True))


_CHECKS = """
import django
from django.core import management
django.setup()
try:
    management.call_command("check", databases=["default"], tags=["database"])
except management.base.SystemCheckError as error:
    print(error)
"""


@pytest.mark.parametrize("url", ["sqlite:////nowhere/database", "postgres://127.0.0.1:1/nowhere"])
def test_a_database_that_cannot_be_reached_is_an_error(url: str) -> None:
    """It passed as one without tables does. With Django 6 the checks of models connect, too, and raise its error."""
    found = "\n".join(run_python(_CHECKS, DJANGO_SETTINGS_MODULE="tests.project.settings", DATABASE_URL=url))
    assert "(django_ratequota.E010) The database 'default' is unavailable, so policies cannot be read: " in found


@contextmanager
def altered(statement: str, undoing: str) -> Iterator[None]:
    """Execute a statement, and at the end the one that undoes it, as MariaDB rolls none back."""
    with connection.cursor() as cursor:
        cursor.execute(statement)
        try:
            yield
        finally:
            cursor.execute(undoing)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("statement", "undoing", "lacking"),
    [
        (
            "ALTER TABLE django_ratequota_ratepolicy RENAME COLUMN mode TO kind",
            "ALTER TABLE django_ratequota_ratepolicy RENAME COLUMN kind TO mode",
            "django_ratequota_ratepolicy.mode",
        ),
        (
            "ALTER TABLE django_ratequota_savelock RENAME TO earlier",
            "ALTER TABLE earlier RENAME TO django_ratequota_savelock",
            "django_ratequota_savelock",
        ),
    ],
)
def test_tables_of_an_older_schema_are_an_error(statement: str, undoing: str, lacking: str) -> None:
    with altered(statement, undoing):
        [error] = check_migrated()
        with pytest.raises(SystemCheckError, match=r"django_ratequota\.E008"):
            call_command("check", databases=DATABASES)
    assert ids([error]) == ["E008"]
    assert error.msg.endswith(f" are incomplete, so policies may not be enforced: {lacking}.")


@pytest.mark.django_db(transaction=True)
def test_columns_that_compare_without_case_are_reported_on_mariadb() -> None:
    assert check_collations() == []
    if connection.vendor == "mysql":
        table, collation = "django_ratequota_quotaday", exact_collation(connection)
        undoing = f"ALTER TABLE {table} MODIFY `counter` varchar(128) COLLATE `{collation}` NOT NULL"
        conversion = f"ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci"
        with altered(conversion, undoing):
            [warning] = check_collations()
        assert (ids([warning]), warning.hint) == (["W028"], f"Run: {undoing};")
