"""What is measured side by side: the same views without any limit, with ours, and with each peer's.

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


def _three(module: str) -> tuple[str, ...]:
    return tuple(f"benchmarks.site.{module}.{name}" for name in ("PerUser", "EndpointPerUser", "EndpointShared"))


_OURS = "django_ratequota.throttling.QuotaThrottle"
_HEADERS = "django_ratequota.middleware.RateQuotaMiddleware"

VARIANTS = {
    "none": Variant(title="no throttle"),
    "floor": Variant(title="one bare EVALSHA", throttles=("benchmarks.site.throttles_floor.OneCall",)),
    "ours": Variant(title="django-ratequota, throttle and middleware", throttles=(_OURS,), middleware=(_HEADERS,)),
    "throttle": Variant(title="django-ratequota, throttle alone", throttles=(_OURS,)),
    "drf": Variant(title="DRF's SimpleRateThrottle, three", throttles=_three("throttles_drf")),
    "smart": Variant(title="django-smart-ratelimit, three", throttles=_three("throttles_smart")),
    "plus": Variant(title="drf-ratelimit-plus, three", throttles=_three("throttles_plus")),
}
