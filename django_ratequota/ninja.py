"""Django Ninja (``pip install 'django-ratequota[ninja]'``): one throttle for all limits, operations sync or async.

api = NinjaAPI(throttle=[QuotaThrottle()])

@api.get("/search", throttle=[QuotaThrottle(scope="search", cost=5)])

Ninja calls the throttles of an async operation on the event loop and awaits none. So importing this module patches
Ninja to await ``QuotaThrottle`` after its own checks. Import it before the API's ``urls`` are created.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from django.http import HttpRequest, HttpResponse, JsonResponse

from .enforcement.check_request import acheck_request, check_request
from .enforcement.costs import Cost, answers_client, check_declared, computed_cost
from .engine.decision import Decision
from .exceptions import ConfigurationError
from .headers import add_headers, retry_after_seconds
from .policies.requests.view_declarations import LIMITED_ATTRIBUTE, LateCheck, least_cost
from .policies.requests.view_facts import scope_name
from .responses import problem, refusal_text, status_code
from .utils.optional import require
from .utils.sansio import Twins, acall, adrive, call, drive

if TYPE_CHECKING:
    from ninja import errors, operation, throttling
else:
    errors, operation, throttling = (
        require(f"ninja.{name}", "ninja") for name in ("errors", "operation", "throttling")
    )

#: The request of an async operation: its QuotaThrottles are awaited later, and must not block the event loop.
_awaiting: ContextVar[Any] = ContextVar("ratequota_awaiting", default=None)
#: The last refusal in this thread, None = the request was admitted: Ninja calls wait() right after, without it.
_refusal: ContextVar[Exception | None] = ContextVar("ratequota_refusal", default=None)


#: The answer to a request whose cost cannot be computed.
_invalid = functools.partial(errors.HttpError, 400, "Bad Request")


class StoreUnavailable(errors.Throttled):
    """503: a policy denies while Redis is down."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(wait=retry_after_seconds(decision))
        self.status_code, self.message = 503, refusal_text(decision)
        self.decision = decision


class QuotaThrottle(throttling.BaseThrottle):
    """Enforces every policy that applies to the request, together and in one round trip.

    ``scope`` names the endpoint; endpoints that match the route count as well. ``cost`` is in units, an int or
    ``(request) -> int``, None = the endpoint's own; for async operations the function may be async. One instance may
    serve any number of operations: it holds no state of requests. The caller is the user that Ninja's authentication
    returned, else ``request.user``.
    """

    def __init__(self, scope: str | None = None, cost: Cost = None) -> None:
        """Raises ``InvalidCost``, and ``TypeError`` for a scope that is no text, or a function of other arguments."""
        self.scope, self.cost = scope_name(scope), check_declared(cost, "request")
        self._of = f"cost of {scope or 'a throttle'}"

    def allow_request(self, request: HttpRequest) -> bool:
        """Return whether the request is admitted. Raises ``StoreUnavailable`` where a policy denies without Redis.

        If ``cost`` raised an exception that answers the client, raises it again after counting the request.
        """
        if _awaiting.get() is request:
            return True
        refusal = drive(self._refuse(request), call)
        _refusal.set(refusal)
        if refusal is None or type(refusal) is errors.Throttled:
            return refusal is None
        raise refusal

    async def arefuse(self, request: HttpRequest) -> Exception | None:
        """Return the exception that refuses an async operation's request; None when it is admitted."""
        return await adrive(self._refuse(request), acall)

    def _refuse(self, request: HttpRequest) -> Generator[Twins, Any, Exception | None]:
        decision: Decision | None = getattr(request, "ratequota", None)
        answer = None
        # Ninja calls all throttles: after a refusal by one, the next must not charge.
        if decision is None or decision.allowed:
            cost = self.cost
            if callable(cost):
                cost, answer = yield from computed_cost(cost, request, self._of, _invalid)
            decision = yield Twins(check_request, acheck_request, (_with_user(request), self.scope, cost))
        if decision.allowed:
            return answer
        if status_code(decision) == 503:
            return StoreUnavailable(decision)
        return errors.Throttled(wait=retry_after_seconds(decision))

    def wait(self) -> float | None:
        """Return whole seconds until the request just refused would be admitted; None when waiting cannot help."""
        return getattr(_refusal.get(), "wait", None)


def problem_details(request: HttpRequest, exc: Exception) -> HttpResponse:
    """Exception handler: answer refusals with problem details, whatever media type the client prefers.

    api.add_exception_handler(ninja.errors.Throttled, problem_details)
    """
    decision: Decision | None = getattr(request, "ratequota", None)
    if decision is None or decision.allowed:  # another throttle refused it
        return JsonResponse({"detail": str(exc)}, status=getattr(exc, "status_code", 429))
    # No HTML: a template may read the database, and async operations call this on the event loop.
    response = JsonResponse(problem(decision), status=status_code(decision), content_type="application/problem+json")
    return _with_headers(request, response)


class _Authenticated:
    """The request, with the user that Ninja's authentication returned."""

    def __init__(self, request: HttpRequest, user: Any) -> None:
        self._request, self.user = request, user

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _with_user(request: HttpRequest) -> Any:
    auth = getattr(request, "auth", None)
    return _Authenticated(request, auth) if getattr(auth, "is_authenticated", False) is True else request


def _response(api: Any, request: HttpRequest, exc: Exception) -> HttpResponse:
    """Return the response of the API's own exception handlers; raise what answers no client."""
    if not isinstance(exc, errors.Throttled) and not answers_client(exc):
        raise exc
    return _with_headers(request, api.on_exception(request, exc))


def _with_headers(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    decision: Decision | None = getattr(request, "ratequota", None)
    if decision is not None and not decision.allowed:
        add_headers(response, decision, request)
    return response


def _throttles(ninja_operation: Any) -> list[QuotaThrottle]:
    """Return the QuotaThrottles of an operation."""
    return [throttle for throttle in ninja_operation.throttle_objects if isinstance(throttle, QuotaThrottle)]


def _late_check(ninja_operation: Any) -> LateCheck | None:
    """Return the check that an operation makes after authentication; None without a QuotaThrottle."""
    throttles = _throttles(ninja_operation)
    scopes = {throttle.scope for throttle in throttles}
    cost = least_cost(throttles[0].cost) if len(throttles) == 1 else 1
    return LateCheck(scopes.pop() if len(scopes) == 1 else None, cost) if throttles else None


def _patch_ninja() -> None:
    """Wrap three methods of Ninja: the checks before sync and async operations, and the creation of views."""
    check = vars(operation.Operation).get("_check_throttles")
    acheck = vars(operation.AsyncOperation).get("_run_checks")
    get_view = vars(operation.PathView).get("get_view")
    if check is None or acheck is None or get_view is None:
        raise ConfigurationError("QuotaThrottle does not support this version of django-ninja.")

    @functools.wraps(check)
    def check_throttles(self: Any, request: HttpRequest) -> HttpResponse | None:
        try:
            response: HttpResponse | None = check(self, request)
        except Exception as exc:
            return _response(self.api, request, exc)
        return response if response is None else _with_headers(request, response)

    @functools.wraps(acheck)
    async def run_checks(self: Any, request: HttpRequest) -> HttpResponse | None:
        token = _awaiting.set(request)
        try:
            response: HttpResponse | None = await acheck(self, request)
        finally:
            _awaiting.reset(token)
        for throttle in () if response else _throttles(self):
            exc = await throttle.arefuse(request)
            if exc is not None:
                return _response(self.api, request, exc)
        return response

    @functools.wraps(get_view)
    def get_marked_view(self: Any) -> Any:
        view = get_view(self)
        limited = {method: _late_check(each) for each in self.operations for method in each.methods}
        if any(limited.values()):
            # ENFORCE_ALL then skips these methods, and the admin lists their scopes.
            setattr(view, LIMITED_ATTRIBUTE, limited)
        return view

    operation.Operation._check_throttles = check_throttles  # type: ignore[method-assign]
    operation.AsyncOperation._run_checks = run_checks  # type: ignore[method-assign]
    operation.PathView.get_view = get_marked_view  # type: ignore[method-assign]


_patch_ninja()
