"""The objects that decide and record in this process, made by the settings in force.

``process`` is the one seam: tests put other objects in its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from .conf import settings
from .engine.limiter import Limiter
from .engine.local import LocalLimiter
from .exceptions import ConfigurationError, StoreError
from .utils.locks import ForkSafeLock

if TYPE_CHECKING:
    from .engine.types import Decision
    from .policies.cache import PolicyCache


T = TypeVar("T")


class OncePerSettings(Generic[T]):
    """Makes one object from the settings, however many threads ask at once, and another when they change."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = ForkSafeLock()
        self._made: tuple[int, T] | None = None

    def __call__(self) -> T:
        """Return the object; raises whatever making it raises."""
        made = self._made
        if made is not None and made[0] == settings.generation:
            return made[1]
        with self._lock:
            made = self._made
            if made is None or made[0] != settings.generation:
                made = self._made = (settings.generation, self._make())
            return made[1]

    def forget(self) -> None:
        """Make another object the next time."""
        self._made = None


class Process:
    """The objects that every request goes through, as attributes: reaching one costs no call.

    ``policies``, ``record`` and ``observe`` belong to layers above this one, whose modules set them when imported.
    """

    #: The current policies; set by ``policies.cache``.
    policies: PolicyCache
    #: Records a decision for statistics and returns the id of a refusal; set by ``monitoring.collector``.
    record: Callable[..., str]
    #: Looks for buckets that a decision left nearly used up; set by ``monitoring.alerts``.
    observe: Callable[[Decision], None]

    def __init__(self) -> None:
        #: Returns the limiter by the settings in force; raises ``ConfigurationError``.
        self.limiter: OncePerSettings[Limiter] = OncePerSettings(Limiter)
        #: Returns the limiter that decides under ``on_error = local`` while Redis does not answer.
        self.local_limiter = OncePerSettings(lambda: LocalLimiter(settings.local_share))


#: This process's own.
process = Process()
# A forked child needs connections, a breaker and a histogram of its own.
os.register_at_fork(after_in_child=process.limiter.forget)


def default_limiter() -> Limiter:
    """Return this process's limiter by the settings; raises ``StoreError`` where these name no Redis."""
    try:
        return process.limiter()
    except ConfigurationError as error:
        raise StoreError("configuration", str(error)) from error
