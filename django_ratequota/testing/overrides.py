"""Context managers that put policies in force: a test's own, none, or the database's with fresh counters.

Each also decorates functions, async functions and ``TestCase`` classes, whose tests get a scene each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from django.test.utils import TestContextDecorator

from ..models import Endpoint
from ..policies.cache import PolicyCache
from .clock import Clock
from .isolation import Scene
from .policy_snapshot import Policies, fixed_policies


class SceneContext(TestContextDecorator):
    """Enters a new scene and leaves it."""

    def __init__(self, policies: Callable[[], PolicyCache], clock: Clock | None, all_threads: bool) -> None:
        super().__init__()
        self._policies, self._clock, self._all_threads = policies, clock, all_threads
        self._entered: list[Scene] = []

    def __enter__(self) -> Scene:  # type: ignore[override]  # the stubs know Django's own subclasses only
        return self.enable()

    def enable(self) -> Scene:
        """Enter a scene and return it: it has a ``clock`` to move, and ``reset()`` to forget what was counted."""
        scene = Scene(self._policies(), self._clock)
        scene.enter(self._all_threads)
        self._entered.append(scene)
        return scene

    def disable(self) -> None:
        """Leave the scene."""
        # Several tasks of one event loop may have entered at the same time.
        scene = next((scene for scene in reversed(self._entered) if scene.entered), self._entered[-1])
        self._entered.remove(scene)
        scene.leave()


def override_policies(
    policies: Policies,
    *,
    endpoints: Iterable[Endpoint] = (),
    clock: Clock | None = None,
    all_threads: bool = False,
) -> SceneContext:
    """Put these policies in force, and no others, with fresh counters; the engine is the real one.

        with override_policies({"search": "3/min", None: "100/min"}) as scene:
            ...
            scene.clock.advance(20)

    ``policies`` maps an endpoint's name (None = all endpoints together) to rates, a ``Policy``, or a list of both.
    Neither the database is read, nor ENABLED. ``endpoints`` are unsaved ``Endpoint``s where routes, methods or a cost
    matter. The default ``clock`` stands still. ``all_threads`` puts the policies in force for the whole process: for
    live servers, and threads that a test starts. Entering raises ``ValueError`` or ``TypeError``, naming the wrong
    entry.
    """
    return SceneContext(lambda: fixed_policies(policies, tuple(endpoints)), clock, all_threads)


def unlimited(*, all_threads: bool = False) -> SceneContext:
    """Limit nothing. Needs no Redis."""
    return SceneContext(lambda: fixed_policies({}), None, all_threads)


def isolated(*, clock: Clock | None = None, all_threads: bool = False) -> SceneContext:
    """Put the policies in the database in force, read again, with fresh counters and a clock of their own."""
    return SceneContext(PolicyCache, clock, all_threads)
