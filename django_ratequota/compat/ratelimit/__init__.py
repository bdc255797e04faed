"""django-ratelimit's API on this package's engine; the submodules have the same names.

    from django_ratequota.compat.ratelimit.decorators import ratelimit

    @ratelimit(key="ip", rate="5/m")
    def login(request): ...

For sync and async views. The settings are RATELIMIT_*; see ``core`` for what counts, and where.
"""

from .core import ALL, UNSAFE, aget_usage, ais_ratelimited, get_usage, is_ratelimited
from .decorators import ratelimit
from .exceptions import Ratelimited

__all__ = [
    "ALL",
    "UNSAFE",
    "Ratelimited",
    "aget_usage",
    "ais_ratelimited",
    "get_usage",
    "is_ratelimited",
    "ratelimit",
]
