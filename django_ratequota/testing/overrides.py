"""What a test puts in force: policies of its own, none at all, or the database's with counters of its own.

Each is a context manager, and a decorator of functions, async functions and ``TestCase`` classes (a scene a test).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from django.test.utils import TestContextDecorator

from ..models import Endpoint
from ..policies.cache import PolicyCache
from .clock import Clock
from .isolation import Scene
from .policies import FixedPolicies, Given, read


class Staging(TestContextDecorator):
    """Enters a new scene, and leaves it."""

    def __init__(
        self, policies: Callable[[], PolicyCache | FixedPolicies], clock: Clock | None, all_threads: bool
    ) -> None:
        super().__init__()
        self._policies, self._clock, self._all_threads = policies, clock, all_threads
        self._entered: list[Scene] = []

    def __enter__(self) -> Scene:  # type: ignore[override]  # the stubs know Django's own subclasses only
        return self.enable()

    def enable(self) -> Scene:
        """Enter; the scene has a ``clock`` to move and ``reset()``, which forgets what was counted."""
        scene = Scene(self._policies(), self._clock)
        scene.enter(self._all_threads)
        self._entered.append(scene)
        return scene

    def disable(self) -> None:
        """Leave."""
        # Tasks of one event loop may be within at the same time.
        scene = next((one for one in reversed(self._entered) if one.entered), self._entered[-1])
        self._entered.remove(scene)
        scene.leave()


def override_policies(
    policies: Given,
    *,
    endpoints: Iterable[Endpoint] = (),
    plans: Mapping[Any, str] | None = None,
    default_plans: Mapping[str, str] | None = None,
    clock: Clock | None = None,
    all_threads: bool = False,
) -> Staging:
    """Put these policies in force and no others, with counters of their own; the real engine decides by them.

        with override_policies({"search": "3/min", None: "100/min"}) as scene:
            ...
            scene.clock.advance(20)

    ``policies`` maps an endpoint's name (None = all endpoints together) to rates, a ``Policy``, or several. No
    database is asked. ``endpoints`` are unsaved ``Endpoint``s for those that need routes, methods or a cost;
    ``plans`` says which user (or primary key) is on which plan, by slug; ``default_plans`` who is on which without
    that: ``{"authenticated": "free", "anonymous": "guest"}``. ``clock`` stands still unless given. ``all_threads``
    puts it in force for the whole process, for live servers and threads that a test starts.
    Raises ``ValueError`` or ``TypeError`` on entering, saying where what is wrong.
    """
    return Staging(lambda: read(policies, tuple(endpoints), plans, default_plans), clock, all_threads)


def unlimited(*, all_threads: bool = False) -> Staging:
    """Limit nothing, and ask no Redis."""
    return Staging(lambda: read({}), None, all_threads)


def isolated(*, clock: Clock | None = None, all_threads: bool = False) -> Staging:
    """Put the database's policies in force, read anew, with counters and a clock of their own."""
    return Staging(PolicyCache, clock, all_threads)
