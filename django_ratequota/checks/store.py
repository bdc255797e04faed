"""System checks of Redis: whether it can be reached and used, and whether it keeps the counters."""

from __future__ import annotations

import re
import sys
from typing import Any

from django.conf import settings as django_settings
from django.core import checks

from .. import conf
from ..engine.keys import bucket_key
from ..engine.rates import Rate
from ..engine.scripts import FORBIDDEN, commands
from ..engine.types import Bucket
from ..exceptions import StoreError
from ..runtime import NoRedis, default_limiter, process
from ..store.base import Call, server_version
from ..store.commands import ScriptCall

#: The oldest servers whose scripts may carry a shebang, so that a full memory refuses them before they write.
_OLDEST = {"valkey": (7, 2), "redis": (7, 0)}


def check_store(**_: Any) -> list[checks.CheckMessage]:
    """E002 (W019 under DEBUG): no Redis is configured. E003: a server is too old. E004: CLUSTER does not match it.

    E005: the Redis user may not run commands that the scripts call. E006: Redis refuses the login or the database.
    E007: the server is not Redis. W004: a server may evict counters. W008: Redis
    cannot be reached: only a warning, as requests go on without it too. All its commands together take ``TIMEOUT`` at
    most, and write nothing.
    """
    if not conf.settings.enabled or conf.settings.in_memory:
        return []
    limiter = process.limiter()
    if isinstance(limiter, NoRedis):
        return [_unconfigured(limiter.problem)]
    store, call = limiter.store, Call(limiter.store, always=True)
    try:
        servers = store.info(call)
    except StoreError as error:
        if "cluster support disabled" in str(error):
            return [_cluster_error("CLUSTER is True, but the server is not a node of a Cluster.", "False")]
        return _forbidden(call) if error.reason == "noperm" else _unusable(error)
    messages: list[checks.CheckMessage] = []
    for server, info in servers.items():
        name, version = server_version(info)
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST[name]:
            needed = " or ".join(f"{kind} {'.'.join(map(str, least))}" for kind, least in sorted(_OLDEST.items()))
            text = f"The server at {server} is {name} {version}, which is too old for django-ratequota."
            hint = f"Upgrade it to {needed} or later."
            messages.append(checks.Error(text, hint=hint, id="django_ratequota.E003"))
        # Redis says redis_mode, Valkey server_mode.
        if "cluster" in (info.get("redis_mode"), info.get("server_mode")) and not store.clustered:
            messages.append(_cluster_error(f"The server at {server} is a node of a Cluster.", "True"))
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            text = f"The server at {server} evicts keys when its memory is full ({policy}), which resets counters."
            hint = "Set maxmemory-policy to noeviction or give django-ratequota its own server."
            messages.append(checks.Warning(text, hint=hint, id="django_ratequota.W004"))
    return [*messages, *_forbidden(call)]


def _unconfigured(problem: str) -> checks.CheckMessage:
    """Return E002, or W019 where a project that is being developed may have no Redis yet."""
    hint = (
        "Set RATEQUOTA['CACHE'] to a django-redis alias, or RATEQUOTA['REDIS_URL'] to a URL that begins with "
        "redis://, rediss://, unix:// or redis+sentinel://. To run without Redis, set RATEQUOTA['REDIS_URL'] = "
        "'memory://' (each worker counts on its own) or RATEQUOTA['ENABLED'] = False (limits are not enforced)."
    )
    if conf.settings.redis_url or not _debugging():
        return checks.Error(problem, hint=hint, id="django_ratequota.E002")
    problem = problem.rstrip(".")
    text = f"Limits need Redis, but none is configured. {problem}. Each policy's on_error applies until then."
    return checks.Warning(text, hint=hint, id="django_ratequota.W019")


def _debugging() -> bool:
    """Return whether DEBUG is True, or was before a test runner set it to False for its run."""
    state = getattr(sys.modules.get("django.test.utils"), "_TestState", None)
    return bool(django_settings.DEBUG or getattr(getattr(state, "saved_data", None), "debug", False))


def check_enabled(**_: Any) -> list[checks.CheckMessage]:
    """W020: enforcement is off."""
    if conf.settings.enabled:
        return []
    text = "Limits are not enforced, because RATEQUOTA['ENABLED'] is False."
    hint = "Remove the key or set it to True to enforce policies."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W020")]


def check_memory(**_: Any) -> list[checks.CheckMessage]:
    """W021, with --deploy: each process counts on its own."""
    if not conf.settings.enabled or not conf.settings.in_memory:
        return []
    text = "RATEQUOTA['REDIS_URL'] is memory://, so each worker counts on its own and a restart resets all counters."
    hint = "Set it to a Redis URL unless the project has only one worker."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W021")]


def _unusable(error: StoreError) -> list[checks.CheckMessage]:
    import redis  # in startup it would take 0.1 s

    text = str(error).rstrip(".")
    causes: list[BaseException | None] = [error.__cause__]
    while causes[-1] is not None:
        causes.append(causes[-1].__cause__)
    if any(isinstance(cause, redis.InvalidResponse) for cause in causes):
        hint = "Enter the host and port of a Redis server. For TLS, use a rediss:// URL."
        return [checks.Error(f"The server is not Redis: {text}.", hint=hint, id="django_ratequota.E007")]
    # An error reply during the login, such as "no such database", fails the connection.
    if error.reason == "noauth" or (
        error.reason == "connection" and any(type(cause) is redis.ResponseError for cause in causes)
    ):
        what = "has no database with that number" if "DB index" in text else "refuses the login"
        hint = "Correct the user, password and database number in the CACHES alias or in RATEQUOTA['REDIS_URL']."
        return [checks.Error(f"Redis {what}: {text}.", hint=hint, id="django_ratequota.E006")]
    if sys.argv[1:2] == ["ratequota"]:  # whose verb will say so, if it needs Redis
        return []
    hint = "Start it or correct its address. Each policy's on_error applies until then."
    return [checks.Warning(f"Redis cannot be reached: {text}.", hint=hint, id="django_ratequota.W008")]


def _forbidden(call: Call) -> list[checks.CheckMessage]:
    limiter = default_limiter()
    try:
        key = bucket_key(limiter.prefix, Bucket("user:0", Rate.parse("1/s")))
        forbidden = call.do(ScriptCall(FORBIDDEN, [key], commands()))
    except StoreError as error:
        if error.reason != "noperm":
            return []
        forbidden = [b"EVAL", b"EVALSHA"]
    names = ", ".join(name.decode() for name in forbidden)
    what = f"on keys that begin with {limiter.prefix}. Checks or admin pages would fail."
    text = f"The Redis user may not run {names} {what}"
    hint = "Give the user the ACL in docs/redis.md."
    return [checks.Error(text, hint=hint, id="django_ratequota.E005")] if forbidden else []


def _cluster_error(text: str, right: str) -> checks.CheckMessage:
    hint = f"Set RATEQUOTA['CLUSTER'] = {right}."
    return checks.Error(text, hint=hint, id="django_ratequota.E004")


def check_exposed(**_: Any) -> list[checks.CheckMessage]:
    """W005, with --deploy: anybody on the network may read and reset every counter."""
    try:
        exposed = default_limiter().store.exposed
    except StoreError:  # reported by E002
        return []
    hint = "Give Redis a password (ACL users, see docs/redis.md) and add it to the alias or REDIS_URL."
    text = "Redis is reached over the network without a password."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W005")] if exposed else []
