"""Adds the rate limit headers to every response, and enforces every view with ENFORCE_ALL.

It ends the checks of a request with its response, see ``enforcement.request_end``.

With COUNT_UNCHECKED it also counts requests that views refuse before their check, see ``enforcement.unchecked``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async

from .conf import settings
from .enforcement.check_request import acheck_request, check_request
from .enforcement.earlier_checks import CHECKS, RequestChecks
from .enforcement.request_end import aend, end, leave_to_body
from .enforcement.settlement import RESERVED, asettle, settle
from .enforcement.step_runner import arun, run
from .enforcement.unchecked import FirstCheck
from .headers import add_headers
from .policies.requests.view_facts import facts_of
from .responses import MAX_ACCEPT, arefusal_response, refusal_response
from .utils.sansio import Twins, acall, adrive, call, drive


class RateQuotaMiddleware:
    """Sync and async middleware; list it after the one that sets ``request.user``."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self.get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        self.process_view = self._aprocess_view if self._is_async else self._process_view
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: Any) -> Any:
        """Return the response, with the headers of the request's decision."""
        vars(request).setdefault(CHECKS, RequestChecks()).watched = True
        if self._is_async:
            return self._acall(request)
        try:
            return drive(_finish(request, self.get_response(request)), call)
        except BaseException:
            end(request)
            raise

    async def _acall(self, request: Any) -> Any:
        try:
            return await adrive(_finish(request, await self.get_response(request)), acall)
        except BaseException as error:
            await aend(request, error)
            raise

    def _process_view(self, request: Any, view: Any, args: Any, kwargs: Any) -> Any:
        return drive(_check_before_view(request, view, args, kwargs), call)

    async def _aprocess_view(self, request: Any, view: Any, args: Any, kwargs: Any) -> Any:
        return await adrive(_check_before_view(request, view, args, kwargs), acall)


def _check_before_view(request: Any, view: Any, args: Any, kwargs: Any) -> Generator[Twins, Any, Any]:
    """Return the response that refuses the request; None where its view may run."""
    facts = facts_of(view)
    late = facts.late_check(request.method) if settings.count_unchecked else None
    refused = None
    if late is not None:
        refused = yield Twins(run, arun, (FirstCheck(request, *late).refuse(),))
    if refused is None and settings.enforce_all:
        if facts.chooses_throttles:  # the project's own code, which may read the database
            asked = (request, view, args, kwargs)
            itself = yield Twins(_enforces_itself, sync_to_async(_enforces_itself), asked)
        else:
            itself = facts.enforces_itself(request.method)
        if not itself:
            decision = yield Twins(check_request, acheck_request, (request, late and late.scope))
            refused = None if decision.allowed else decision
    return None if refused is None else (yield Twins(refusal_response, arefusal_response, (request, refused)))


def _enforces_itself(request: Any, view: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a view that chooses its throttles checks the request by one of ours, or is decorated."""
    facts = facts_of(view)
    if facts.is_decorated(request.method):
        return True
    # Choosing throttles negotiates the content a second time, which is slow for a long Accept.
    is_short = len(request.META.get("HTTP_ACCEPT", "")) <= MAX_ACCEPT
    return is_short and facts.throttles_itself(request, args, kwargs)


def _finish(request: Any, response: Any) -> Generator[Twins, Any, Any]:
    """Return the response that the request gets, once the checks that no view has finished are."""
    checks: RequestChecks = vars(request)[CHECKS]
    if checks.first is not None:
        refused = yield Twins(run, arun, (checks.first.conclude(response.status_code),))
        if refused is not None:
            response = yield Twins(refusal_response, arefusal_response, (request, refused))
    if RESERVED in vars(request):
        yield Twins(settle, asettle, (request, response))
    slots = checks.slots
    if getattr(response, "streaming", False) and (slots is not None or checks.durable):
        leave_to_body(request, response, checks)
    else:
        checks.ended = True
        if slots is not None:
            yield Twins(slots.release, slots.arelease, ())
    decision = getattr(request, "ratequota", None)
    if decision is not None:
        add_headers(response, decision, request)
    return response
