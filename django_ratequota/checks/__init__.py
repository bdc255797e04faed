"""System checks: ``manage.py check`` reports a misconfiguration, so that the first request need not."""

from __future__ import annotations

from django.core import checks

from . import database, settings, store, views


def connect() -> None:
    """Register the checks; called once the apps are ready."""
    for check in (settings.check_settings, settings.check_middleware, settings.check_proxies, store.check_store):
        checks.register(check)
    for check in (views.check_enforced, views.check_unchecked):
        checks.register(check)
    checks.register(store.check_exposed, deploy=True)
    for check in (
        store.check_round_trip,
        database.check_constraints,
        database.check_migrated,
        database.check_outcome,
        database.check_plans,
        database.check_rates,
        views.check_methods,
        views.check_statuses,
        views.check_unlimited,
    ):
        checks.register(check, checks.Tags.database)
