"""System checks: a misconfiguration is told by ``manage.py check``, never by the first request."""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from dataclasses import replace
from math import ceil
from statistics import median
from typing import Any

import redis
from django.conf import settings as django_settings
from django.core import checks
from django.db import Error as DatabaseError
from django.db import connections

from .. import conf
from ..engine.keys import bucket_key, revision_key
from ..engine.rates import Rate
from ..engine.scripts import COMMANDS, DENIED
from ..engine.types import Bucket
from ..exceptions import ConfigurationError, StoreError
from ..recording.databases import policy_alias
from ..recording.validators import unsupported_constraints
from ..runtime import default_limiter, store_from_settings
from ..store.base import Call, run_script
from ..store.server import server_version
from ..utils.sansio import drive
from . import views as checks_views

#: The oldest servers whose scripts may carry a shebang, so that a full memory refuses them before they write.
_OLDEST = {"valkey": (7, 2), "redis": (7, 0)}
_MIDDLEWARE = "django_ratequota.middleware.RateQuotaMiddleware"
#: Round trips that TIMEOUT must have room for: to connect, to log in and to decide.
_TRIPS = 3
#: Seconds that a measured command may take, because TIMEOUT may be shorter than the round trip.
_PATIENCE = 3.0


def connect() -> None:
    """Register the checks; called once the apps are ready."""
    for check in (check_settings, check_store, check_middleware):
        checks.register(check)
    checks.register(check_exposed, deploy=True)
    checks.register(check_outcome, checks.Tags.database)
    checks.register(check_round_trip, checks.Tags.database)
    checks.register(check_rates, checks.Tags.database)
    checks.register(check_plans, checks.Tags.database)
    checks_views.connect()
    checks.register(check_constraints, checks.Tags.database)


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
    """E002: no Redis is configured. E003: a server is too old. E004: CLUSTER does not say what it is.

    E005: the user may not run what the scripts call. E006: Redis refuses the login or the database. E007: the server
    is no Redis. W004: a server may evict counters. W016: it takes too few clients. W008: Redis cannot be reached,
    which is no error at boot, for it is none later. Whatever it asks takes ``TIMEOUT`` at most, together, and writes
    nothing.
    """
    try:
        store = default_limiter().store
        call = Call(store, always=True)
        found = store.info(call)
    except StoreError as error:
        if isinstance(error.__cause__, ConfigurationError):
            hint = "Set RATEQUOTA['CACHE'] to a django-redis alias, or RATEQUOTA['REDIS_URL'] to a Redis URL."
            return [checks.Error(str(error), hint=hint, id="django_ratequota.E002")]
        if "cluster support disabled" in str(error):
            return [_cluster_error("CLUSTER is True, but the server is no node of a Cluster.", "False")]
        return _denied(call) if error.reason == "noperm" else [_unusable(error)]
    messages: list[checks.CheckMessage] = []
    for server, info in found.items():
        name, version = server_version(info)
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST[name]:
            needed = " or ".join(f"{kind} {'.'.join(map(str, least))}" for kind, least in sorted(_OLDEST.items()))
            text = f"The server at {server} is {name} {version}, too old for django-ratequota."
            hint = f"Upgrade it to {needed}, or later."
            messages.append(checks.Error(text, hint=hint, id="django_ratequota.E003"))
        # Valkey calls it server_mode.
        if "cluster" in (info.get("redis_mode"), info.get("server_mode")) and not store.clustered:
            messages.append(_cluster_error(f"The server at {server} is a node of a Cluster.", "True"))
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            text = f"The server at {server} evicts keys when its memory is full ({policy}): limits are forgotten."
            hint = "Set maxmemory-policy to noeviction, or give django-ratequota a server of its own."
            messages.append(checks.Warning(text, hint=hint, id="django_ratequota.W004"))
        messages += _crowded(server, int(info.get("maxclients", 0)))
    return [*messages, *_denied(call)]


def _crowded(server: str, clients: int) -> list[checks.CheckMessage]:
    """W016, where the server tells how many ``clients`` it takes (0 = it does not)."""
    most, share = conf.settings.max_connections, conf.settings.local_share
    if not clients or most * share <= clients:
        return []
    text = (
        f"The server at {server} takes {clients} clients (maxclients), fewer than MAX_CONNECTIONS ({most}) for each "
        f"of {share} processes (LOCAL_SHARE): where all are taken, a process that has none gets no decisions."
    )
    hint = f"Raise maxclients, or set RATEQUOTA['MAX_CONNECTIONS'] = {max(clients // share, 1)}."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W016")]


def _unusable(error: StoreError) -> checks.CheckMessage:
    text = str(error).rstrip(".")
    causes: list[BaseException | None] = [error.__cause__]
    while causes[-1] is not None:
        causes.append(causes[-1].__cause__)
    if any(isinstance(cause, redis.InvalidResponse) for cause in causes):
        hint = "Write host and port of a Redis; for one that speaks TLS, a rediss:// URL."
        return checks.Error(f"The server is no Redis: {text}.", hint=hint, id="django_ratequota.E007")
    # Whatever a login is refused with, the connection fails by it: no such database, for one.
    if error.reason == "noauth" or (
        error.reason == "connection" and any(type(cause) is redis.ResponseError for cause in causes)
    ):
        what = "has no database of that number" if "DB index" in text else "refuses the login"
        hint = "Correct user, password and database number in the CACHES alias, or in RATEQUOTA['REDIS_URL']."
        return checks.Error(f"Redis {what}: {text}.", hint=hint, id="django_ratequota.E006")
    hint = "Start it, or correct its address: meanwhile policies do what their on_error says."
    return checks.Warning(f"Redis cannot be reached: {text}.", hint=hint, id="django_ratequota.W008")


def _denied(call: Call) -> list[checks.CheckMessage]:
    limiter = default_limiter()
    try:
        key = bucket_key(limiter.prefix, Bucket("user:0", Rate.parse("1/s")))
        denied = drive(run_script(DENIED, [key], COMMANDS), call.do)
    except StoreError as error:
        if error.reason != "noperm":
            return []
        denied = [b"EVAL", b"EVALSHA"]
    names = ", ".join(name.decode() for name in denied)
    what = f"on keys that begin with {limiter.prefix}: decisions, or what the admin shows, would fail."
    text = f"The Redis user may not run {names} {what}"
    hint = "Give it the ACL in docs/security.md."
    return [checks.Error(text, hint=hint, id="django_ratequota.E005")] if denied else []


def _cluster_error(text: str, right: str) -> checks.CheckMessage:
    hint = f"Set RATEQUOTA['CLUSTER'] = {right}."
    return checks.Error(text, hint=hint, id="django_ratequota.E004")


def check_exposed(app_configs: Any = None, **_: Any) -> list[checks.CheckMessage]:
    """W005, with --deploy: whoever reaches the server may read and reset every counter."""
    try:
        exposed = default_limiter().store.exposed
    except StoreError:  # told by E002
        return []
    hint = "Give Redis a password (ACL users, see docs/security.md), and put it into the alias or REDIS_URL."
    text = "Redis is reached by the network without a password."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W005")] if exposed else []


def check_outcome(app_configs: Any = None, databases: Collection[str] | None = None, **_: Any) -> list[Any]:
    """W006, where the database is checked: an endpoint counts by status, and there is no middleware to give back.

    ``@ratequota`` does it by itself; for DRF and ``check_request`` the middleware has to.
    """
    from ..models import Endpoint

    if _MIDDLEWARE in django_settings.MIDDLEWARE or policy_alias(Endpoint) not in (databases or ()):
        return []
    try:
        names = list(Endpoint.objects.exclude(charged_statuses="").values_list("name", flat=True)[:10])
    except DatabaseError:  # not migrated yet
        return []
    text = f"Some endpoints count only responses of some statuses ({', '.join(names)}), without the middleware."
    hint = f"Add {_MIDDLEWARE!r} to MIDDLEWARE: but for views under @ratequota, all requests count there."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W006")] if names else []


def check_rates(app_configs: Any = None, databases: Collection[str] | None = None, **_: Any) -> list[Any]:
    """W012, where the database is checked: policies have rates that this version cannot read."""
    from ..policies.unreadable import find_unreadable

    if policy_alias() not in (databases or ()):
        return []
    try:
        found = find_unreadable()
    except DatabaseError:  # not migrated yet
        return []
    hint = "Edit them, or let a newer version that wrote them take this one's place."
    return [checks.Warning(str(one), hint=hint, id="django_ratequota.W012") for one in found]


def check_plans(app_configs: Any = None, databases: Collection[str] | None = None, **_: Any) -> list[Any]:
    """W014, where the database is checked: callers for whom PLAN_RESOLVER raises may have no plan."""
    from ..models import Plan, RatePolicy

    if not conf.settings.plan_resolver or policy_alias(Plan) not in (databases or ()):
        return []
    try:
        if not RatePolicy.objects.exclude(plan=None).exists():
            return []
        missing = {"authenticated", "anonymous"}.difference(Plan.objects.values_list("default_for", flat=True))
    except DatabaseError:  # not migrated yet
        return []
    text = f"PLAN_RESOLVER decides the plan, and no plan is the default for {' and '.join(sorted(missing))} callers."
    hint = "Make a plan the default for them: it counts where PLAN_RESOLVER returns None or raises."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W014")] if missing else []


def check_round_trip(app_configs: Any = None, databases: Collection[str] | None = None, **_: Any) -> list[Any]:
    """W007, where a database is checked: TIMEOUT is shorter than three round trips to Redis."""
    if not databases:  # Django 5.2 calls it all the same
        return []
    settings = conf.read(getattr(django_settings, "RATEQUOTA", {}))[0]
    try:
        seconds = _round_trip(settings)
    except (ConfigurationError, StoreError):  # E002, or down, which is no error here
        return []
    if settings.timeout >= _TRIPS * seconds:
        return []
    enough = min(60.0, ceil(500 * seconds) / 100)
    text = f"A round trip to Redis takes {seconds * 1000:.1f} ms, too long for a TIMEOUT of {settings.timeout:g} s."
    hint = f"Set RATEQUOTA['TIMEOUT'] = {enough:g}, or use a Redis that is nearer."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W007")]


def check_constraints(app_configs: Any = None, databases: Collection[str] | None = None, **_: Any) -> list[Any]:
    """I001, where the database is checked: MySQL and MariaDB hold no constraints that have conditions."""
    from ..models import Plan, RatePolicy

    using = policy_alias(RatePolicy)
    names = [rule.name for model in (Plan, RatePolicy) for rule in unsupported_constraints(model, using)]
    if using not in (databases or ()) or not names:
        return []
    text = f"{connections[using].display_name} cannot hold some constraints of django-ratequota ({', '.join(names)})."
    hint = (
        "Each write is checked instead, but two writes at the same moment may store two policies for the same "
        "audience, endpoint and counted_per without dates (the highest id applies), or two default plans. "
        "PostgreSQL and SQLite refuse that. Django's models.W036 and models.W044 say the same of these constraints."
    )
    return [checks.Info(text, hint=hint, id="django_ratequota.I001")]


def _round_trip(settings: conf.Settings) -> float:
    """Return the median seconds of five commands on an open connection; raises ``StoreError``."""
    store = store_from_settings(replace(settings, timeout=_PATIENCE))
    command = ("MGET", revision_key(settings.prefix))
    try:
        store.execute(command)  # connects
        took = []
        for _ in range(5):
            begun = time.perf_counter()
            store.execute(command)
            took.append(time.perf_counter() - begun)
        return median(took)
    finally:
        store.close()


def check_middleware(app_configs: Any = None, **_: Any) -> list[checks.CheckMessage]:
    """W002: a setting of the middleware without it. W003: the middleware before the one that knows the user."""
    middleware = list(django_settings.MIDDLEWARE)
    asked = [name for name in ("ENFORCE_ALL", "COUNT_UNCHECKED") if getattr(conf.settings, name.lower())]
    if asked and _MIDDLEWARE not in middleware:
        hint = f"Add {_MIDDLEWARE!r} to MIDDLEWARE, after AuthenticationMiddleware."
        text = f"{asked[0]} does nothing without its middleware."
        return [checks.Warning(text, hint=hint, id="django_ratequota.W002")]
    if not conf.settings.enforce_all:
        return []
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
