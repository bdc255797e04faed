"""Costs computed by the project's code for one request. If that fails, the endpoint's cost counts."""

from __future__ import annotations

from collections.abc import Callable
from traceback import walk_tb

from django.http import UnreadablePostError

from ..engine.types import check_cost
from ..exceptions import InvalidCost
from ..utils.problems import note_problem
from .settlement import status_of


def compute_cost(compute: Callable[[], object], of: str) -> tuple[int | None, Exception | None]:
    """Return the cost, None = the endpoint's own, and the exception to raise after counting the request.

    An exception that answers the client (invalid JSON, a ``ValidationError`` of REST framework) is returned. Others
    are logged once a minute under the name ``of``, and the request goes on.
    """
    try:
        cost = compute()
        return None if cost is None else check_cost(cost), None
    except InvalidCost as error:
        note_problem(of, f"{of}: {error}; the endpoint's cost counts")
    except Exception as error:
        if answers_client(error) or _reads_body(error):
            return None, error
        note_problem(of, f"{of} raised {type(error).__name__}: {error}; the endpoint's cost counts", error)
    return None, None


def answers_client(error: Exception) -> bool:
    """Return whether a view that raises it answers 4xx, or the client has disconnected."""
    code = getattr(error, "status_code", 500)
    return status_of(error) < 500 or isinstance(error, UnreadablePostError) or (isinstance(code, int) and code < 500)


def _reads_body(error: Exception) -> bool:
    """Return whether REST framework failed to parse the body: ``request.data`` is empty then, and raises no more."""
    frames = [frame for frame, _line in walk_tb(error.__traceback__)]
    return any(f.f_code.co_name == "_parse" and f.f_globals["__name__"] == "rest_framework.request" for f in frames)
