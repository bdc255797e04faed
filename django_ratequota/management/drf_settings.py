"""Convert the throttles in DRF's settings to a policy file, for ``ratequota import --from-drf-settings``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.core.management.base import CommandError
from rest_framework import throttling as drf
from rest_framework.settings import api_settings

from ..compat import drf as compat
from ..engine.rates import BLOCKED, Rate, show
from ..exceptions import InvalidRate
from ..models import Plan
from ..policyfile.writer import yaml_chunks
from ..throttling import QuotaThrottle

#: Name of the file in messages.
NAME = "DEFAULT_THROTTLE_RATES"
#: DRF keeps the times of the requests admitted in the last period.
_ALGORITHM = "sliding_window_log"
_REASON = f"from {NAME}"
#: Method that names the counter -> the audience of DRF's own class.
_COUNTED: dict[Any, str] = {
    drf.AnonRateThrottle.get_cache_key: "anon",
    drf.UserRateThrottle.get_cache_key: "user",
    drf.ScopedRateThrottle.get_cache_key: "scope",
}
_DECIDING = {
    kind.allow_request for kind in (drf.SimpleRateThrottle, drf.ScopedRateThrottle, compat.SimpleRateThrottle)
}

_NEW_PLAN = {"slug": "anonymous", "name": "Anonymous", "default_for": "anonymous"}
#: Requests, seconds.
_Parsed = tuple[int, float]


def file_of_settings() -> tuple[str, list[str]]:
    """Return the text of the file, and notes for operators; raises ``CommandError``.

    The DEFAULT_THROTTLE_CLASSES define the audience of a rate; a scope of none of them is a view's, so an endpoint's.
    """
    limits, notes = _limits_of_settings(dict(api_settings.DEFAULT_THROTTLE_RATES or {}))
    plan = Plan.objects.filter(default_for=_NEW_PLAN["default_for"]).values("slug").first()
    audiences: dict[str, dict[str, Any]] = {"user": {}, "anon": {"plan": (plan or _NEW_PLAN)["slug"]}}
    if limits["anon"]:
        # DRF applies both to anonymous callers, but here the plan's policy replaces everyone's.
        limits["anon"] += limits["user"]
    policies = [
        {
            **audiences.get(scope, {"endpoint": scope}),
            "rates": _rates(parsed),
            "algorithm": _ALGORITHM,
            "reason": _REASON,
        }
        for scope, parsed in limits.items()
        if parsed
    ]
    if not policies:
        raise CommandError(f"REST_FRAMEWORK['{NAME}'] has no rate to import")
    sections = {
        "plans": [_NEW_PLAN] if limits["anon"] and plan is None else [],
        "endpoints": [{"name": scope} for scope in limits if scope not in audiences],
        "policies": policies,
    }
    document = {"version": 1, **{name: entries for name, entries in sections.items() if entries}}
    return "".join(yaml_chunks(document)), notes


def _limits_of_settings(rates: dict[str, Any]) -> tuple[dict[str, list[_Parsed]], list[str]]:
    """Return the limits by scope, where ``user`` and ``anon`` are of all endpoints together, and notes."""
    limits: dict[str, list[_Parsed]] = {"user": [], "anon": []}
    notes, taken = [], set()
    for kind in _default_classes():
        counted = _COUNTED.get(getattr(kind, "get_cache_key", None))
        if issubclass(kind, QuotaThrottle) or (counted == "scope" and kind.allow_request in _DECIDING):
            continue
        taken.add(getattr(kind, "scope", None))
        if counted is None or kind.allow_request not in _DECIDING:
            name = f"{kind.__module__}.{kind.__qualname__}"
            notes.append(f"{name} has its own way of counting: write its policy yourself")
        else:
            limits[counted] += _parse(getattr(kind, "rate", None) or rates.get(kind.scope), kind, kind.scope)
    for scope, text in rates.items():
        parsed = [] if scope in taken else _parse(text, drf.SimpleRateThrottle, scope)
        if parsed and scope in limits:
            notes.append(
                f"{scope!r} is for all endpoints now, though DEFAULT_THROTTLE_CLASSES had no throttle of that scope"
            )
        if parsed:
            limits[scope] = limits.get(scope, []) + parsed
    return limits, notes


def _default_classes() -> Iterable[Any]:
    try:
        return list(api_settings.DEFAULT_THROTTLE_CLASSES or ())
    except ImportError as error:
        raise CommandError(f"REST_FRAMEWORK['DEFAULT_THROTTLE_CLASSES'] cannot be read: {error}") from error


def _parse(text: Any, kind: Any, scope: str) -> list[_Parsed]:
    """Return requests and seconds as the class parses the text; nothing where it limits nothing."""
    if text is None:
        return []
    try:
        limit, seconds = kind.parse_rate(object.__new__(kind), text)
        if limit >= 1:
            Rate(limit=limit, period=seconds, algorithm=_ALGORITHM)
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        reason = f": {error}" if isinstance(error, InvalidRate) else ""
        raise CommandError(
            f"{NAME}[{scope!r}] = {show(text)} cannot be read{reason}; DRF needs text such as 100/day"
        ) from error
    return [(limit, seconds)]


def _rates(limits: list[_Parsed]) -> str:
    """Return the rates of one policy: the strictest for each period."""
    if any(limit < 1 for limit, _ in limits):
        return BLOCKED
    strictest = {seconds: min(limit for limit, other in limits if other == seconds) for _, seconds in limits}
    return ", ".join(str(Rate(limit=limit, period=seconds)) for seconds, limit in strictest.items())
