"""Rate limits for Django APIs that operators manage in the admin, enforced atomically in Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .enforcement import acheck_request, check_request
    from .exceptions import RateQuotaError
    from .limiter import Limiter
    from .rates import Rate
    from .types import Bucket, BucketStatus, Decision

__all__ = [
    "Bucket",
    "BucketStatus",
    "Decision",
    "Limiter",
    "Rate",
    "RateQuotaError",
    "acheck_request",
    "check_request",
]

_ROOMS = {
    "Bucket": "types",
    "BucketStatus": "types",
    "Decision": "types",
    "Limiter": "limiter",
    "Rate": "rates",
    "RateQuotaError": "exceptions",
    "acheck_request": "enforcement",
    "check_request": "enforcement",
}


def __getattr__(name: str) -> object:
    # Looked up on first use: importing the package imports neither redis nor Django's models.
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_ROOMS[name]}", __name__), name)
