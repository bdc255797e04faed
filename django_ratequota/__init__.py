"""Rate limits for Django APIs that operators manage in the admin, enforced atomically in Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .utils.lazy import lazy_exports

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .enforcement.check_caller import acheck_caller, apeek_caller, check_caller, peek_caller
    from .enforcement.check_request import acheck_request, check_request
    from .enforcement.turn import turn
    from .enforcement.warm import awarm, warm
    from .engine.decision import Decision
    from .engine.limiter import Limiter
    from .engine.rates import Rate
    from .engine.types import Bucket, BucketStatus
    from .exceptions import RateQuotaError

__all__ = [
    "Bucket",
    "BucketStatus",
    "Decision",
    "Limiter",
    "Rate",
    "RateQuotaError",
    "acheck_caller",
    "acheck_request",
    "apeek_caller",
    "awarm",
    "check_caller",
    "check_request",
    "peek_caller",
    "turn",
    "warm",
]

# Importing the package imports neither redis nor Django's models.
__getattr__ = lazy_exports(
    __name__,
    {
        "enforcement.check_request": ("acheck_request", "check_request"),
        "enforcement.check_caller": ("acheck_caller", "apeek_caller", "check_caller", "peek_caller"),
        "enforcement.turn": ("turn",),
        "enforcement.warm": ("awarm", "warm"),
        "engine.rates": ("Rate",),
        "engine.decision": ("Decision",),
        "engine.types": ("Bucket", "BucketStatus"),
        "exceptions": ("RateQuotaError",),
        "runtime": ("Limiter",),
    },
)
