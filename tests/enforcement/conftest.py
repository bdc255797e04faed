"""Fixtures of the tests of enforcement."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def everything_checks(settings: Any) -> None:
    """The middleware checks every view, also before the view runs, and decisions are recorded."""
    more = {"ENFORCE_ALL": True, "COUNT_UNCHECKED": True, "STATISTICS_SECONDS": 3600}
    settings.RATEQUOTA = {**settings.RATEQUOTA, **more}
