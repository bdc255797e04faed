"""Delete what this app has stored in Redis."""

from __future__ import annotations

from ..engine.keys import own_keys, revision_key
from ..engine.limiter import Limiter
from ..engine.scripts import PURGE
from ..store.commands import ScriptCall

#: Keys that a step looks at; it keeps the server busy for a few milliseconds.
_STEP = 1_000


def purge(limiter: Limiter) -> int:
    """Delete every key of the limiter's prefix on each server that decides, and return how many there were.

    Keys of a longer prefix, such as ``rq:b`` beside ``rq``, stay, and so do keys of other databases. Each step is a
    call of its own; raises ``StoreError`` at the first that fails, and may be repeated.
    """
    store, deleted = limiter.store, 0
    for server in store.info():
        cursor = "0"
        while True:
            call = ScriptCall(PURGE, [], (cursor, own_keys(limiter.prefix), _STEP))
            found, some = store.execute_on(server, call)
            deleted += some
            if (cursor := found.decode()) == "0":
                break
    return deleted + int(store.execute(("DEL", revision_key(limiter.prefix))))
