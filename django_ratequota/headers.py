"""A decision as response headers: the one place where they are rendered.

``RateLimit`` and ``RateLimit-Policy`` follow draft-ietf-httpapi-ratelimit-headers-10 (structured fields, RFC 9651).
"""

from __future__ import annotations

from typing import Any, Protocol

import http_sf

from .conf import settings
from .types import BucketStatus, Decision

_SECOND = 10**6


def decision_headers(decision: Decision) -> dict[str, str]:
    """The headers that tell a client how it stands; a degraded decision has no numbers to tell."""
    headers: dict[str, str] = {}
    wait = retry_after_seconds(decision)
    if wait is not None:
        headers["Retry-After"] = str(wait)
    if decision.refusal_id:
        headers["X-RateLimit-Refusal"] = decision.refusal_id
    enforced = [status for status in decision.statuses if status.bucket.mode == "enforce"]
    if decision.degraded or not enforced:
        return headers
    if "ietf" in settings.headers:
        policies: list[Any] = [(_title(status), _policy(status)) for status in enforced]
        standings: list[Any] = [(_title(status), _standing(status, decision)) for status in enforced]
        headers["RateLimit-Policy"] = http_sf.ser(policies)
        headers["RateLimit"] = http_sf.ser(standings)
    binding = decision.binding
    if "x-ratelimit" in settings.headers and binding is not None:
        headers["X-RateLimit-Limit"] = str(binding.limit)
        headers["X-RateLimit-Remaining"] = str(binding.remaining)
        headers["X-RateLimit-Reset"] = str(_ceil(decision.at_us + binding.reset_after_us))
    return headers


class Headers(Protocol):
    """A Django response, or any mapping of header names to values."""

    def __contains__(self, name: Any, /) -> bool: ...
    def __setitem__(self, name: str, value: str, /) -> None: ...


def add_headers(response: Headers, decision: Decision) -> None:
    """Put the decision's headers on a response, leaving those that are there already."""
    for name, value in decision_headers(decision).items():
        if name not in response:
            response[name] = value


def retry_after_seconds(decision: Decision) -> int | None:
    """Whole seconds for Retry-After, rounded up, at least 1; None when allowed or when waiting cannot help."""
    wait_us = None if decision.allowed else decision.retry_after_us
    return None if wait_us is None else max(1, _ceil(wait_us))


def _title(status: BucketStatus) -> str:
    # Structured fields hold ASCII only; scopes of the engine's own API may be any text.
    return "".join(c if " " <= c <= "~" else "?" for c in status.bucket.title)


def _policy(status: BucketStatus) -> dict[str, int]:
    # The draft knows no windows below a second: then the quota stands alone.
    whole = status.window_us >= _SECOND
    return {"q": status.bucket.rate.limit, **({"w": status.window_us // _SECOND} if whole else {})}


def _standing(status: BucketStatus, decision: Decision) -> dict[str, int]:
    # On a refusal Retry-After must not be earlier than any t: only the refusing buckets have one, their wait.
    if decision.allowed:
        until_us: int | None = status.reset_after_us
    else:
        until_us = status.retry_after_us if status.refused else None
    return {"r": status.remaining, **({} if until_us is None else {"t": _ceil(until_us)})}


def _ceil(us: int) -> int:
    return -(-us // _SECOND)
