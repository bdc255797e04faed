"""Costs computed by the project's code for one request, often from what its client sent.

Asking for more must never cost less. A number above the greatest cost counts as the greatest, which limits refuse. A
request whose cost is not a number of units counts at the endpoint's cost and is answered 400, so that no client gets
work for a price that could not be computed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from inspect import signature
from traceback import walk_tb
from typing import Any

from django.core.exceptions import BadRequest, ValidationError
from django.http import UnreadablePostError

from ..engine.rates import MAX_UNITS, as_integer
from ..engine.types import check_cost
from ..policies.requests.view_facts import exemption_of_request
from ..runtime import process
from ..utils.problems import note_problem
from ..utils.sansio import Twins
from .check_request import is_free
from .settlement import status_of

#: A declared cost: units, or a function of the request; None = the endpoint's own.
Cost = int | Callable[[Any], int | Awaitable[int]] | None
#: Errors of values, which are often the client's: no cost, or nothing to compute one with. Those of a value that is
#: missing are among them: else leaving it out would be cheaper than sending it.
_OF_VALUES = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError, ValidationError)


def computed_cost(
    cost: Callable[[Any], Any], request: Any, of: str, invalid: Callable[[], Exception] = BadRequest
) -> Generator[Twins, Any, tuple[int | None, Exception | None]]:
    """Return the cost, None = the endpoint's own, and the exception to raise after counting the request.

    The function may be async where the steps are awaited; it is not called for a request that is not counted.
    ``of`` and ``invalid`` are those of ``answer_of``.
    """
    try:
        return units_of((yield Twins(cost, cost, (request,)))) if is_counted(request) else None, None
    except Exception as error:
        return None, answer_of(error, of, invalid)


def units_of(cost: object) -> int:
    """Return a computed cost, at most the greatest; raises ``InvalidCost`` unless it is a whole number from 0."""
    units = as_integer(cost)
    return check_cost(cost if units is None else min(units, MAX_UNITS))


def is_counted(request: Any) -> bool:
    """Return whether checks of the request may count it: ENABLED is on, and ``@exempt`` does not cover its view."""
    http = getattr(request, "_request", request)
    return not is_free(process.limiter(), exemption_of_request(request, http), http.method or "GET")


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


def answer_of(error: Exception, of: str, invalid: Callable[[], Exception] = BadRequest) -> Exception | None:
    """Return the exception that answers the client whose request's cost raised ``error``; None = its view runs.

    That is ``error`` itself where it answers the client (invalid JSON, a ``ValidationError`` of REST framework), and
    ``invalid()`` where a value cannot be a cost or be computed with. All but the former are logged under the name
    ``of``, once a minute.
    """
    if answers_client(error) or _reads_body(error):
        return error
    answer = invalid() if isinstance(error, _OF_VALUES) else None
    result = "the request is answered 400" if answer else "the endpoint's cost counts"
    note_problem(of, f"{of} raised {type(error).__name__}: {error}; {result}", error)
    return answer


def answers_client(error: Exception) -> bool:
    """Return whether a view that raises it answers 4xx, or the client has disconnected."""
    code = getattr(error, "status_code", 500)
    return status_of(error) < 500 or isinstance(error, UnreadablePostError) or (isinstance(code, int) and code < 500)


def _reads_body(error: Exception) -> bool:
    """Return whether REST framework failed to parse the body: ``request.data`` is empty then, and raises no more."""
    frames = [frame for frame, _line in walk_tb(error.__traceback__)]
    return any(f.f_code.co_name == "_parse" and f.f_globals["__name__"] == "rest_framework.request" for f in frames)
