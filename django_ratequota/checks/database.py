"""System checks of what is stored: run where the policies' database is checked (``check --database default``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core import checks
from django.db import connections
from django.utils import timezone

from .. import conf
from ..changes.databases import policy_alias
from ..engine.rates import CONCURRENT
from ..models import Endpoint, Plan, PlanAssignment, RatePolicy
from ..models.fields import ExactField, exact_collation
from ..policies.loading import find_unreadable
from .settings import MIDDLEWARE

Messages = list[checks.CheckMessage]


def check_migrated() -> Messages:
    """W009: a migration of this app is not applied. E008: all are, and a column or a table is missing.

    Raises ``django.db.Error``.
    """
    from django.db.migrations.loader import MigrationLoader

    alias, label = policy_alias(), "django_ratequota"
    loader = MigrationLoader(connections[alias])
    unapplied = set(loader.disk_migrations) - set(loader.applied_migrations)
    missing = sorted(name for app, name in unapplied if app == label)
    text = f"Migrations of {label} are not applied to {alias!r}: {', '.join(missing)}."
    hint = "Run manage.py migrate. Policies cannot be read until then."
    if missing:
        return [checks.Warning(text, hint=hint, id="django_ratequota.W009")]
    problems = list(_incomplete(connections[alias]))
    text = f"Tables of {label} are incomplete, so policies may not be enforced: {', '.join(problems)}."
    hint = (
        f"An unreleased version made its tables. Drop all that begin with {label}_, run manage.py migrate --fake "
        f"{label} zero, then manage.py migrate."
    )
    return [checks.Error(text, hint=hint, id="django_ratequota.E008")] if problems else []


def _incomplete(connection: Any) -> Iterator[str]:
    """Yield which tables and columns of this app do not exist."""
    with connection.cursor() as cursor:
        tables = connection.introspection.table_names(cursor)
        for meta in (model._meta for model in _models()):
            if meta.db_table not in tables:
                yield meta.db_table
                continue
            found = {one.name for one in connection.introspection.get_table_description(cursor, meta.db_table)}
            missing = {field.column for field in meta.local_concrete_fields} - found
            yield from (f"{meta.db_table}.{column}" for column in sorted(missing))


def _models() -> Iterator[Any]:
    return apps.get_app_config("django_ratequota").get_models()


def check_collations() -> Messages:
    """W028: MySQL or MariaDB takes subjects or counters for equal that differ in case, accents or trailing blanks."""
    connection = connections[alias := policy_alias()]
    collation = exact_collation(connection)
    if collation is None:
        return []
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT table_name, column_name FROM information_schema.columns "
            "WHERE table_schema = DATABASE() AND collation_name <> %s",
            [collation],
        )
        others = set(cursor.fetchall())
    editor = connection.schema_editor()
    found = [
        f"ALTER TABLE {model._meta.db_table} MODIFY `{field.column}` {editor.column_sql(model, field)[0]};"
        for model in _models()
        for field in model._meta.local_concrete_fields
        if isinstance(field, ExactField) and (model._meta.db_table, field.column) in others
    ]
    text = f"{alias!r} treats acme and ACME as equal, because subjects and counters lack the collation {collation}."
    hint = f"Run: {' '.join(found)}"
    return [checks.Warning(text, hint=hint, id="django_ratequota.W028")] if found else []


def check_outcome() -> Messages:
    """W006: an endpoint counts by status, and there is no middleware that refunds the other responses.

    ``@ratequota`` refunds by itself. For DRF and ``check_request`` the middleware does.
    """
    if MIDDLEWARE in django_settings.MIDDLEWARE:
        return []
    counting = Endpoint.objects.exclude(limits=Endpoint.Limits.NONE).exclude(charged_statuses="")
    names = list(counting.values_list("name", flat=True)[:10])
    text = f"Endpoints with charged statuses ({', '.join(names)}) need the middleware to refund other responses."
    hint = f"Add {MIDDLEWARE!r} to MIDDLEWARE. Without it, all requests are charged except in views under @ratequota."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W006")] if names else []


def check_concurrent() -> Messages:
    """W030: a policy limits how many requests run at once, and there is no middleware that tells when they end."""
    if MIDDLEWARE in django_settings.MIDDLEWARE:
        return []
    rates = RatePolicy.objects.filter(rates__icontains=CONCURRENT).exclude(mode="off").values_list("rates", flat=True)
    found = ", ".join(sorted(set(rates[:10])))
    text = f"Concurrent requests are limited ({found}), and no middleware releases their slots when they end."
    hint = f"Add {MIDDLEWARE!r} to MIDDLEWARE. Without it a slot may be held until a client has left, or longer."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W030")] if found else []


def check_plans() -> Messages:
    """W014: callers for whom PLAN_RESOLVER raises may have no plan."""
    if not conf.settings.plan_resolver or not RatePolicy.objects.exclude(plan=None).exists():
        return []
    missing = {"authenticated", "anonymous"}.difference(Plan.objects.values_list("default_for", flat=True))
    text = f"PLAN_RESOLVER is set, but no plan is the default for {' and '.join(sorted(missing))} clients."
    hint = "Make a plan the default for them. It applies when PLAN_RESOLVER names no plan and none is assigned."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W014")] if missing else []


def check_kinds() -> Messages:
    """W025: policies, and plans of subjects, whose identifier IDENTIFIERS does not name."""
    hint = "Restore the identifier or edit the rows: counted_per is caller, ip, plan, everyone or an identifier."
    messages: Messages = []
    policies = RatePolicy.objects.exclude(mode="off")
    for what, rows, field in (
        ("Policies counted per", policies, "counted_per"),
        ("Policies for subjects of the kind", policies.exclude(subject=""), "subject"),
        ("Plans of subjects of the kind", PlanAssignment.objects.filter(subject__isnull=False), "subject"),
    ):
        rows = rows.exclude(ends_at__lte=timezone.now()).order_by()
        for kind in (*conf.COUNTED_PER, *conf.settings.identifiers):
            rows = rows.exclude(**{field: kind}).exclude(**{f"{field}__startswith": f"{kind}:"})
        found = rows.values_list(field, flat=True).first()
        if found is not None:
            kind = found.partition(":")[0]
            text = f"{what} {kind!r} have no effect, because RATEQUOTA['IDENTIFIERS'] has no {kind!r}."
            messages.append(checks.Warning(text, hint=hint, id="django_ratequota.W025"))
    return messages


def check_rates() -> Messages:
    """W012: policies have rates that this version cannot read."""
    hint = "Change the rates or upgrade to the version that wrote them."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W012") for text in find_unreadable()]
