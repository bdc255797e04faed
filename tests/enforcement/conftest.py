"""Fixtures of the tests of enforcement."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from django_ratequota.signals import request_refused


@pytest.fixture
def everything_checks(settings: Any, recording: None) -> None:
    """The middleware checks every view, also before the view runs, and decisions are recorded."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True, "COUNT_UNCHECKED": True}


@pytest.fixture
def heard() -> Iterator[list[dict[str, Any]]]:
    """What receivers of ``request_refused`` were given."""
    heard: list[dict[str, Any]] = []

    def receiver(signal: Any, **kwargs: Any) -> None:
        heard.append(kwargs)

    request_refused.connect(receiver)
    yield heard
    request_refused.disconnect(receiver)
