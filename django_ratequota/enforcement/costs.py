"""Costs computed by the project's code for one request. If that fails, the endpoint's cost counts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from inspect import signature
from traceback import walk_tb
from typing import Any

from django.http import UnreadablePostError

from ..engine.types import check_cost
from ..exceptions import InvalidCost
from ..utils.problems import note_problem
from ..utils.sansio import Twins
from .check_request import exemption_of_request, is_free
from .settlement import status_of
from .step_runner import limiter_or_error

#: A declared cost: units, or a function of the request; None = the endpoint's own.
Cost = int | Callable[[Any], int | Awaitable[int]] | None


def computed_cost(
    cost: Callable[[Any], Any], request: Any, of: str
) -> Generator[Twins, Any, tuple[int | None, Exception | None]]:
    """Return the cost, None = the endpoint's own, and the exception to raise after counting the request.

    The function may be async where the steps are awaited; it is not called for a request that is not counted. An
    exception that answers the client (invalid JSON, a ``ValidationError`` of REST framework) is returned. Others are
    logged once a minute under the name ``of``, and the request goes on.
    """
    try:
        return check_cost((yield Twins(cost, cost, (request,)))) if is_counted(request) else None, None
    except Exception as error:
        return None, answer_of(error, of)


def is_counted(request: Any) -> bool:
    """Return whether checks of the request may count it: ENABLED is on, and ``@exempt`` does not cover its view."""
    http = getattr(request, "_request", request)
    return not is_free(limiter_or_error(), exemption_of_request(request, http), http.method or "GET")


def check_declared(cost: Any, *arguments: str) -> Any:
    """Return a declared cost, units or a function of the ``arguments``; raises ``InvalidCost`` and ``TypeError``."""
    if cost is None or not callable(cost):
        return cost if cost is None else check_cost(cost)
    try:
        signature(cost).bind(*arguments)
    except ValueError:  # a builtin, whose parameters are unknown
        pass
    except TypeError as error:
        listed = ", ".join(arguments)
        raise TypeError(f"cost is a number of units or a function of ({listed}), not {cost!r}: {error}") from None
    return cost


def answer_of(error: Exception, of: str) -> Exception | None:
    """Return the exception of a cost if it answers the client; log any other under the name ``of``."""
    if isinstance(error, InvalidCost):
        note_problem(of, f"{of}: {error}; the endpoint's cost counts")
    elif answers_client(error) or _reads_body(error):
        return error
    else:
        note_problem(of, f"{of} raised {type(error).__name__}: {error}; the endpoint's cost counts", error)
    return None


def answers_client(error: Exception) -> bool:
    """Return whether a view that raises it answers 4xx, or the client has disconnected."""
    code = getattr(error, "status_code", 500)
    return status_of(error) < 500 or isinstance(error, UnreadablePostError) or (isinstance(code, int) and code < 500)


def _reads_body(error: Exception) -> bool:
    """Return whether REST framework failed to parse the body: ``request.data`` is empty then, and raises no more."""
    frames = [frame for frame, _line in walk_tb(error.__traceback__)]
    return any(f.f_code.co_name == "_parse" and f.f_globals["__name__"] == "rest_framework.request" for f in frames)
