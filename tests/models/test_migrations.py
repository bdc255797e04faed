"""The migrations match the models, and can be applied and reversed."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction

from django_ratequota.models import Plan, RatePolicy

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

TABLES = {model._meta.db_table for model in apps.get_app_config("django_ratequota").get_models()}


def tables() -> set[str]:
    return {name for name in connection.introspection.table_names() if name.startswith("django_ratequota_")}


def migrate(*target: str) -> None:
    call_command("migrate", "django_ratequota", *target, verbosity=0)


@pytest.fixture
def migrated_again() -> Iterator[None]:
    yield
    migrate()


def test_the_models_have_no_change_without_a_migration() -> None:
    out = io.StringIO()
    call_command("makemigrations", "django_ratequota", check=True, dry_run=True, stdout=out)
    assert "No changes detected" in out.getvalue()


@pytest.mark.usefixtures("migrated_again")
def test_migrations_can_be_reversed_and_applied_again() -> None:
    Plan.objects.create(name="Free", slug="free")
    assert tables() == TABLES
    migrate("zero")
    assert tables() == set()
    migrate()
    assert tables() == TABLES
    assert not Plan.objects.exists()
    RatePolicy.objects.create(rates="1/s")
    with pytest.raises(IntegrityError), transaction.atomic():
        RatePolicy.objects.create(rates="2/s")
