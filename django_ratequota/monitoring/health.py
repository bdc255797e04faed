"""The health of this process, and the reports of all processes in Redis, for ``ratequota status``."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from ..changes.publication import published_at
from ..conf import settings
from ..engine.keys import workers_key
from ..engine.scripts import REPORT
from ..engine.slots import ids
from ..exceptions import ANSWERS
from ..policies.cache import listeners, policies
from ..runtime import default_limiter, process
from ..store.base import Call, reading
from ..store.commands import ScriptCall
from ..utils import forks
from ..utils.histogram import BOUNDS
from ..utils.log import logger
from ..utils.problems import forget as forget_problems
from ..utils.problems import recent, remember
from .packing import made
from .records import digest
from .workers import database_worker, redis_worker

#: Seconds that Redis keeps a report; those of ended processes disappear after it.
REPORT_TTL = 60
#: Seconds by which a worker's clock may be ahead of another, plus those until it sees an edit (Redis Cluster).
_SLACK = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The state of one process at one moment."""

    #: host:pid
    process: str
    #: Unix time (s).
    at: float
    #: The revision of the policies in use, and their age in seconds; 0 before the first request.
    revision: int
    policies_age: float
    #: Decisions that ``on_error`` made, by reason, since the process began.
    degraded: dict[str, int]
    #: Servers whose breaker is open: name -> label of the failure that opened it.
    down: dict[str, str]
    #: Errors of the last minute that open no breaker, because the server replies: reason -> latest message.
    errors: dict[str, str] = field(default_factory=dict)
    #: Decisions of the last minute by duration: one count per bound of ``histogram.BOUNDS``, and one above these.
    latency: list[int] = field(repr=False)
    #: Seconds since its last decision by Redis; None before the first.
    idle: float | None = None
    #: Unix time (s): all durable counts that it noted before are in the database.
    written_until: float = field(default_factory=time.time)
    #: Units of rows that the database has refused since the process began: only its log has them.
    set_aside: int = 0
    #: A digest of its SECRET_KEY: other sites have others.
    site: str = ""
    #: Its number in the ids of the slots that its requests hold; 0 = an older version, which has none.
    number: int = 0

    @property
    def decisions(self) -> int:
        """Decisions by Redis in the last minute."""
        return sum(self.latency)

    @property
    def checkpoint_age(self) -> float:
        """Seconds for which its durable counts have waited to be written; 0 while none wait."""
        return max(self.at - self.written_until, 0.0)


_degraded: Counter[str] = Counter()
#: Reasons that open no breaker: the server replied, or no command was sent.
NO_BREAKER = ANSWERS | {"configuration", "clock", "database", "uncovered", "rates"}
_lock = forks.lock()
#: Whether this process has reported at all.
_has_reported = False


def note_degraded(reason: str, error: Exception) -> None:
    """Count a decision made by ``on_error``; log reasons that open no breaker, each once a minute."""
    with _lock:
        _degraded[reason] += 1
    if reason in NO_BREAKER and remember(reason, str(error)):
        missing = "policies from the database" if reason == "database" else f"decision by Redis ({reason})"
        logger.error("no %s, applying on_error: %s", missing, error)


def health() -> Health:
    """Return this process's state now. Sends nothing to Redis and never fails."""
    limiter, snapshot = process.limiter(), policies.current()
    return Health(
        process=process_name(),
        at=time.time(),
        revision=snapshot.revision if snapshot else 0,
        policies_age=time.time() - snapshot.loaded_at if snapshot else 0.0,
        degraded=dict(_degraded),
        down={breaker.server: breaker.reason for breaker in limiter.store.breakers if breaker.open},
        errors=recent(),
        latency=limiter.latency.last_minute(),
        idle=limiter.latency.idle(),
        written_until=process.ledger.written_until(),
        set_aside=process.ledger.set_aside,
        site=digest("site"),
        number=ids.number,
    )


def report() -> int:
    """Write this process's health to Redis; returns how many processes have done so lately. Raises ``StoreError``."""
    global _has_reported
    limiter, mine = default_limiter(), health()
    keys = [workers_key(limiter.prefix, name) for name in ("", mine.process)]
    args = (mine.process, json.dumps(asdict(mine)), REPORT_TTL)
    processes = Call(limiter.store).do(ScriptCall(REPORT, keys, args))
    _has_reported = True
    return int(processes)


def wait_until_written(seconds: float) -> tuple[list[Health], list[Health]]:
    """Wait until the database has all durable counts of every process, at most so long.

    Returns the processes that reported, and those of them that have not written. Raises ``StoreError``.
    """
    began_at, deadline = time.time() + _SLACK, time.monotonic() + seconds
    while True:
        workers = reports()
        waiting = [worker for worker in workers if worker.written_until < began_at]
        if not waiting or time.monotonic() >= deadline:
            return workers, waiting
        time.sleep(0.1)


@reading()
def reports() -> list[Health]:
    """Return the last report of every process, by name; raises ``StoreError``."""
    limiter = default_limiter()
    names: list[Any] = limiter.store.execute(("ZRANGE", workers_key(limiter.prefix), 0, -1))
    if not names:
        return []
    keys = [workers_key(limiter.prefix, name.decode()) for name in names]
    found = map(_read, limiter.store.execute(("MGET", *keys)))
    return sorted((worker for worker in found if worker is not None), key=lambda worker: worker.process)


def state_of(worker: Health, revision: int) -> str:
    """Return live, idle, behind, fresh or silent.

    An idle worker has an older revision, but has decided nothing since ``revision`` was published.
    """
    if time.time() - worker.at > 10 + 3 * settings.statistics_seconds:
        return "silent"
    if not worker.revision:
        return "fresh"
    # A newer revision than Redis': Redis lost data, and the next decision stores the revision again.
    if worker.revision >= revision:
        return "live"
    if worker.idle is None:
        return "idle"
    published, decided_at = published_at(revision), worker.at - worker.idle
    decided = worker.decisions > 0 if published is None else decided_at > published.timestamp() + _SLACK
    return "behind" if decided else "idle"


def has_late_checkpoint(worker: Health) -> bool:
    """Whether several writes of durable counts in a row have failed, or take too long."""
    return bool(worker.checkpoint_age > 10 + 3 * settings.checkpoint_seconds)


def is_of_another_site(worker: Health) -> bool:
    """Whether the process has another SECRET_KEY, and so perhaps its own policies for the same counters."""
    return worker.site not in ("", digest("site"))


def _read(report: Any) -> Health | None:
    """Return the report; None when it is gone, or was written by another version during a deployment."""
    try:
        read = made(Health, json.loads(report))
        return read if len(read.latency) == len(BOUNDS) + 1 else None
    except (AttributeError, TypeError, ValueError):
        return None


def process_name() -> str:
    """Return this process's name: host:pid."""
    host = re.sub(r"[^0-9A-Za-z_.-]", "-", socket.gethostname())[:64]
    return f"{host}:{os.getpid()}"


@forks.after_fork
def forget() -> None:
    """Begin as in a process that just started: the counts and the report are those of another one."""
    global _has_reported
    _has_reported = False
    _degraded.clear()
    forget_problems()


def leave() -> None:
    """Take the report back at a clean exit, so that ``ratequota checkpoint`` waits only for processes that run.

    Raises ``StoreError``.
    """
    if _has_reported and database_worker.wait() and not process.ledger.waits():
        limiter = default_limiter()
        Call(limiter.store).do(("DEL", workers_key(limiter.prefix, process_name())))


def _seconds() -> float:
    return 0.0 if settings.in_memory or not settings.enabled else settings.statistics_seconds


reporting = redis_worker.add("report", _seconds, report, last=leave)
# At once after a load: the last report names a revision that no longer applies.
listeners.append(reporting.soon)
