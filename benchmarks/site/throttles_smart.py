"""The three limits with django-smart-ratelimit's throttle for DRF, on its Redis backend."""

from __future__ import annotations

from typing import Any

from django_smart_ratelimit.integrations.drf import SmartRateLimitThrottle

from .variants import LIMIT


class PerUser(SmartRateLimitThrottle):
    rate = f"{LIMIT}/m"
    algorithm = "token_bucket"


class EndpointPerUser(PerUser):
    def get_cache_key(self, request: Any, view: Any) -> str:
        return f"items:{super().get_cache_key(request, view)}"


class EndpointShared(PerUser):
    def get_cache_key(self, request: Any, view: Any) -> str:
        return "items:everyone"


class Refusing(PerUser):
    rate = "1/d"

    def get_cache_key(self, request: Any, view: Any) -> str:
        return f"refused:{super().get_cache_key(request, view)}"
