"""How this process's decisions do, and what it reports to Redis about itself for ``ratequota status``."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from .background import Background
from .conf import settings
from .exceptions import ANSWERS, StoreError
from .histogram import BOUNDS, Histogram, merged, quantile
from .keys import workers_key
from .limiter import Limiter, default_limiter
from .locks import ForkSafeLock
from .scripts import REPORT
from .snapshot import policies
from .store import run_script
from .twin import drive

logger = logging.getLogger("django_ratequota")

#: Seconds that a report is worth reading; those of processes that ended go after it.
REPORT_TTL = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """One process at one moment."""

    #: host:pid
    process: str
    #: Unix time (s).
    at: float
    #: The revision of the policies it judges by, and their age in seconds; 0 before the first request.
    revision: int
    policies_age: float
    #: Decisions that ``on_error`` made, by reason, since the process began.
    degraded: dict[str, int]
    #: Servers whose breaker is open: name -> label of the failure that opened it.
    down: dict[str, str]
    #: Errors of the last minute that no breaker shows, as the server answers: reason -> message of the last one.
    errors: dict[str, str] = field(default_factory=dict)
    #: Decisions of the last minute by duration: one count for each of ``histogram.BOUNDS``, and those above.
    latency: list[int] = field(repr=False)
    #: Seconds since its last decision asked of Redis; None before the first.
    idle: float | None = None

    @property
    def decisions(self) -> int:
        """Decisions asked of Redis in the last minute."""
        return sum(self.latency)

    def latency_quantile(self, share: float) -> float | None:
        """Seconds that ``share`` (0.99, say) of the last minute's decisions did not exceed; None without any."""
        return quantile(self.latency, share)


_degraded: Counter[str] = Counter()
#: Reasons that open no breaker: the server answers, or was never asked.
NO_BREAKER = ANSWERS | {"configuration", "clock", "database", "uncovered", "rates"}
_MINUTE = 60.0
_MAX_MESSAGE = 300


@dataclass(slots=True)
class _Error:
    """The last failure of one reason that opens no breaker; times are monotonic seconds."""

    message: str
    seen_at: float
    logged_at: float


_errors: dict[str, _Error] = {}
_lock = ForkSafeLock()


def note_degraded(reason: str, error: Exception) -> None:
    """Count a decision that ``on_error`` made; log reasons that open no breaker, each once a minute."""
    with _lock:
        _degraded[reason] += 1
        logs = reason in NO_BREAKER and _remember(reason, str(error)[:_MAX_MESSAGE])
    if logs and reason == "database":
        logger.error("no policies from the database, on_error decides: %s", error)
    elif logs:
        logger.error("no decision by Redis (%s), on_error decides: %s", reason, error)


def note_problem(reason: str, text: str, error: Exception | None = None) -> None:
    """Keep what is wrong for ``Health.errors``, and log it once a minute; the decision is none of ``on_error``'s.

    The log shows the traceback of ``error``.
    """
    with _lock:
        logs = _remember(reason, text[:_MAX_MESSAGE])
    if logs:
        logger.error("%s", text, exc_info=error)


def _remember(reason: str, message: str) -> bool:
    """Keep the message for ``Health.errors``; returns whether it is time to log the reason again."""
    now, last = time.monotonic(), _errors.get(reason)
    logs = last is None or now >= last.logged_at + _MINUTE
    _errors[reason] = _Error(message, now, now if last is None or logs else last.logged_at)
    return logs


def _errors_now() -> dict[str, str]:
    with _lock:
        since = time.monotonic() - _MINUTE
        return {reason: error.message for reason, error in _errors.items() if error.seen_at > since}


def health() -> Health:
    """How this process does now. Asks nothing of Redis and never fails."""
    try:
        limiter: Limiter | None = default_limiter()
    except StoreError:
        limiter = None
    snapshot = policies.current()
    breakers = limiter.store.breakers if limiter else ()
    return Health(
        process=_process(),
        at=time.time(),
        revision=snapshot.revision if snapshot else 0,
        policies_age=time.time() - snapshot.loaded_at if snapshot else 0.0,
        degraded=dict(_degraded),
        down={breaker.server: breaker.reason for breaker in breakers if breaker.open},
        errors=_errors_now(),
        latency=limiter.latency.last_minute() if limiter else merged(()),
        idle=limiter.latency.idle() if limiter else None,
    )


def latency() -> Histogram:
    """The durations of this process's decisions since it began; raises ``StoreError`` without a usable setting."""
    return default_limiter().latency


def report() -> int:
    """Tell Redis how this process does; returns how many processes have told it lately. Raises ``StoreError``."""
    limiter, mine = default_limiter(), health()
    keys = [workers_key(limiter.prefix), workers_key(limiter.prefix, mine.process)]
    steps = run_script(REPORT, keys, (mine.process, json.dumps(asdict(mine)), REPORT_TTL))
    return int(drive(steps, limiter.store.call().do))


def reports() -> list[Health]:
    """What every process reported last, by name; raises ``StoreError``."""
    limiter = default_limiter()
    names: list[Any] = limiter.store.execute(("ZRANGE", workers_key(limiter.prefix), 0, -1))
    if not names:
        return []
    keys = [workers_key(limiter.prefix, name.decode()) for name in names]
    found = map(_read, limiter.store.execute(("MGET", *keys)))
    return sorted((one for one in found if one is not None), key=lambda one: one.process)


def _read(report: Any) -> Health | None:
    """The report; None for what is gone, or was written by another version while one takes the other's place."""
    try:
        read = Health(**json.loads(report))
    except (TypeError, ValueError):
        return None
    return read if len(read.latency) == len(BOUNDS) + 1 else None


def _process() -> str:
    host = re.sub(r"[^0-9A-Za-z_.-]", "-", socket.gethostname())[:64]
    return f"{host}:{os.getpid()}"


_reporting = Background("ratequota-report", lambda: settings.report_seconds, lambda: report())


def keep_reporting() -> None:
    """See to it that a thread reports every REPORT_SECONDS, in this process and by these settings."""
    _reporting.keep()


def _forget() -> None:
    # What the parent counted is the parent's.
    _degraded.clear()
    _errors.clear()


os.register_at_fork(after_in_child=_forget)
