"""Rate limits for Django APIs that operators manage in the admin, enforced atomically in Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .enforcement.check import acheck_request, check_request
    from .engine.limiter import Limiter
    from .engine.rates import Rate
    from .engine.types import Bucket, BucketStatus, Decision
    from .exceptions import RateQuotaError

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

_EXPORTS = {
    "Bucket": "engine.types",
    "BucketStatus": "engine.types",
    "Decision": "engine.types",
    "Limiter": "runtime",
    "Rate": "engine.rates",
    "RateQuotaError": "exceptions",
    "acheck_request": "enforcement.check",
    "check_request": "enforcement.check",
}


def __getattr__(name: str) -> object:
    # Looked up on first use: importing the package imports neither redis nor Django's models.
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
