"""Helpers for the tests of projects that use django-ratequota: policies of a test's own, a clock, assertions.

Under pytest they come as fixtures too, see ``plugin``. Importing this imports neither Django nor Redis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .assertions import assert_allowed, assert_limited, remaining
    from .clock import Clock
    from .overrides import isolated, override_policies, unlimited
    from .policies import Policy
    from .server import embedded_server

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

_EXPORTS = {
    "Clock": "clock",
    "Policy": "policies",
    "assert_allowed": "assertions",
    "assert_limited": "assertions",
    "embedded_server": "server",
    "isolated": "overrides",
    "override_policies": "overrides",
    "remaining": "assertions",
    "unlimited": "overrides",
}


def __getattr__(name: str) -> object:
    # Looked up on first use: settings import embedded_server before Django is there.
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
