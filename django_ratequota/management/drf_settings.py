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
#: Method that names the counter -> the audience of DRF's own class.
_COUNTED: dict[Any, str] = {
    drf.AnonRateThrottle.get_cache_key: "anon",
    drf.UserRateThrottle.get_cache_key: "user",
    drf.ScopedRateThrottle.get_cache_key: "scope",
}
_DECIDING = {
    kind.allow_request for kind in (drf.SimpleRateThrottle, drf.ScopedRateThrottle, compat.SimpleRateThrottle)
}

#: Requests, seconds.
_Parsed = tuple[int, float]


def file_of_settings() -> tuple[str, list[str]]:
    """Return the text of the file, and notes for operators; raises ``CommandError``.

    The DEFAULT_THROTTLE_CLASSES define the audience of a rate; a scope of none of them is a view's, so an endpoint's.
    """
    rates = dict(api_settings.DEFAULT_THROTTLE_RATES or {})
    found = _Found(rates)
    for kind in _default_classes():
        found.take(kind)
    for scope in rates:
        found.take_scope(scope)
    if not found.policies():
        raise CommandError(f"REST_FRAMEWORK['{NAME}'] has no rate to import")
    document: dict[str, Any] = {"version": 1}
    document |= {name: entries for name, entries in found.sections().items() if entries}
    return "".join(yaml_chunks(document)), found.notes


class _Found:
    """The limits of DRF's settings."""

    def __init__(self, rates: dict[str, Any]) -> None:
        self.notes: list[str] = []
        self._rates = rates
        self._seen: set[str] = set()
        self._limits: dict[str, list[_Parsed]] = {"anon": [], "user": []}
        self._endpoints: dict[str, _Parsed] = {}
        default_for = Plan.DefaultFor.ANONYMOUS
        self._anonymous = Plan.objects.filter(default_for=default_for).first() or Plan(
            slug="anonymous", name="Anonymous", default_for=default_for.value
        )

    def take(self, kind: Any) -> None:
        """Add one of DEFAULT_THROTTLE_CLASSES: it limits all endpoints together."""
        if issubclass(kind, QuotaThrottle):
            return
        counted = _COUNTED.get(getattr(kind, "get_cache_key", None))
        if counted is None or kind.allow_request not in _DECIDING:
            self.notes.append(
                f"{kind.__module__}.{kind.__qualname__} has its own way of counting: write its policy yourself"
            )
            self._seen.add(getattr(kind, "scope", None) or "")
        elif counted != "scope":
            self._seen.add(kind.scope)
            text = getattr(kind, "rate", None) or self._rates.get(kind.scope)
            self._limits[counted] += _parse(text, kind, kind.scope)

    def take_scope(self, scope: str) -> None:
        """Add a rate that belongs to none of these classes."""
        if scope in self._seen:
            return
        parsed = _parse(self._rates[scope], drf.SimpleRateThrottle, scope)
        if not parsed:
            return
        if scope not in self._limits:
            self._endpoints[scope] = parsed[0]
            return
        self._limits[scope] += parsed
        self.notes.append(
            f"{scope!r} is for all endpoints now, though DEFAULT_THROTTLE_CLASSES had no throttle of that scope"
        )

    def policies(self) -> list[dict[str, Any]]:
        """Return the policies as entries of the file."""
        # DRF applies both to anonymous callers, but here the plan's policy replaces everyone's.
        anonymous = self._limits["anon"] and self._limits["anon"] + self._limits["user"]
        shared: list[tuple[dict[str, Any], list[_Parsed]]] = [
            ({}, self._limits["user"]),
            ({"plan": self._anonymous.slug}, anonymous),
            *(({"endpoint": name}, [parsed]) for name, parsed in self._endpoints.items()),
        ]
        return [
            {**audience, "rates": _rates(parsed), "algorithm": _ALGORITHM, "reason": f"from {NAME}"}
            for audience, parsed in shared
            if parsed
        ]

    def sections(self) -> dict[str, list[dict[str, Any]]]:
        """Return the sections of the file; some may be empty."""
        plan = {name: str(getattr(self._anonymous, name)) for name in ("slug", "name", "default_for")}
        new = self._limits["anon"] and self._anonymous.pk is None
        return {
            "plans": [plan] if new else [],
            "endpoints": [{"name": name} for name in self._endpoints],
            "policies": self.policies(),
        }


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
