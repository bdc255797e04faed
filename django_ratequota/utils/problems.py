"""Problems that Redis did not cause, such as a failing identifier: logged, and shown in ``health`` for a minute."""

from __future__ import annotations

import time
from typing import NamedTuple

from . import forks
from .escaping import one_line
from .log import logger

_MINUTE = 60.0
_MAX_MESSAGE = 300


class _Problem(NamedTuple):
    """The last message of one reason; times are monotonic seconds."""

    message: str
    seen_at: float
    logged_at: float


_problems: dict[str, _Problem] = {}
_lock = forks.lock()


def note_problem(reason: str, text: str, error: Exception | None = None) -> None:
    """Keep the problem for ``Health.errors``, and log it once a minute, with the traceback of ``error``.

    Reasons are names from the code or the settings, so that no client can add one. The text may hold what a client
    sent, and is escaped.
    """
    if remember(reason, text):
        logger.error("%s", text, exc_info=error)


def remember(reason: str, message: str) -> bool:
    """Keep the message for ``recent``; returns whether the reason is to be logged, once a minute."""
    with _lock:
        now, last = time.monotonic(), _problems.get(reason)
        logs = last is None or now >= last.logged_at + _MINUTE
        logged_at = now if last is None or logs else last.logged_at
        _problems[reason] = _Problem(one_line(message)[:_MAX_MESSAGE], now, logged_at)
    return logs


def recent() -> dict[str, str]:
    """Return the problems of the last minute: reason -> its last message."""
    with _lock:
        since = time.monotonic() - _MINUTE
        return {reason: problem.message for reason, problem in _problems.items() if problem.seen_at > since}


def forget() -> None:
    """Forget all problems."""
    _problems.clear()
