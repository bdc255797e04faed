"""Composes the scripts that Redis runs from ``lua/*.lua``."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from ..store.commands import Script
from .rates import ALGORITHMS, CONCURRENT

#: Files that are branches of one function: the algorithms, the calendar windows of ``fixed_window``, and the queue of
#: ``leaky_bucket``.
_BRANCHES = ("calendar_window", "queue", *ALGORITHMS, CONCURRENT)


def _compose(*names: str, flags: str = "") -> Script:
    """Join files; the algorithms' become the branches of one function, ``algorithm(name)``.

    ``flags`` are appended to the first file's ``#!lua`` line.
    """
    source: list[str] = []
    folder = Path(__file__).parent.parent / "lua"
    for name in names:
        body = (folder / f"{name}.lua").read_text().rstrip().splitlines()
        if name in _BRANCHES:
            begins = "local function algorithm(name) " if name == _BRANCHES[0] else ""
            body[0] = f"{begins}if name == '{name}' then {body[0]}"
            body[-1] += " end" + " end" * (name == _BRANCHES[-1])
        source += body
    source[0] += flags
    text = "\n".join(source) + "\n"
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


#: Decides about any number of buckets: check, peek, charge, refund, acquire.
DECIDE = _compose("prelude", *_BRANCHES, "driver")
#: Replays attempts by the same algorithms in memory: it reads and writes no key, so it runs on a full server too.
REPLAY = _compose("prelude", "memory", *_BRANCHES, "replay", flags=" flags=no-writes")
#: Stores a new revision of the policies.
PUBLISH = _compose("publish")
#: Prolongs the leases of slots.
RENEW = _compose("prelude", "slots", "renew")
#: Releases slots.
RELEASE = _compose("prelude", "slots", "release")
#: Raises counters of calendar windows to the ledger's totals.
RAISE = _compose("raise")
#: Stores a process's report on itself.
REPORT = _compose("report")
#: Adds a process's counts to the statistics.
COLLECT = _compose("collect")
#: Returns parts of the statistics as one text.
READ_PAIRS = _compose("read_pairs", flags=" flags=no-writes")
#: Returns some of the keys that match a pattern.
SCAN = _compose("scan", flags=" flags=no-writes")
#: Deletes some of the keys that match a pattern.
PURGE = _compose("purge", flags=" flags=allow-oom,allow-cross-slot-keys")
#: Returns the commands that the caller's ACL forbids.
FORBIDDEN = _compose("forbidden_commands")


def commands() -> list[str]:
    """Return the commands that the scripts call, and those that are sent without a script."""
    sources = "".join(script.source for script in (DECIDE, RENEW, RELEASE, PUBLISH, RAISE, REPORT, COLLECT))
    called = re.findall(r"\bp?call\('([A-Z]+)'", sources)
    return sorted({*called, "DEL", "HGETALL", "HMGET", "LRANGE", "MGET", "SET", "ZRANGE"})
