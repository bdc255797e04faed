"""What is measured side by side: the same views without any limit, with ours, and with each peer's.

Every limiting variant holds the same three limits: all endpoints per user, one endpoint per user, one endpoint
shared by everyone. None ever refuses, but for the endpoint ``refused``.
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
    #: One more, of an endpoint that refuses from the second request on.
    refusing: tuple[str, ...] = ()
    middleware: tuple[str, ...] = ()
    #: Of django-ratequota: how long a refusal is repeated without asking Redis; its default.
    deny_cache_seconds: float = 1.0


def _peer(title: str, module: str) -> Variant:
    names = ("PerUser", "EndpointPerUser", "EndpointShared", "Refusing")
    throttles = tuple(f"benchmarks.site.{module}.{name}" for name in names)
    return Variant(title=title, throttles=throttles[:3], refusing=throttles[:1] + throttles[3:])


_OURS = "django_ratequota.throttling.QuotaThrottle"
_HEADERS = "django_ratequota.middleware.RateQuotaMiddleware"

VARIANTS = {
    "none": Variant(title="no throttle"),
    "floor": Variant(title="one bare EVALSHA", throttles=("benchmarks.site.throttles_floor.OneCall",)),
    "ours": Variant(
        title="django-ratequota, throttle and middleware",
        throttles=(_OURS,),
        refusing=(_OURS,),
        middleware=(_HEADERS,),
    ),
    "throttle": Variant(title="django-ratequota, throttle alone", throttles=(_OURS,), refusing=(_OURS,)),
    "asking": Variant(
        title="django-ratequota, deny cache off",
        throttles=(_OURS,),
        refusing=(_OURS,),
        middleware=(_HEADERS,),
        deny_cache_seconds=0,
    ),
    "drf": _peer("DRF's SimpleRateThrottle, three", "throttles_drf"),
    "smart": _peer("django-smart-ratelimit, three", "throttles_smart"),
    "plus": _peer("drf-ratelimit-plus, three", "throttles_plus"),
}
