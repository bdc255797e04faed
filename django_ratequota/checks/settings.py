"""System checks of RATEQUOTA and of the settings that it depends on. They ask neither Redis nor a database."""

from __future__ import annotations

from ipaddress import collapse_addresses
from typing import Any

from django.conf import settings as django_settings
from django.contrib.auth import get_user_model
from django.core import checks

from .. import conf

MIDDLEWARE = "django_ratequota.middleware.RateQuotaMiddleware"
_AUTHENTICATION = "django.contrib.auth.middleware.AuthenticationMiddleware"


def check_settings(**_: Any) -> list[checks.CheckMessage]:
    """E001: a key of RATEQUOTA cannot be used. W001: a key does not exist."""
    return conf.read(getattr(django_settings, "RATEQUOTA", {}))[1]


def check_middleware(**_: Any) -> list[checks.CheckMessage]:
    """W002: a setting needs the middleware. W003: the middleware stands before the one that finds the user."""
    middleware = list(django_settings.MIDDLEWARE)
    needing = [key for key in ("ENFORCE_ALL", "COUNT_UNCHECKED") if getattr(conf.settings, key.lower())]
    if needing and MIDDLEWARE not in middleware:
        text = f"{needing[0]} has no effect without the middleware."
        hint = f"Add {MIDDLEWARE!r} to MIDDLEWARE, after AuthenticationMiddleware."
        return [checks.Warning(text, hint=hint, id="django_ratequota.W002")]
    if not conf.settings.enforce_all or _AUTHENTICATION not in middleware:
        return []
    if middleware.index(_AUTHENTICATION) < middleware.index(MIDDLEWARE):
        return []
    text = "RateQuotaMiddleware runs before AuthenticationMiddleware, so requests have no user yet."
    return [checks.Warning(text, hint="Move it below AuthenticationMiddleware.", id="django_ratequota.W003")]


def check_proxies(**_: Any) -> list[checks.CheckMessage]:
    """W018: TRUSTED_PROXIES trusts every address, so that clients may pose as any other."""
    networks = conf.settings.networks
    versions = [
        f"IPv{version}"
        for version in (4, 6)
        if any(not n.prefixlen for n in collapse_addresses(n for n in networks if n.version == version))
    ]
    text = f"TRUSTED_PROXIES trusts all {' and '.join(versions)} addresses, so a client can claim any address."
    hint = "List only the networks of your proxies, such as 10.0.0.0/8."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W018")] if versions else []


def check_tenants(**_: Any) -> list[checks.CheckMessage]:
    """W029: each tenant has a schema of its own, and the tables of this app are not in the shared one alone."""
    engines = {str(database.get("ENGINE", "")).partition(".")[0] for database in django_settings.DATABASES.values()}
    if engines.isdisjoint({"django_tenants", "tenant_schemas"}):
        return []
    shared = getattr(django_settings, "PUBLIC_SCHEMA_NAME", "public")
    apps = {shared: getattr(django_settings, "SHARED_APPS", ()), "": getattr(django_settings, "TENANT_APPS", ())}
    for kind, options in (getattr(django_settings, "TENANT_TYPES", None) or {}).items():
        apps[kind] = options["APPS"]
    having = {kind for kind, names in apps.items() if any(name.split(".")[0] == "django_ratequota" for name in names)}
    text = "Tenants have their own schemas, but a worker applies the policies of one schema to all tenants."
    hint = (
        "List django_ratequota in SHARED_APPS and not in TENANT_APPS, and an identifier of the tenant first in "
        "RATEQUOTA['CALLER']."
    )
    return [] if having == {shared} else [checks.Warning(text, hint=hint, id="django_ratequota.W029")]


def check_receivers(**_: Any) -> list[checks.CheckMessage]:
    """W027: a receiver that NOTIFY names has nobody to mail."""
    customers = getattr(get_user_model(), "EMAIL_FIELD", "") or conf.settings.customer_emails
    mailed = {
        "mail_operators": (django_settings.MANAGERS, "Add email addresses to Django's MANAGERS."),
        "mail_customers": (customers, "Set RATEQUOTA['CUSTOMER_EMAILS'] or EMAIL_FIELD of the user model."),
    }
    return [
        checks.Warning(f"NOTIFY contains {name}, which has no recipients.", hint=hint, id="django_ratequota.W027")
        for name, (addresses, hint) in mailed.items()
        if not addresses and f"django_ratequota.notify.{name}" in conf.settings.notify
    ]
