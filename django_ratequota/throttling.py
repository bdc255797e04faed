"""Django REST framework: one throttle class for all limits.

REST_FRAMEWORK = {"DEFAULT_THROTTLE_CLASSES": ["django_ratequota.throttling.QuotaThrottle"]}
"""

from __future__ import annotations

from functools import lru_cache
from inspect import signature
from typing import Any

from django.utils.encoding import force_str
from rest_framework.exceptions import APIException
from rest_framework.throttling import BaseThrottle

from .enforcement.check import check_request
from .enforcement.costs import compute_cost
from .engine.types import Decision, check_cost
from .headers import add_headers, retry_after_seconds
from .responses import refusal_text, status_code

#: The attribute of REST framework's request with the decision by which a QuotaThrottle refused it.
_REFUSED = "_ratequota_refused"


class StoreUnavailable(APIException):
    """503: a policy denies while Redis is down. ``wait`` becomes Retry-After."""

    status_code = 503
    default_code = "temporary_reduced_capacity"

    def __init__(self, decision: Decision) -> None:
        super().__init__(refusal_text(decision))
        self.decision = decision
        self.wait = retry_after_seconds(decision)


class QuotaThrottle(BaseThrottle):
    """Enforces every policy that applies to the request, together and in one round trip.

    The view's ``throttle_scope`` names the endpoint. Its ``throttle_cost``, an int, ``(request, view) -> int`` or a
    method ``(self, request) -> int``, is the cost in units; without one, or where it raises, the endpoint's cost.
    """

    def __init__(self) -> None:
        self.decision: Decision | None = None

    def allow_request(self, request: Any, view: Any) -> bool:
        """Return whether the request is admitted. Raises ``StoreUnavailable`` where a policy denies without Redis.

        If ``throttle_cost`` raised an exception that answers the client, raises it again after counting the request.
        """
        # REST framework calls all throttles of a view: a refusal by one of ours is repeated by the next.
        decision, answer = vars(request).get(_REFUSED), None
        if decision is None:
            scope = getattr(view, "throttle_scope", None)
            cost, answer = compute_cost(lambda: _cost(request, view), f"throttle_cost of {type(view).__name__}")
            decision = check_request(request, force_str(scope) if scope else None, cost)
            if not decision.allowed:
                setattr(request, _REFUSED, decision)
        self.decision = decision
        headers = getattr(view, "headers", None)
        if headers is not None:
            # DRF adds these to the response, refused or not, and Retry-After itself, from wait().
            add_headers(headers, decision, request)
            headers.pop("Retry-After", None)
        if not decision.allowed and status_code(decision) == 503:
            raise StoreUnavailable(decision)
        if decision.allowed and answer is not None:
            raise answer
        return bool(decision.allowed)

    def wait(self) -> float | None:
        """Return the seconds until the same request would be admitted; None when waiting cannot help."""
        return self.decision.retry_after if self.decision else None


def _cost(request: Any, view: Any) -> Any:
    """Return the view's ``throttle_cost``, called where it is a function."""
    cost = getattr(view, "throttle_cost", None)
    return check_cost(_computed(cost, request, view)) if callable(cost) else cost


def _computed(cost: Any, request: Any, view: Any) -> Any:
    """Call a function of (request, view), or a method of the view with both, or with the request alone."""
    function: Any = getattr(cost, "__func__", None)
    parameters = () if function is None else _parameters(function)
    if len(parameters) != 2:
        return cost(request, view)
    # A function of (request, view) set on a class looks like a method (self, request) but for its names.
    return cost(request) if parameters[0] in ("self", "cls") else function(request, view)


@lru_cache(maxsize=1024)
def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(signature(function).parameters)
