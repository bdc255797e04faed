"""Faults: what the engine does when real servers and real networks fail. Waiting has one place: ``poll``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import redis
from django.db import OperationalError
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry


class Address:
    """Where something listens."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    def client(self, **options: Any) -> redis.Redis:
        """A client that asks once and waits 10 s; the caller closes it."""
        defaults = {"socket_timeout": 10, "socket_connect_timeout": 10, "retry": Retry(NoBackoff(), 0)}
        return redis.Redis(**{"host": self.host, "port": self.port, **defaults, **options})


def poll(condition: Callable[[], object], seconds: float, what: str) -> float:
    """Wait until the condition holds and return the seconds that took; fails, saying ``what``, after ``seconds``.

    A server that does not answer, or answers with an error, is one for which the condition does not hold yet. So is a
    table of SQLite that another thread writes to: it is locked, and in memory nobody waits for the lock.
    """
    begun = time.monotonic()
    while True:
        seen: object
        try:
            seen = condition()
        except (RedisError, OSError, OperationalError) as error:
            seen, last = None, f"{type(error).__name__}: {error}"
        else:
            last = repr(seen)
        took = time.monotonic() - begun
        if seen:
            return took
        if took > seconds:
            raise AssertionError(f"not within {seconds} s: {what} (last seen: {last})")
        time.sleep(0.01)  # between two looks; the deadline ends it
