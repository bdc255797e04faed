"""Fixtures of the tests of enforcement."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def everything_checks(settings: Any, recording: None) -> None:
    """The middleware checks every view, also before the view runs, and decisions are recorded."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True, "COUNT_UNCHECKED": True}
