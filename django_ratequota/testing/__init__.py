"""Helpers for the tests of projects that use django-ratequota: policies for one test, a clock, assertions.

``plugin`` has them as pytest fixtures. Importing this package imports neither Django nor Redis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_exports

if TYPE_CHECKING:
    from .assertions import assert_allowed, assert_limited, remaining
    from .clock import Clock
    from .embedded import embedded_server
    from .overrides import isolated, override_policies, unlimited
    from .policy_snapshot import Policy

__all__ = [
    "Clock",
    "Policy",
    "assert_allowed",
    "assert_limited",
    "embedded_server",
    "isolated",
    "override_policies",
    "remaining",
    "unlimited",
]

# Settings call embedded_server before Django is configured.
__getattr__ = lazy_exports(
    __name__,
    {
        "assertions": ("assert_allowed", "assert_limited", "remaining"),
        "clock": ("Clock",),
        "overrides": ("isolated", "override_policies", "unlimited"),
        "policy_snapshot": ("Policy",),
        "embedded": ("embedded_server",),
    },
)
