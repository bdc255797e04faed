"""An error that only tests raise."""

from __future__ import annotations

from typing import Any


class Failure(Exception):
    """Raised by a test."""


def fail(*_: Any, **__: Any) -> Any:
    raise Failure("it fails")
