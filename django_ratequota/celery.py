"""Celery (``pip install 'django-ratequota[celery]'``): tasks that wait until a limit has room.

@shared_task
@rate_limited("partner:maps", "12/min")
def geocode(address): ...
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from .enforcement.check_caller import check_caller
from .engine.decision import Decision
from .engine.rates import parse_rates
from .engine.types import Bucket, check_cost
from .exceptions import InvalidCost, InvalidRate, StoreError
from .policies.requests.view_facts import scope_name
from .runtime import default_limiter
from .utils.optional import require
from .utils.problems import note_problem

if TYPE_CHECKING:
    from celery import current_task, exceptions
else:
    current_task, exceptions = require("celery", "celery").current_task, require("celery.exceptions", "celery")

Function = TypeVar("Function", bound=Callable[..., Any])
#: The longest wait until a task asks again (s): far below any broker's ``visibility_timeout``, after which a broker
#: would deliver the task a second time, and short enough for a raised limit to be noticed.
_LONGEST_WAIT = 60.0
#: The header of a task with how often it has been handed back.
_WAITS = "ratequota_waits"


def rate_limited(name: str, rates: str | None = None, *, cost: int | None = None) -> Callable[[Function], Function]:
    """Run a task only when a limit has room; else hand it back to its queue, to ask again within a minute.

    It decorates the function below ``@shared_task`` or ``@app.task``, once. With ``rates``, such as ``12/min`` or
    ``5/s, 1000/day``, ``name`` is the limit's own, and all tasks with that name share it. No period has more than its
    limit, because the algorithm is sliding_window_log where ``rates`` names none. Without ``rates``, ``name`` is that
    of an endpoint: the policies that operators edit apply, as in ``check_caller(scope=name)``. Slots of their rates,
    such as ``2 concurrent``, are held until the task has ended. ``cost`` is in units, None = 1 or the endpoint's own.

    A task that is handed back is not retried: its ``retries`` stay, and no order is promised. Without a worker,
    called or run eagerly, the task is not limited. Raises ``InvalidRate`` and ``InvalidCost`` when decorating.
    """
    scope, buckets = scope_name(name), () if rates is None else _buckets(name, rates)
    units = 1 if cost is None else check_cost(cost)
    if any(units > bucket.rate.capacity for bucket in buckets):
        raise InvalidCost(f"a task of {units} units never fits into {rates}: lower its cost")

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            task = current_task
            if task and not task.request.called_directly and not task.request.is_eager:
                decision, wait = _decided(scope, buckets, cost)
                if decision is None:
                    raise _handed_back(task, wait)
                (task.request.headers or {}).pop(_WAITS, None)  # its own retries wait as new tasks do
                with decision:  # it holds the slots of concurrent rates
                    return function(*args, **kwargs)
            return function(*args, **kwargs)

        # ``delay`` compares arguments with it.
        limited.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return limited  # type: ignore[return-value]

    return decorate


def _buckets(name: str, rates: str) -> tuple[Bucket, ...]:
    parsed = parse_rates(rates, "sliding_window_log")
    if isinstance(parsed, str):
        raise InvalidRate(f"write a rate such as '12/min', not {rates!r}")
    if any(rate.concurrent for rate in parsed):
        # Nothing would renew the slot of a task that takes more than a minute.
        raise InvalidRate(f"only a policy can have {rates!r}: leave the rates out and name its endpoint")
    # The scope keeps the counters of requests apart, whatever the name.
    return tuple(Bucket(name, rate, scope="task") for rate in parsed)


def _decided(scope: str | None, buckets: tuple[Bucket, ...], cost: int | None) -> tuple[Decision | None, float]:
    """Return the decision by which the task may run; else None, and how long it has to wait (s)."""
    units = 1 if cost is None else cost
    try:
        decision = default_limiter().check(buckets, units) if buckets else check_caller(scope=scope, cost=cost)
    except StoreError as error:
        note_problem("tasks", f"tasks wait for their limits, as Redis is unavailable: {error}")
        return None, _LONGEST_WAIT
    if decision.allowed:
        return decision, 0.0
    if decision.retry_after is None:  # an operator may lift a block or raise a limit at any time
        note_problem("tasks", f"tasks wait for {scope!r}, which is blocked, or whose limit is below their cost")
        return None, _LONGEST_WAIT
    return None, decision.retry_after


def _handed_back(task: Any, wait: float) -> Exception:
    """Send the task to its queue again, with a countdown; return the exception that ends this run of it.

    The countdown grows each time, so that a long queue does not ask all the time, and is random, so that tasks that
    were refused together do not ask together.
    """
    request = task.request
    waits = int((request.headers or {}).get(_WAITS, 0)) + 1
    longest = min(_LONGEST_WAIT, max(wait, 0.1) * 1.5 ** min(waits, 30))
    countdown = random.uniform(min(wait, _LONGEST_WAIT / 2), longest)  # noqa: S311
    again = task.signature_from_request(request, countdown=countdown)
    again.set(headers={**(again.options.get("headers") or {}), _WAITS: waits}).apply_async()
    return exceptions.Retry(when=countdown)  # type: ignore[no-any-return]
