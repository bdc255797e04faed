"""A decision as response headers: the one place where they are rendered.

``RateLimit`` and ``RateLimit-Policy`` follow draft-ietf-httpapi-ratelimit-headers-10 (structured fields, RFC 9651).
"""

from __future__ import annotations

from functools import lru_cache
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
        # Lists join their members by ", ", and integers are written as they are: only the names need the library.
        titles = [status.bucket.title for status in enforced]
        headers["RateLimit-Policy"] = ", ".join(
            [_policy(title, s.bucket.rate.limit, s.window_us) for title, s in zip(titles, enforced, strict=True)]
        )
        headers["RateLimit"] = ", ".join(
            [_name(title) + _standing(s, decision) for title, s in zip(titles, enforced, strict=True)]
        )
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
    """Put the decision's headers on a response, leaving those that are there already.

    They are rendered once: several responses and middlewares may ask.
    """
    headers = decision._headers
    if headers is None:
        headers = decision_headers(decision)
        object.__setattr__(decision, "_headers", headers)
    for name, value in headers.items():
        if name not in response:
            response[name] = value


def retry_after_seconds(decision: Decision) -> int | None:
    """Whole seconds for Retry-After, rounded up, at least 1; None when allowed or when waiting cannot help."""
    wait_us = None if decision.allowed else decision.retry_after_us
    return None if wait_us is None else max(1, _ceil(wait_us))


@lru_cache(maxsize=4096)
def _name(title: str) -> str:
    """The bucket's title as a String of structured fields."""
    # These hold ASCII only; scopes of the engine's own API may be any text.
    return http_sf.ser("".join(c if " " <= c <= "~" else "?" for c in title))


@lru_cache(maxsize=4096)
def _policy(title: str, limit: int, window_us: int) -> str:
    """A member of RateLimit-Policy."""
    # The draft knows no windows below a second: then the quota stands alone.
    window = f";w={window_us // _SECOND}" if window_us >= _SECOND else ""
    return f"{_name(title)};q={limit}{window}"


def _standing(status: BucketStatus, decision: Decision) -> str:
    """The parameters of a member of RateLimit."""
    # On a refusal Retry-After must not be earlier than any t: only the refusing buckets have one, their wait.
    if decision.allowed:
        until_us: int | None = status.reset_after_us
    else:
        until_us = status.retry_after_us if status.refused else None
    until = "" if until_us is None else f";t={_ceil(until_us)}"
    return f";r={status.remaining}{until}"


def _ceil(us: int) -> int:
    return -(-us // _SECOND)
