"""Django REST framework's own throttles, atomic: ``from django_ratequota.compat.drf import UserRateThrottle``.

They subclass those in ``rest_framework.throttling``, with the same names, attributes and rates
(DEFAULT_THROTTLE_RATES), and count the same: a log of the requests admitted in the last period, here kept in Redis
and checked in one call. Of sixty requests at once, ``50/min`` admits fifty, not sixty.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Any

from django.core.cache import cache as default_cache
from rest_framework import throttling as drf
from rest_framework.throttling import BaseThrottle

from ..enforcement.on_error import without_store
from ..engine.decision import Decision, LimitRequest
from ..engine.keys import short
from ..engine.types import Bucket
from ..exceptions import StoreError
from ..monitoring.health import note_degraded
from ..throttling import StoreUnavailable
from ..utils.sansio import drive
from .limiters import counted_rate, limiter_of

__all__ = ["AnonRateThrottle", "BaseThrottle", "ScopedRateThrottle", "SimpleRateThrottle", "UserRateThrottle"]

#: µs added to ``timer``, because tests begin at 0, and the engine's clock must be above it.
_EPOCH_US = 10**15
_timer_us: ContextVar[int] = ContextVar("ratequota_timer_us")
_read_timer = _timer_us.get
_wall_clock = time.time


class SimpleRateThrottle(drf.SimpleRateThrottle):
    """DRF's, counted in Redis: override ``get_cache_key``, and all else that DRF's allows.

    ``cache`` is the Redis to count in, if it is not RATEQUOTA's. The clock is the server's unless ``timer`` is
    overridden. A subclass that overrides ``throttle_success`` decides what counts: it works as in DRF, in its cache
    and not atomically.
    """

    num_requests: int
    duration: float
    #: When the requests of the last period were admitted, newest first (seconds, by the clock of ``timer``).
    history: list[float]
    #: The engine's decision; None before it, and where DRF's own code decides.
    _decision: Decision | None = None

    def allow_request(self, request: Any, view: Any) -> bool:
        """Return whether the request is admitted; raises ``StoreUnavailable`` (503) where ON_ERROR is deny."""
        self._decision = None
        if type(self).throttle_success is not SimpleRateThrottle.throttle_success:
            return super().allow_request(request, view)
        if self.rate is None:
            return True
        self.key = self.get_cache_key(request, view)
        if self.key is None:
            return True
        self._decision = decision = self._decide(self.key)
        self.history = _history(decision, self.now, self.duration)
        if decision.denied_by:
            raise StoreUnavailable(decision)
        return self.throttle_success() if decision.allowed else self.throttle_failure()

    def throttle_success(self) -> bool:
        """Called when the request is admitted and counted."""
        # Without a decision, a subclass with its own allow_request has read the history from the cache.
        return super().throttle_success() if self._decision is None else True

    def wait(self) -> float | None:
        """Return the seconds until the same request would be admitted; None when waiting cannot help."""
        decision = self._decision
        if decision is None or decision.allowed or not decision.statuses:
            return super().wait()
        return decision.retry_after

    def _decide(self, key: object) -> Decision:
        clocked = self.timer is not _wall_clock
        self.now = self.timer()
        if self.num_requests < 1:
            return Decision(allowed=False)
        own = None if self.cache is default_cache else self.cache
        clock = _read_timer if clocked else None
        limiter = limiter_of(own, setting=f"{type(self).__name__}.cache", clock=clock)
        if limiter is None:
            return Decision(allowed=True)
        if clocked:
            _timer_us.set(round(self.now * 10**6) + _EPOCH_US)
        rate = counted_rate(self.num_requests, self.duration, "sliding_window_log")
        buckets = (Bucket(f"throttle:{short(str(key))}", rate),)
        try:
            decision = limiter.check(buckets)
        except StoreError as error:
            note_degraded(error.reason, error)
            request = LimitRequest(mode="check", buckets=buckets)
            return drive(without_store(request, error.reason), limiter.store.execute)
        if not clocked and decision.at_us:
            self.now = decision.at_us / 10**6
        return decision


def _history(decision: Decision, now: float, duration: float) -> list[float]:
    """Return the times of the requests that are counted (seconds); those between the first and the last are the last.

    The engine knows when the newest one expires, and when the oldest does, which is all that DRF computes with.
    """
    if not decision.statuses:
        return []
    status = decision.statuses[0]
    newest, oldest = (now - duration + seconds for seconds in (status.reset_after, status.next_after or 0.0))
    count = status.used + status.debt
    return [newest, *[oldest] * (count - 1)] if count else []


class AnonRateThrottle(drf.AnonRateThrottle, SimpleRateThrottle):
    """DRF's, counted in Redis: callers who are not logged in, by address."""


class UserRateThrottle(drf.UserRateThrottle, SimpleRateThrottle):
    """DRF's, counted in Redis: users by primary key, others by address."""


class ScopedRateThrottle(drf.ScopedRateThrottle, SimpleRateThrottle):
    """DRF's, counted in Redis: views by their ``throttle_scope``."""
