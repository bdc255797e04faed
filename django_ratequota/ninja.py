"""Django Ninja (``pip install 'django-ratequota[ninja]'``): one throttle for all limits, operations sync or async.

api = NinjaAPI(throttle=[QuotaThrottle()])

@api.get("/search", throttle=[QuotaThrottle(scope="search", cost=5)])

Ninja asks the throttles of an async operation on the event loop, and awaits none. So importing this module has it
await ours, after its own checks and before the operation. Import it before the API's ``urls`` are made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from django.http import HttpRequest, HttpResponse, JsonResponse

from .enforcement.check import acheck_request, check_request
from .enforcement.costs import answers_client, compute_cost
from .engine.types import Decision, check_cost
from .exceptions import ConfigurationError
from .headers import add_headers, retry_after_seconds
from .policies.requests.views import LIMITED_ATTRIBUTE, SCOPE_ATTRIBUTE, LateCheck, least_cost
from .responses import problem, refusal_text, status_code
from .utils.optional import require

if TYPE_CHECKING:
    from ninja import errors, operation, throttling
else:
    errors, operation, throttling = (
        require(f"ninja.{name}", "ninja") for name in ("errors", "operation", "throttling")
    )

#: The request whose operation awaits its quotas: nothing is to be asked on the event loop.
_awaiting: ContextVar[Any] = ContextVar("ratequota_awaiting", default=None)
#: What was decided last in this thread: Ninja asks for the wait right after, and does not say of which request.
_decided: ContextVar[Decision | None] = ContextVar("ratequota_decided", default=None)


class StoreUnavailable(errors.Throttled):
    """503: a policy denies because the store gives no decision."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(wait=retry_after_seconds(decision))
        self.status_code, self.message = 503, refusal_text(decision)
        self.decision = decision


class QuotaThrottle(throttling.BaseThrottle):
    """Enforces every policy that applies to the request, together and in one round trip.

    ``scope`` names the endpoint; endpoints that match the route count as well. ``cost`` is in units, an int or
    ``(request) -> int``, None = the endpoint's own. One instance may serve any number of operations: it keeps nothing
    of a request. The caller is the user that Ninja's authentication returned, else ``request.user``.
    """

    def __init__(self, scope: str | None = None, cost: int | Callable[[Any], int] | None = None) -> None:
        """Raises ``InvalidCost``."""
        if cost is not None and not callable(cost):
            cost = check_cost(cost)
        self.scope, self.cost = scope, cost

    def allow_request(self, request: HttpRequest) -> bool:
        """Whether the request is admitted. Raises ``StoreUnavailable`` (503) where a policy denies without store.

        Raises what the cost raised to answer the client, once the request is counted and admitted.
        """
        if _awaiting.get() is request:
            return True
        decision: Decision | None = getattr(request, "ratequota", None)
        answer = None
        # Ninja asks all throttles: what one has refused, another must not be charged for.
        if decision is None or decision.allowed:
            cost, answer = self._cost(request)
            decision = check_request(_asking(request), self.scope, cost)
        _decided.set(decision)
        if not decision.allowed and status_code(decision) == 503:
            raise StoreUnavailable(decision)
        if decision.allowed and answer is not None:
            raise answer
        return decision.allowed

    async def arefuse(self, request: HttpRequest) -> Exception | None:
        """Why the request is refused; None when it is admitted. Raises what the cost raised to answer the client."""
        cost, answer = self._cost(request)
        decision = await acheck_request(_asking(request), self.scope, cost)
        if decision.allowed and answer is not None:
            raise answer
        if decision.allowed:
            return None
        if status_code(decision) == 503:
            return StoreUnavailable(decision)
        return errors.Throttled(wait=retry_after_seconds(decision))

    def wait(self) -> float | None:
        """Whole seconds until the request just refused would be admitted; None when waiting cannot help."""
        decision = _decided.get()
        return retry_after_seconds(decision) if decision else None

    def _cost(self, request: HttpRequest) -> tuple[int | None, Exception | None]:
        cost = self.cost
        if not callable(cost):
            return cost, None
        return compute_cost(lambda: check_cost(cost(request)), f"cost of {self.scope or 'a throttle'}")


def problem_details(request: HttpRequest, exc: Exception) -> HttpResponse:
    """An exception handler: refusals as problem details, whatever the client would rather have.

    api.add_exception_handler(ninja.errors.Throttled, problem_details)
    """
    decision: Decision | None = getattr(request, "ratequota", None)
    if decision is None or decision.allowed:  # another throttle refused it
        return JsonResponse({"detail": str(exc)}, status=getattr(exc, "status_code", 429))
    # Not a page: it may read the database, and async operations have this called on the event loop.
    response = JsonResponse(problem(decision), status=status_code(decision), content_type="application/problem+json")
    return _with_headers(request, response)


class _Authenticated:
    """The request, made by the user that Ninja's authentication returned."""

    def __init__(self, request: HttpRequest, user: Any) -> None:
        self._request, self.user = request, user

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _asking(request: HttpRequest) -> Any:
    auth = getattr(request, "auth", None)
    return _Authenticated(request, auth) if getattr(auth, "is_authenticated", False) is True else request


def _refusal(api: Any, request: HttpRequest, exc: Any) -> HttpResponse:
    """The response by the API's own exception handlers."""
    response: HttpResponse = api.on_exception(request, exc)
    if exc.wait is not None:
        response["Retry-After"] = str(exc.wait)
    return _with_headers(request, response)


def _answer(api: Any, request: HttpRequest, exc: Exception) -> HttpResponse:
    """The response by the API's exception handlers to what a cost raised for the client; raises all else."""
    if not answers_client(exc):
        raise exc
    response: HttpResponse = api.on_exception(request, exc)
    return response


def _with_headers(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    decision: Decision | None = getattr(request, "ratequota", None)
    if decision is not None and not decision.allowed:
        add_headers(response, decision, request)
    return response


def _quotas(each: Any) -> list[QuotaThrottle]:
    """The quotas of an operation."""
    return [one for one in each.throttle_objects if isinstance(one, QuotaThrottle)]


def _scope(operations: Any) -> str | None:
    """The scope that all operations of a view name, "" = none of them or several; None where one has no quota."""
    ours = [_quotas(each) for each in operations]
    if not all(ours):
        return None
    scopes = {throttle.scope or "" for some in ours for throttle in some}
    return scopes.pop() if len(scopes) == 1 else ""


def _late_check(each: Any) -> LateCheck | None:
    """What an operation asks after it has authenticated; None where it has no quota."""
    ours = _quotas(each)
    if not ours:
        return None
    if len(ours) > 1:
        return LateCheck(_scope([each]) or None, 1)
    return LateCheck(ours[0].scope, least_cost(ours[0].cost))


def _have_ours_checked() -> None:
    """Wrap what Ninja does before an operation, and how it makes views; once."""
    check, acheck, get_view = (vars(kind).get(name) for kind, name in _WRAPPED)
    if check is None or acheck is None or get_view is None:
        raise ConfigurationError(
            "This version of django-ninja checks throttles in a way that QuotaThrottle does not know."
        )

    @functools.wraps(check)
    def check_throttles(self: Any, request: HttpRequest) -> HttpResponse | None:
        try:
            response: HttpResponse | None = check(self, request)
        except StoreUnavailable as exc:
            return _refusal(self.api, request, exc)
        except Exception as exc:
            return _answer(self.api, request, exc)
        return response if response is None else _with_headers(request, response)

    @functools.wraps(acheck)
    async def run_checks(self: Any, request: HttpRequest) -> HttpResponse | None:
        token = _awaiting.set(request)
        try:
            response: HttpResponse | None = await acheck(self, request)
        finally:
            _awaiting.reset(token)
        for quota in () if response else _quotas(self):
            try:
                exc = await quota.arefuse(request)
            except Exception as error:
                return _answer(self.api, request, error)
            if exc is not None:
                return _refusal(self.api, request, exc)
        return response

    @functools.wraps(get_view)
    def get_marked_view(self: Any) -> Any:
        view, scope = get_view(self), _scope(self.operations)
        limited = {method: _late_check(each) for each in self.operations for method in each.methods}
        if any(one is not None for one in limited.values()):
            setattr(view, LIMITED_ATTRIBUTE, limited)
        if scope is not None:
            # ENFORCE_ALL then leaves it alone, and operators find the scope.
            setattr(view, SCOPE_ATTRIBUTE, scope)
        return view

    operation.Operation._check_throttles = check_throttles  # type: ignore[method-assign]
    operation.AsyncOperation._run_checks = run_checks  # type: ignore[method-assign]
    operation.PathView.get_view = get_marked_view  # type: ignore[method-assign]


_WRAPPED = (
    (operation.Operation, "_check_throttles"),
    (operation.AsyncOperation, "_run_checks"),
    (operation.PathView, "get_view"),
)
_have_ours_checked()
