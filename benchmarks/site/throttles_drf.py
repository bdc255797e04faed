"""The three limits with DRF's own throttle.

DRF keeps every request's time in one pickled list: with windows of a minute, lists of tens of thousands of times
would be all that is measured. Windows of a second are the shortest it has, and its best case.
"""

from __future__ import annotations

from typing import Any

from rest_framework.throttling import SimpleRateThrottle

from .variants import LIMIT


class PerUser(SimpleRateThrottle):
    rate = f"{LIMIT}/second"
    scope = "all"

    def get_cache_key(self, request: Any, view: Any) -> str:
        user = request.user
        ident = user.pk if user and user.is_authenticated else self.get_ident(request)
        return self.cache_format % {"scope": self.scope, "ident": ident}


class EndpointPerUser(PerUser):
    scope = "items"


class Shared(PerUser):
    scope = "items-shared"

    def get_cache_key(self, request: Any, view: Any) -> str:
        return self.cache_format % {"scope": self.scope, "ident": "everyone"}
