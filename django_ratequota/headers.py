"""Render a decision as response headers: one function per wire form that HEADERS may name.

``ietf-11`` is draft-ietf-httpapi-ratelimit-headers-11 (structured fields, RFC 9651), which is no standard yet. A
draft that renames parameters becomes one more function in ``FORMS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import http_sf

from .conf import settings
from .engine.decision import Decision, Rivals, binding_place, reply_of
from .engine.types import EACH, GROWS, LEFT, RESETS, Bucket, Copies, Patterns, Reply

#: The attribute of Django's request with the headers of its decisions.
_SENT = "ratequota_headers"
_SECOND = 10**6
#: Headers that may let a shared cache serve a response again (RFC 9111); CDNs and proxies put their own first.
_OF_CDNS = frozenset(
    "cdn-cache-control cloudflare-cdn-cache-control vercel-cdn-cache-control netlify-cdn-cache-control "
    "surrogate-control edge-control x-accel-expires".split()
)
_DATES = frozenset(("expires", "last-modified"))
_CACHING = _OF_CDNS | _DATES | {"cache-control"}
#: Directives whose seconds let caches serve a response again unless they are 0.
_AGES = ("s-maxage", "max-age", "stale-while-revalidate", "stale-if-error")
_DIRECTIVE = re.compile(r"""([a-z-]+)(?:\s*=\s*("[^"]*"?|[^\s,]*))?""")


def decision_headers(decision: Decision) -> dict[str, str]:
    """Return the headers that describe a decision; a degraded one has no numbers."""
    headers: dict[str, str] = {}
    wait = retry_after_seconds(decision)
    if wait is not None:
        headers["Retry-After"] = str(wait)
    if decision.refusal_id:
        headers["X-RateLimit-Refusal"] = decision.refusal_id
    if decision.error:
        return headers
    reply = reply_of(decision)
    buckets, windows_us, _numbers = reply
    if type(buckets) is Copies:
        constant = _constant_of_copies(buckets.patterns, windows_us)
    else:
        constant = _constant(buckets, windows_us)
    for form in settings.headers if constant.members else ():
        headers |= FORMS[form](decision, reply, constant, wait)
    return headers


def add_headers(response: Any, decision: Decision, request: Any) -> None:
    """Add the decision's headers to the response to ``request``, or to its headers; those that it has already stay.

    A response that a cache may serve to other clients gets none: headers added before the response became cacheable
    are removed again. A refusal gets ``Cache-Control: no-store``.
    """
    headers = decision._headers
    if headers is None:  # rendered once, for several responses and middlewares
        headers = decision_headers(decision)
        decision._headers = headers
    if not decision.allowed and "Cache-Control" not in response:
        response["Cache-Control"] = "no-store"
    http = getattr(request, "_request", request)
    # Of earlier decisions as well: a view may check a request again after its throttle.
    sent = vars(http).setdefault(_SENT, [])
    if _is_shared(response, http):
        for name, value in [item for each in sent for item in each.items()]:
            if response.get(name) == value:
                del response[name]
        return
    sent.append(headers)
    for name, value in headers.items():
        response.setdefault(name, value)


def _is_shared(response: Any, http: Any) -> bool:
    """Return whether Django's cache middleware, or a shared cache (RFC 9111), may serve the response to others."""
    kept_here = getattr(http, "_cache_update_cache", False) and getattr(response, "status_code", 200) == 200
    headers = getattr(response, "headers", response)
    if not kept_here and _CACHING.isdisjoint(map(str.lower, headers)):
        return False
    names = {name.lower(): name for name in headers}
    if any("no-store" not in headers[names[own]] for own in _OF_CDNS & names.keys()):
        return True
    control: dict[str, str] = dict(_DIRECTIVE.findall(response.get("Cache-Control", "").lower()))
    # With a value they are about the headers that it lists.
    unqualified = {name for name, value in control.items() if not value}
    if "no-store" in control or "private" in unqualified:
        return False
    if kept_here and "no-cache" not in unqualified:
        return True
    fresh = {name for name in _AGES if control.get(name, "").strip('0"')}
    if "public" in control or "s-maxage" in fresh:
        return True
    dated = "max-age" not in control and "no-cache" not in unqualified and not _DATES.isdisjoint(names)
    # Requests with credentials need one of these in addition.
    return (bool(fresh) or dated) and ("must-revalidate" in control or "HTTP_AUTHORIZATION" not in http.META)


def retry_after_seconds(decision: Decision) -> int | None:
    """Return whole seconds for Retry-After, at least 1; None when allowed or when waiting cannot help."""
    wait_us = None if decision.allowed else decision.retry_after_us
    return None if wait_us is None else max(1, -(-wait_us // _SECOND))


class _Constant(NamedTuple):
    """What headers show of buckets, however many units are left in them."""

    #: Of each enforced bucket where its numbers begin, its name in headers, and whether it is known when more of its
    #: units are free.
    members: list[tuple[int, str, bool]]
    #: The capacity of each bucket.
    capacities: list[int]
    #: Those of which X-RateLimit-* describe the tightest: the first that leads, else all.
    rivals: Rivals
    #: The value of RateLimit-Policy.
    policies: str


def _constant(buckets: Sequence[Bucket], windows_us: tuple[int, ...]) -> _Constant:
    """Return what headers show of the enforced ones among these buckets.

    ``qu="requests"`` marks rates that count requests, whatever these cost, ``qu="concurrent-requests"`` those that
    limit how many run at once; these have no window. The draft has no name for units.
    """
    places, members, policies = list[int](), list[tuple[int, str, bool]](), list[str]()
    for at, (bucket, window_us) in enumerate(zip(buckets, windows_us, strict=True)):
        if bucket.mode == "enforce":
            rate = bucket.rate
            kind = ("concurrent-requests", 0) if rate.concurrent else (rate.counts, window_us)
            name, policy = _named(bucket.title, rate.limit, *kind)
            places.append(at)
            members.append((at * EACH, name, not rate.concurrent))  # nobody knows when a request ends
            policies.append(policy)
    # Lists are joined by ", " and integers need no escaping, so only the names need the library.
    capacities, leading = [one.rate.capacity for one in buckets], [at for at in places if buckets[at].leads]
    rivals = Rivals.of(buckets, leading[:1] or places)
    return _Constant(members, capacities, rivals, ", ".join(policies))


@lru_cache(maxsize=4096)
def _constant_of_copies(patterns: Patterns, windows_us: tuple[int, ...]) -> _Constant:
    return _constant(patterns.buckets, windows_us)


def _ietf_11(decision: Decision, reply: Reply, constant: _Constant, wait: int | None) -> dict[str, str]:
    """Render RateLimit-Policy and RateLimit: every enforced bucket."""
    numbers, limits = reply.numbers, []
    for at, name, is_known in constant.members:
        left, until = max(0, numbers[at + LEFT]), -(-numbers[at + GROWS] // _SECOND)
        # The draft: Retry-After should not be earlier than the end of any t.
        if until and is_known and (wait is None or until <= wait):
            limits.append(f"{name};r={left};t={until}")
        else:
            limits.append(f"{name};r={left}")
    return {"RateLimit-Policy": constant.policies, "RateLimit": ", ".join(limits)}


def _x_ratelimit(decision: Decision, reply: Reply, constant: _Constant, wait: int | None) -> dict[str, str]:
    """Render X-RateLimit-*: of a refusal the bucket that refused, else the first that leads, else the binding one."""
    at = constant.rivals.tightest(reply) if decision.allowed else binding_place(decision)
    if at is None:
        return {}
    first = at * EACH
    return {
        "X-RateLimit-Limit": str(constant.capacities[at]),
        "X-RateLimit-Remaining": str(max(0, reply.numbers[first + LEFT])),
        "X-RateLimit-Reset": str(-(-(decision.at_us + reply.numbers[first + RESETS]) // _SECOND)),
    }


#: Wire forms by their names in HEADERS; the last argument is Retry-After (seconds).
FORMS: dict[str, Callable[[Decision, Reply, _Constant, int | None], dict[str, str]]] = {
    "ietf": _ietf_11,
    "ietf-11": _ietf_11,
    "x-ratelimit": _x_ratelimit,
}


@lru_cache(maxsize=4096)
def _named(title: str, limit: int, counts: str, window_us: int) -> tuple[str, str]:
    """Return the bucket's title as a String of structured fields, and its member of RateLimit-Policy."""
    # Strings are ASCII, but scopes in the engine's own API may be any text.
    name = str(http_sf.ser("".join(c if " " <= c <= "~" else "?" for c in title)))
    # The draft has no windows below a second: these are left out.
    window = f";w={window_us // _SECOND}" if window_us >= _SECOND else ""
    unit = "" if counts == "units" else f';qu="{counts}"'
    return name, f"{name};q={limit}{unit}{window}"
