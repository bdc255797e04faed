"""Turns the errors of redis-py and of the server into ``StoreError``."""

from __future__ import annotations

import redis

from ..exceptions import StoreError
from .commands import Command, ScriptCall

#: Prefixes of error replies that become reasons, in lower case; other error replies have the reason "response".
_PREFIXES = frozenset(
    "ASK BUSY CLUSTERDOWN CROSSSLOT LOADING MASTERDOWN MISCONF MOVED NOAUTH NOPERM NOREPLICAS NOSCRIPT OOM "
    "READONLY TRYAGAIN UNKILLABLE WRONGPASS WRONGTYPE".split()
)
#: Error replies without a prefix when the user may not run a command that a script calls: Redis 7.0, then later ones.
_DENIED_IN_SCRIPT = ("The user executing the script can't run this command", "ACL failure in script")
#: The error reply to a client that is not logged in, when its command has more than ten arguments.
_UNAUTHENTICATED = "Protocol error: unauthenticated"
#: redis-py removes the prefix from these errors. Subclasses come before their base classes.
_REASONS: dict[type[Exception], str] = {
    redis.exceptions.MovedError: "moved",
    redis.exceptions.AskError: "ask",
    redis.exceptions.MasterDownError: "masterdown",
    redis.exceptions.ClusterDownError: "clusterdown",
    redis.exceptions.TryAgainError: "tryagain",
    redis.exceptions.ClusterCrossSlotError: "crossslot",
    redis.exceptions.BusyLoadingError: "loading",
    redis.exceptions.ReadOnlyError: "readonly",
    redis.exceptions.NoScriptError: "noscript",
    redis.exceptions.NoPermissionError: "noperm",
    redis.exceptions.AuthenticationError: "noauth",
    redis.exceptions.OutOfMemoryError: "oom",
}


def store_error(error: Exception, command: Command = ()) -> StoreError:
    """Return the ``StoreError`` for an error of redis-py; its class or the server's prefix is the reason.

    The message of an error in a script names the Lua file and line.
    """
    message = f"{type(error).__name__}: {error}"
    if isinstance(command, ScriptCall):
        message = command.script.locate(message)
    if isinstance(error, redis.exceptions.TimeoutError | TimeoutError):
        return StoreError("timeout", message)
    for kind, reason in _REASONS.items():
        if isinstance(error, kind):
            return StoreError(reason, message)
    if str(error).startswith(_DENIED_IN_SCRIPT):
        return StoreError("noperm", message)
    if str(error).startswith(_UNAUTHENTICATED):
        return StoreError("noauth", message)
    prefix = str(error).partition(" ")[0]
    if prefix in _PREFIXES:
        return StoreError(prefix.lower(), message)
    if isinstance(error, redis.exceptions.ConnectionError | OSError):
        return StoreError("connection", message)
    return StoreError("response", message)
