"""The scene of a part of a test: its policies, its clock and its counters.

A ``Scene`` has the attributes of ``runtime.process``. When the first scene is entered, each of these becomes an
object that dispatches to the scene in force, and outside of scenes to the object that it replaced. The project's own
limiters are dispatched likewise, unless they were made with ``client=``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from copy import copy
from datetime import tzinfo
from functools import wraps
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction

from .. import monitoring
from ..conf import settings
from ..engine.decision import Decision, LimitRequest, Steps
from ..engine.keys import revision_key
from ..engine.limiter import Limiter
from ..engine.memory import LocalLimiter
from ..engine.types import Bucket
from ..exceptions import StoreError
from ..monitoring.alerts import crossings, digest
from ..monitoring.collector import Collector
from ..policies.cache import PolicyCache
from ..runtime import NoRedis, OncePerSettings, limiter_options, process
from .clock import Clock
from .policy_snapshot import FixedPolicies

#: Seconds that a decision may take, at least: the machine that tests may be busy.
_MIN_TIMEOUT = 5.0


class Scene:
    """Policies, a clock and counters, in force from ``enter`` to ``leave``."""

    def __init__(self, policies: PolicyCache, clock: Clock | None) -> None:
        #: The engine's clock.
        self.clock = clock or Clock()
        self.policies = policies
        #: Records a decision and returns the id of a refusal, as in production; no thread sends the counts to Redis.
        self.record = Collector().record
        self._name = secrets.token_hex(5)
        #: By the settings, which tests override, name, time zone and clock.
        self._limiters: dict[object, SceneLimiter] = {}
        self.limiter = OncePerSettings(lambda: self._find(self._name, settings.time_zone, self.clock), NoRedis)
        self.local_limiter = OncePerSettings(
            lambda: LocalLimiter(settings.local_share, settings.time_zone, self.clock)
        )
        #: A crossing's name -> time (µs) until which ``quota_threshold`` is not sent again.
        self._sent_until: dict[tuple[object, ...], int] = {}

    def reset(self) -> None:
        """Forget everything that was counted."""
        for made in list(self._limiters.values()):
            made.forget_keys()
        self.local_limiter.forget()
        self._sent_until.clear()

    @property
    def entered(self) -> bool:
        """Whether this context has entered the scene."""
        return self in _own.get()

    def observe(self, decision: Decision, cost: int) -> None:
        """Send ``quota_threshold`` at once: a test does not wait for a thread."""
        for crossing in crossings(decision, cost):
            if self._sent_until.get(crossing.name, 0) <= crossing.at_us:
                self._sent_until[crossing.name] = crossing.at_us + crossing.sent_for_us
                crossing.send()

    def enter(self, all_threads: bool) -> None:
        """Put it in force in this context, or in all threads of the process."""
        _install()
        _own.set((*_own.get(), self))
        if all_threads:
            _shared.append(self)

    def leave(self) -> None:
        """Put it out of force, delete its keys in Redis, and hang up."""
        _own.set(tuple(scene for scene in _own.get() if scene is not self))
        if self in _shared:
            _shared.remove(self)
        self.reset()
        for made in list(self._limiters.values()):
            made.store.close()  # now: the collector may end sockets first, and warn of them

    def acting(self, own: Limiter) -> Limiter:
        """Return the limiter that acts for one of the project's own: with fresh counters and the scene's clock."""
        if own.unlimited:
            return own
        same = own.prefix == settings.prefix
        name = self._name if same else digest(self._name, own.prefix)[: len(self._name)]
        return self._find(name, own.time_zone, own.clock or self.clock)

    def _find(self, name: str, zone: tzinfo, clock: Callable[[], int]) -> Limiter:
        key = settings.generation, name, zone, clock
        if key not in self._limiters:
            fixed = isinstance(self.policies, FixedPolicies)
            self._limiters.setdefault(key, SceneLimiter(name, zone, clock, fixed=fixed))
        return self._limiters[key]


class SceneLimiter(Limiter):
    """A limiter on the settings' server, with keys that no other scene, process or test run has."""

    def __init__(self, name: str, zone: tzinfo, clock: Callable[[], int], *, fixed: bool) -> None:
        # An ACL may demand that keys begin with the project's prefix. 16 characters are the most.
        # By limiter_options, because a test's own policies are enforced although ENABLED may be False.
        own = {"prefix": f"{settings.prefix[:5]}:{name}", "time_zone": zone, "clock": clock}
        options = limiter_options() | own | {"deny_cache_seconds": 0.0}
        options["store"].timeout = max(options["store"].timeout, _MIN_TIMEOUT)
        self.open(**options)
        self._fixed = fixed
        #: One of each counter.
        self._buckets: dict[object, Bucket] = {}
        # Whether Redis may hold one of its keys.
        self._used = False

    def publish(self) -> int:
        """Publish outside of the scene too: a commit in a test is a commit."""
        self._used = True
        _outside.limiter().publish()
        return super().publish()

    def ask(self, request: LimitRequest) -> Steps:
        """Return the steps of a verb, noting its buckets."""
        if self._fixed and not request.buckets:  # nothing can be published, so it needs no Redis
            return Decision(allowed=True, revision=request.revision or 0, settler=request.settler)
        self._buckets |= {bucket.counter: bucket for bucket in request.buckets}
        self._used = True
        return (yield from super().ask(request))

    def forget_keys(self) -> None:
        """Delete its keys; if Redis fails, they expire by themselves, as do windows that the clock has left."""
        buckets, used = self._buckets, self._used and not self.store.absent
        self._buckets, self._used = {}, False
        with suppress(StoreError):
            self.reset(buckets.values())
            if used:
                self.store.execute(("DEL", revision_key(self.prefix)))


#: The scenes entered in this context; the last one is in force. Async code and the threads of asgiref inherit them.
_own: ContextVar[tuple[Scene, ...]] = ContextVar("ratequota_scenes", default=())
#: The scenes of all threads, in force in contexts that have entered none.
_shared: list[Scene] = []


def current_scene() -> Scene | None:
    """Return the scene in force; None outside of scenes."""
    own = _own.get()
    return own[-1] if own else _shared[-1] if _shared else None


class _PerScene:
    """An attribute of ``process``: the scene's own, or outside of scenes the process's own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any) -> Any:
        return self._find()(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._find(), name)

    def _find(self) -> Any:
        return getattr(current_scene() or _outside, self._name)


#: What decides outside of scenes.
_outside = copy(process)


def _install() -> None:
    monitoring.writes_rows = False
    for name in ("limiter", "local_limiter", "observe", "policies", "record"):
        if not isinstance(getattr(process, name), _PerScene):
            setattr(process, name, _PerScene(name))
    for name in ("decide", "adecide", "reset", "areset", "slots"):
        verb = getattr(Limiter, name)
        if not hasattr(verb, "__wrapped__"):
            setattr(Limiter, name, _by_scene(verb))


def _by_scene(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Return the verb of a limiter, which the scene's carries out where the settings made it."""

    @wraps(verb)
    def act(own: Limiter, *args: Any) -> Any:
        scene = current_scene() if own.by_settings else None
        return verb(own if scene is None else scene.acting(own), *args)

    return markcoroutinefunction(act) if iscoroutinefunction(verb) else act
