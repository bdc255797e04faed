"""What is measured side by side: the same views without any limit, with ours, and with others'.

Every limiting variant holds the same three limits: all endpoints per user, one endpoint per user, one endpoint
shared by everyone. None ever refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Requests a minute; more than any run sends.
LIMIT = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to limit the views."""

    #: As tables call it.
    title: str
    throttles: tuple[str, ...] = ()
    middleware: tuple[str, ...] = ()


VARIANTS = {
    "none": Variant(title="no throttle"),
    "same": Variant(
        title="the same EVALSHA by redis-py", throttles=("benchmarks.site.throttles_evalsha.SameEvalsha",)
    ),
    "ours": Variant(
        title="QuotaThrottle, three limits",
        throttles=("django_ratequota.throttling.QuotaThrottle",),
        middleware=("django_ratequota.middleware.RateQuotaMiddleware",),
    ),
    "drf": Variant(
        title="DRF's own throttle, three",
        throttles=tuple(f"benchmarks.site.throttles_drf.{name}" for name in ("PerUser", "EndpointPerUser", "Shared")),
    ),
}
