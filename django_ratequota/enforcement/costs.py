"""Costs that the project's code computes for one request. Where that fails, the request is counted all the same."""

from __future__ import annotations

from collections.abc import Callable
from traceback import walk_tb

from django.http import UnreadablePostError

from ..engine.types import check_cost
from ..exceptions import InvalidCost
from ..utils.problems import note_problem
from .settlement import status_of


def compute_cost(compute: Callable[[], object], of: str) -> tuple[int | None, Exception | None]:
    """Return the cost, None = the endpoint's own, and the exception to raise once the request is counted.

    The endpoint's cost stands in for one that cannot be computed. An exception that answers the client (a body that
    is no JSON, a ``ValidationError`` of REST framework) still answers it. Others are logged once a minute, and the
    request goes on. ``of`` names the cost in the log.
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
    """Whether a view that raises it answers 4xx, or the client has gone away."""
    code = getattr(error, "status_code", 500)
    return status_of(error) < 500 or isinstance(error, UnreadablePostError) or (isinstance(code, int) and code < 500)


def _reads_body(error: Exception) -> bool:
    """Whether REST framework failed to parse the body: from then on ``request.data`` is empty, and raises nothing."""
    frames = [frame for frame, _line in walk_tb(error.__traceback__)]
    return any(f.f_code.co_name == "_parse" and f.f_globals["__name__"] == "rest_framework.request" for f in frames)
