"""Which checks run when."""

from . import database, settings, store, views

ALWAYS = (
    *(settings.check_settings, settings.check_middleware, settings.check_proxies, settings.check_receivers),
    *(settings.check_tenants, store.check_store, store.check_enabled),
    *(views.check_enforced, views.check_declared, views.check_authenticated, views.check_throttle_classes),
    views.check_scopes,
)
#: With ``--deploy``.
DEPLOYMENT = (store.check_memory, store.check_exposed)
#: With ``--database`` and the alias of the policies, after ``database.check_migrated``.
OF_POLICIES = (
    *(database.check_outcome, database.check_plans, database.check_kinds, database.check_rates),
    *(database.check_concurrent, database.check_collations, views.check_unlimited, views.check_shared_slots),
)
