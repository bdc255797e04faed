"""pytest plugin: replaces DRF's throttles before the tests import them. See drf.sh."""

from __future__ import annotations

from typing import Any


def noon() -> int:
    return 1_763_726_400 * 10**6


NAMES = ("AnonRateThrottle", "ScopedRateThrottle", "SimpleRateThrottle", "UserRateThrottle")


def pytest_collection(session: Any) -> None:
    from rest_framework import throttling

    from django_ratequota.compat import drf

    limiter_of = drf.limiter_of

    def held(*cache: Any, clock: Any = None, **options: Any) -> Any:
        return limiter_of(*cache, clock=clock or noon, **options)

    # Unless a test moves the clock, no second passes, even on a slow machine.
    drf.limiter_of = held
    for name in NAMES:
        setattr(throttling, name, getattr(drf, name))


def pytest_collection_finish(session: Any) -> None:
    modules = {item.module for item in session.items}
    held = {getattr(module, name).__module__ for module in modules for name in NAMES}
    assert held == {"django_ratequota.compat.drf"}, held
    # DRF 3.16 has 29, and newer ones may have more.
    assert len(session.items) >= 29, len(session.items)
