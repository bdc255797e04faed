"""Exception handler for Django REST framework: refusals as problem details (RFC 9457), as outside DRF.

REST_FRAMEWORK = {"EXCEPTION_HANDLER": "django_ratequota.errors.exception_handler"}
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from rest_framework import views
from rest_framework.exceptions import Throttled
from rest_framework.response import Response

from .engine.decision import Decision
from .responses import problem
from .throttling import StoreUnavailable

Handler = Callable[[Exception, dict[str, Any]], Response | None]


def problem_details(handler: Handler) -> Handler:
    """Wrap an exception handler, so that refused requests get problem details.

    ``handler`` runs first: its headers stay, and further keys of its body. Other exceptions are left to it.
    """

    @wraps(handler)
    def handle(exc: Exception, context: dict[str, Any]) -> Response | None:
        response = handler(exc, context)
        decision = _refusal(exc, context)
        return response if response is None or decision is None else _as_problem(response, decision, exc, context)

    # Read by ``openapi`` to document the responses.
    handle.returns_problems = True  # type: ignore[attr-defined]
    return handle


def _refusal(exc: Exception, context: dict[str, Any]) -> Decision | None:
    """Return the decision that refused the request; None where the exception is not ours."""
    if isinstance(exc, StoreUnavailable):
        return exc.decision
    if not isinstance(exc, Throttled):
        return None
    request = context.get("request")
    decision: Decision | None = getattr(getattr(request, "_request", request), "ratequota", None)
    return None if decision is None or decision.allowed else decision


def _as_problem(response: Response, decision: Decision, exc: Any, context: dict[str, Any]) -> Response:
    body = problem(decision)
    if exc.wait != body["retry_after"]:
        # Another throttle refused as well, with a longer wait: the body shows that wait, as the header does.
        body |= {"retry_after": exc.wait, "detail": str(exc.detail)}
    response.data = {**(response.data if isinstance(response.data, dict) else {}), **body}
    renderer = getattr(context.get("request"), "accepted_renderer", None)
    # Not for the browsable API, which stays HTML.
    if getattr(renderer, "media_type", "") == "application/json":
        response.content_type = "application/problem+json"
    return response


#: DRF's own handler, with problem details for refused requests.
exception_handler = problem_details(views.exception_handler)
