"""What decides during a part of a test: policies, a clock and counters of its own.

Three names that every decision goes through are replaced on first use, by what looks for a scene and, finding none,
does what was there before: ``limiter._made`` (the default limiter), and ``policies`` and ``note`` of ``enforcement``.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from contextvars import ContextVar
from functools import partial
from typing import Any

from .. import enforcement, limiter
from ..collecting import Collector
from ..conf import OncePerSettings, settings
from ..connect import store_of_settings
from ..exceptions import StoreError
from ..keys import bucket_key, revision_key
from ..limiter import Limiter
from ..snapshot import Policies
from ..store import Store
from ..types import Bucket
from .clock import Clock
from .given import FixedPolicies

#: Keys of one command; far more than a test has.
_TOGETHER = 500
#: Seconds that a decision may take.
_PATIENCE = 5.0


class Scene:
    """Policies, clock and counters; in force from ``enter`` to ``leave``."""

    def __init__(self, policies: Policies | FixedPolicies, clock: Clock | None) -> None:
        #: What the engine takes for the time.
        self.clock = clock or Clock()
        self.policies = policies
        #: Refusals have ids, as in production; no thread hands over what is counted here.
        self.collector = Collector()
        self._limiters: list[SceneLimiter] = []
        # Another one where a test overrides the settings meanwhile.
        self.limiter = OncePerSettings(self._make_limiter)

    def reset(self) -> None:
        """Forget all that was counted."""
        for one in self._limiters:
            one.forget_keys()

    @property
    def entered(self) -> bool:
        """Whether this context has entered it."""
        return self in _own.get()

    def enter(self, all_threads: bool) -> None:
        """Be in force in this context, or in all threads of the process."""
        _install()
        _own.set((*_own.get(), self))
        if all_threads:
            _shared.append(self)

    def leave(self) -> None:
        """Be in force no more, and leave nothing in Redis."""
        _own.set(tuple(scene for scene in _own.get() if scene is not self))
        if self in _shared:
            _shared.remove(self)
        self.reset()

    def _make_limiter(self) -> SceneLimiter:
        made = SceneLimiter(self.clock, fixed=isinstance(self.policies, FixedPolicies))
        self._limiters.append(made)
        return made


class SceneLimiter(Limiter):
    """The default limiter's server, with keys that no other scene, process or test run has."""

    def __init__(self, clock: Clock, *, fixed: bool) -> None:
        # It begins with the project's prefix, which an ACL may demand. 16 characters are the most.
        super().__init__(clock=clock, prefix=f"{settings.prefix[:5]}:{secrets.token_hex(5)}", deny_cache_seconds=0)
        self.store = _store()  # on connections that are open already
        self._buckets: set[Bucket] = set()
        if fixed:  # nothing can be published: requests without limits need no Redis
            self._look_seconds = float("inf")

    def publish(self) -> int:
        """Tell those outside the scene too: what is committed in a test is committed."""
        _limiters.real().publish()
        return super().publish()

    def _begin(self, mode: str, buckets: Iterable[Bucket], *args: Any) -> Any:
        buckets = tuple(buckets)
        self._buckets.update(buckets)
        return super()._begin(mode, buckets, *args)

    def forget_keys(self) -> None:
        """Delete all that was counted; what Redis does not delete now goes when its time is over."""
        keys = [*{bucket_key(self.prefix, bucket) for bucket in self._buckets}, revision_key(self.prefix)]
        used, self._buckets = bool(self._buckets), set()
        size = 1 if self.store.clustered else _TOGETHER
        try:
            for start in range(0, len(keys) if used else 0, size):
                self.store.execute(("DEL", *keys[start : start + size]))
        except StoreError:
            pass


#: The scenes entered in this context, the last one counts; async code and the threads of asgiref inherit them.
_own: ContextVar[tuple[Scene, ...]] = ContextVar("ratequota_scenes", default=())
#: Those in force where this context has none.
_shared: list[Scene] = []


def current_scene() -> Scene | None:
    """The scene in force; None outside of any."""
    own = _own.get()
    return own[-1] if own else _shared[-1] if _shared else None


class _Limiters:
    """In place of ``limiter._made``."""

    def __init__(self) -> None:
        self.real: Any = limiter._made

    def __call__(self) -> Limiter:
        scene = current_scene()
        found: Limiter = scene.limiter() if scene else self.real()
        return found

    def forget(self) -> None:
        self.real.forget()


class _Policies:
    """In place of ``enforcement.policies``."""

    def __init__(self) -> None:
        self.real: Any = vars(enforcement)["policies"]

    def __getattr__(self, name: str) -> Any:
        scene = current_scene()
        return getattr(scene.policies if scene else self.real, name)


def _note(real: Any, *args: Any) -> str:
    """In place of ``enforcement.note``."""
    scene = current_scene()
    if scene is None:
        return str(real(*args))
    asked, route, *rest = args
    return scene.collector.note(asked, route or "", *rest) if settings.statistics_seconds else ""


_limiters = _Limiters()


def _make_store() -> Store:
    """The settings' server, with more patience than requests have: a machine that tests may be busy."""
    store = store_of_settings(settings)
    store.timeout = max(store.timeout, _PATIENCE)
    return store


_store = OncePerSettings(_make_store)
os.register_at_fork(after_in_child=_store.forget)


def _install() -> None:
    if vars(limiter)["_made"] is not _limiters:
        vars(limiter)["_made"] = _limiters
        vars(enforcement).update(policies=_Policies(), note=partial(_note, vars(enforcement)["note"]))
