"""The three limits with drf-ratelimit-plus."""

from __future__ import annotations

from drf_ratelimit_plus import rate_limit

from .variants import LIMIT

_RATE = f"{LIMIT}/m"

PerUser = rate_limit(rate=_RATE, algorithm="token_bucket", key="user", scope="all")
EndpointPerUser = rate_limit(rate=_RATE, algorithm="token_bucket", key="user", scope="items")
EndpointShared = rate_limit(
    rate=_RATE, algorithm="token_bucket", key=lambda request, view=None: "everyone", scope="items-shared"
)
Refusing = rate_limit(rate="1/d", algorithm="token_bucket", key="user", scope="refused")
