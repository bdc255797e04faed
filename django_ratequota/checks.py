"""System checks: a misconfiguration is told by ``manage.py check``, never by the first request."""

from __future__ import annotations

import re
from typing import Any

from django.conf import settings as django_settings
from django.core import checks

from . import conf
from .exceptions import ConfigurationError, StoreError
from .limiter import default_limiter

#: The oldest servers whose scripts may carry a shebang, so that a full memory refuses them before they write.
_OLDEST = {"valkey": (7, 2), "redis": (7, 0)}
_MIDDLEWARE = "django_ratequota.middleware.RateQuotaMiddleware"


def connect() -> None:
    """Register the checks; called once the apps are ready."""
    for check in (check_settings, check_store, check_middleware):
        checks.register(check)


def check_settings(app_configs: Any = None, **_: Any) -> list[checks.CheckMessage]:
    """E001: a key of RATEQUOTA that cannot be used. W001: a key that does not exist."""
    problems = conf.read(getattr(django_settings, "RATEQUOTA", {}))[1]
    return [
        checks.Warning(problem.message, hint=problem.hint, id="django_ratequota.W001")
        if problem.warning
        else checks.Error(problem.message, hint=problem.hint, id="django_ratequota.E001")
        for problem in problems
    ]


def check_store(app_configs: Any = None, **_: Any) -> list[checks.CheckMessage]:
    """E002: no Redis is configured. E003: the server is too old. An unreachable server is no error at boot."""
    try:
        limiter = default_limiter()
        info = limiter.store.execute(("INFO", "server"))
    except StoreError as error:
        if not isinstance(error.__cause__, ConfigurationError):
            return []
        hint = "Set RATEQUOTA['CACHE'] to a django-redis alias, or RATEQUOTA['REDIS_URL'] to a Redis URL."
        return [checks.Error(str(error), hint=hint, id="django_ratequota.E002")]
    name, version = server_version(info)
    oldest = _OLDEST[name]
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= oldest:
        return []
    needed = " or ".join(f"{kind} {'.'.join(map(str, least))}" for kind, least in sorted(_OLDEST.items()))
    return [
        checks.Error(
            f"The server is {name} {version}, too old for django-ratequota.",
            hint=f"Upgrade it to {needed}, or later.",
            id="django_ratequota.E003",
        )
    ]


def check_middleware(app_configs: Any = None, **_: Any) -> list[checks.CheckMessage]:
    """W002: ENFORCE_ALL without the middleware. W003: the middleware before the one that knows the user."""
    middleware = list(django_settings.MIDDLEWARE)
    if not conf.settings.enforce_all:
        return []
    if _MIDDLEWARE not in middleware:
        hint = f"Add {_MIDDLEWARE!r} to MIDDLEWARE, after AuthenticationMiddleware."
        return [
            checks.Warning("ENFORCE_ALL does nothing without its middleware.", hint=hint, id="django_ratequota.W002")
        ]
    authentication = "django.contrib.auth.middleware.AuthenticationMiddleware"
    if authentication in middleware and middleware.index(authentication) > middleware.index(_MIDDLEWARE):
        return [
            checks.Warning(
                "RateQuotaMiddleware runs before AuthenticationMiddleware, so it knows no users.",
                hint="Move it below AuthenticationMiddleware.",
                id="django_ratequota.W003",
            )
        ]
    return []


def server_version(info: Any) -> tuple[str, str]:
    """("valkey" or "redis", version) from the reply to INFO; Valkey also calls itself Redis 7.2.4."""
    if isinstance(info, bytes):
        info = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
    if info.get("valkey_version"):
        return "valkey", str(info["valkey_version"])
    return "redis", str(info.get("redis_version", "0"))
