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

from ..enforcement.on_error import decide_without_store
from ..engine.decision import Decision, LimitRequest
from ..engine.keys import bucket_key, short
from ..engine.limiter import Limiter
from ..engine.types import Bucket
from ..exceptions import StoreError
from ..monitoring.health import note_degraded
from ..store.base import Call
from ..throttling import StoreUnavailable
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
    #: The engine's decision; None before it, and where DRF's own code decides.
    _decision: Decision | None = None
    _limiter: Limiter | None = None
    _history: list[float] | None = None

    def allow_request(self, request: Any, view: Any) -> bool:
        """Return whether the request is admitted; raises ``StoreUnavailable`` (503) where ON_ERROR is deny."""
        self._decision = self._history = None
        if type(self).throttle_success is not SimpleRateThrottle.throttle_success:
            return super().allow_request(request, view)
        if self.rate is None:
            return True
        self.key = self.get_cache_key(request, view)
        if self.key is None:
            return True
        self._decision = decision = self._decide(self.key)
        if decision.denied_by:
            raise StoreUnavailable(decision)
        return self.throttle_success() if decision.allowed else self.throttle_failure()

    def throttle_success(self) -> bool:
        """Called when the request is admitted and counted."""
        # Without a decision, a subclass with its own allow_request has read the history from the cache.
        return super().throttle_success() if self._decision is None else True

    def wait(self) -> float | None:
        """Return the seconds until the same request would be admitted; None when waiting cannot help."""
        if self._decision is None or self._decision.allowed or self._history is not None:
            return super().wait()
        return self._decision.retry_after

    @property
    def history(self) -> list[float]:
        """Times at which requests of the last period were admitted, newest first (seconds, by ``timer``'s clock).

        Read from Redis on first access, unless it was assigned.
        """
        if self._history is None:
            self._history = self._read_log()
        return self._history

    @history.setter
    def history(self, times: list[float]) -> None:
        self._history = times

    def _decide(self, key: object) -> Decision:
        clocked = self.timer is not _wall_clock
        self.now = self.timer()
        if self.num_requests < 1:
            self._history = []
            return Decision(allowed=False)
        own = None if self.cache is default_cache else self.cache
        clock = _read_timer if clocked else None
        self._limiter = limiter_of(own, setting=f"{type(self).__name__}.cache", clock=clock)
        if self._limiter is None:
            return Decision(allowed=True)
        if clocked:
            _timer_us.set(round(self.now * 10**6) + _EPOCH_US)
        rate = counted_rate(self.num_requests, self.duration, "sliding_window_log")
        buckets = (Bucket(f"throttle:{short(str(key))}", rate),)
        try:
            decision = self._limiter.check(buckets)
        except StoreError as error:
            note_degraded(error.reason, error)
            return decide_without_store(LimitRequest(mode="check", buckets=buckets), error.reason)
        if not clocked and decision.at_us:
            self.now = decision.at_us / 10**6
        return decision

    def _read_log(self) -> list[float]:
        decision, limiter = self._decision, self._limiter
        if decision is None or limiter is None or not decision.at_us:
            return []
        bucket = decision.statuses[0].bucket
        try:
            log = Call(limiter.store).do(("LRANGE", bucket_key(limiter.prefix, bucket), "0", "-1"))
        except StoreError as error:
            note_degraded(error.reason, error)
            return []
        epoch_us = 0 if self.timer is _wall_clock else _EPOCH_US
        numbers = [float(text) for text in log]
        # Pairs of a time and the number admitted up to it: see lua/sliding_window_log.lua.
        times: list[float] = []
        before = 0.0
        for time_us, total in zip(numbers[::2], numbers[1::2], strict=True):
            if time_us > decision.at_us - bucket.rate.period_us:
                times += [(time_us - epoch_us) / 10**6] * int(total - before)
            before = total
        return times[::-1]


class AnonRateThrottle(drf.AnonRateThrottle, SimpleRateThrottle):
    """DRF's, counted in Redis: callers who are not logged in, by address."""


class UserRateThrottle(drf.UserRateThrottle, SimpleRateThrottle):
    """DRF's, counted in Redis: users by primary key, others by address."""


class ScopedRateThrottle(drf.ScopedRateThrottle, SimpleRateThrottle):
    """DRF's, counted in Redis: views by their ``throttle_scope``."""
