"""Checks without an HTTP request: of a background task, a message of a websocket, a field of a GraphQL document.

The caller is described by values, and the scope names the endpoint. All else is as in ``check_request``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from functools import lru_cache, partial
from types import EllipsisType
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db.models import Model
from django.http import HttpRequest

from ..conf import settings
from ..engine.decision import Decision, Mode
from ..exceptions import InvalidCaller
from ..policies.matching import Where
from ..policies.requests.caller import UNKNOWN, DescribedCaller, identifier_text, stored_value
from ..policies.requests.view_facts import scope_name
from ..policies.resolver import Resolution
from ..utils.addresses import Address
from ..utils.log import logger
from .check_request import Evaluation
from .on_error import enforce
from .slots import new_slots
from .step_runner import Step, arun, is_unread, run


def check_caller(
    *,
    user: Any = None,
    ip: str | Address | EllipsisType | None = ...,
    identifiers: Mapping[str, Any] | None = None,
    plan: str | None = None,
    scope: str | None = None,
    cost: int | None = None,
) -> Decision:
    """Apply the policies to a caller without a request, and admit or refuse in one round trip.

    ``user`` is a user or its primary key, None = anonymous. ``ip`` is the client's address, None = unknown; leave it
    out where no client is involved: then nothing is counted per ip, nor per caller unless the call has a user or an
    identifier of CALLER. Clients of unknown addresses share one counter instead. ``identifiers`` are the caller's
    values of ``RATEQUOTA["IDENTIFIERS"]`` by name, because their functions need a request. So does
    PLAN_RESOLVER: ``plan`` is the slug that it would return; None = the assigned plan, or else the default plan.
    ``scope`` names the endpoint, whatever its methods. ``cost`` is in units, None = the endpoint's own.

    Each check is independent: it charges its whole cost, and a refusal refunds nothing. It holds its slots of rates
    such as ``20 concurrent`` to the end of ``with check_caller(...) as decision:``; without ``with``, until nothing
    refers to the decision. Its units are billed at once, or with the end of ``with``: so write ``with`` if you settle
    them, or a worker that is killed before will have billed all of them.

    Raises ``InvalidCaller``, ``InvalidCost``, and ``TypeError`` for a scope that is no text. When Redis or the
    database fails, ``on_error`` applies.
    """
    check = CallerCheck("check", scope, cost, user, partial(_described, user, ip, identifiers, plan))
    return run(check.steps())


async def acheck_caller(
    *,
    user: Any = None,
    ip: str | Address | EllipsisType | None = ...,
    identifiers: Mapping[str, Any] | None = None,
    plan: str | None = None,
    scope: str | None = None,
    cost: int | None = None,
) -> Decision:
    """``check_caller``, awaited."""
    check = CallerCheck("check", scope, cost, user, partial(_described, user, ip, identifiers, plan))
    return await arun(check.steps())


def peek_caller(
    *,
    user: Any = None,
    ip: str | Address | EllipsisType | None = ...,
    identifiers: Mapping[str, Any] | None = None,
    plan: str | None = None,
    scope: str | None = None,
    cost: int | None = None,
) -> Decision:
    """Return what ``check_caller`` would decide now; charges and records nothing.

    ``charge`` of the decision charges the caller afterwards, for a failed attempt for example, and never refuses.
    """
    check = CallerCheck("peek", scope, cost, user, partial(_described, user, ip, identifiers, plan))
    return run(check.steps())


async def apeek_caller(
    *,
    user: Any = None,
    ip: str | Address | EllipsisType | None = ...,
    identifiers: Mapping[str, Any] | None = None,
    plan: str | None = None,
    scope: str | None = None,
    cost: int | None = None,
) -> Decision:
    """``peek_caller``, awaited."""
    check = CallerCheck("peek", scope, cost, user, partial(_described, user, ip, identifiers, plan))
    return await arun(check.steps())


class CallerCheck(Evaluation):
    """A check, or a peek, of a caller without a request."""

    def __init__(
        self, mode: Mode, scope: str | None, cost: int | None, user: Any, describe: Callable[[], DescribedCaller]
    ) -> None:
        """``describe`` returns the caller of ``user``; it may query the database for a lazy user not read yet."""
        super().__init__(Where(scope_name(scope)), cost)
        self.mode, self._user, self._describe = mode, user, describe

    def steps(self) -> Generator[Step, Any, Decision]:
        """Check the caller, or peek."""
        self.caller, self.identified = (yield self._describe) if is_unread(self._user) else self._describe(), True
        if self.limiter.unlimited:
            return Decision(allowed=True)
        decision = yield from self.evaluate()
        if self.resolution is not None and not self.caller.unknown and self.caller.name == UNKNOWN:
            self._warn_of_unlimited(self.resolution)
        return decision if self.mode == "peek" else self.record(decision, decision)

    def enforce(self, resolution: Resolution, revision: int | None) -> Generator[Step, Any, Decision]:
        """Check the buckets; the decision holds the slots of concurrent rates."""
        slots = new_slots() if resolution.concurrent and self.mode != "peek" else None
        return enforce(self.limiter, resolution, self.request_for(resolution.buckets, revision, slots))

    def _warn_of_unlimited(self, resolution: Resolution) -> None:
        """Log that an endpoint has policies, but none that counts a check without a caller."""
        plan_id = resolution.plan.id if resolution.plan else None
        applied = {endpoint.id for _policy, endpoint, _buckets in resolution.won if endpoint}
        for endpoint in () if resolution.exempt else self.context.endpoints:
            if endpoint.id in applied:
                continue
            groups = self.snapshot.groups.get(endpoint.id, {})
            counted = [per for per, group in groups.items() if any(policy.mode != "off" for policy in group)]
            subjects = [self.caller.subject(per, plan_id) for per in counted]
            if counted and not any(subjects):
                _log_unlimited(endpoint.name, ", ".join(sorted(counted)))


@lru_cache
def _log_unlimited(endpoint: str, counted_per: str) -> None:
    """Log it once a process."""
    logger.warning(
        "checks of %r without a client are not limited, because its policies are counted per %s. Count one per "
        "everyone, or pass the user, ip or identifiers to check_caller.",
        endpoint,
        counted_per,
    )


def _described(
    user: Any, ip: str | Address | EllipsisType | None, identifiers: Mapping[str, Any] | None, plan: str | None
) -> DescribedCaller:
    """Return the caller that the values describe. Raises ``InvalidCaller``."""
    caller = DescribedCaller(
        user_id=_user_id(user),
        address=None if ip is ... or not ip else str(ip),
        identifiers=_values(identifiers) if identifiers else None,
        plan_slug=plan or None,
    )
    if ip is ...:
        caller.unknown = ""
    elif ip and caller.address is None:
        raise InvalidCaller(f"ip is one address, such as '203.0.113.7', or None, not {str(ip)[:100]!r}")
    return caller


def _user_id(user: Any) -> str | None:
    """Return the primary key of a user, or the key itself, as text; None for anonymous callers."""
    authenticated = getattr(user, "is_authenticated", None)
    if authenticated is not None:
        user = user.pk if authenticated else None
    elif user is not None:
        user = _primary_key(user)
    return None if user is None else str(user)


def _primary_key(user: Any) -> Any:
    """Return the key; of a text the value that it stands for, as a UUID may be written in several ways."""
    if user != "" and not isinstance(user, bool | bytes | Mapping | list | tuple | Model | HttpRequest):
        try:
            identifier_text(user)
            return get_user_model()._meta.pk.to_python(user) if isinstance(user, str) else user
        except (TypeError, ValidationError):
            pass
    raise InvalidCaller(f"user is a user, its primary key, or None for an anonymous caller, not {user!r:.100}")


def _values(identifiers: Mapping[str, Any]) -> dict[str, str]:
    """Return the identifiers that the caller has, as text. Raises ``InvalidCaller`` for names without a setting."""
    if not isinstance(identifiers, Mapping):
        raise InvalidCaller(f"identifiers is a dict of names and values, not {identifiers!r}")
    for name in identifiers:
        if name not in settings.identifiers:
            own = {"user": "user=", "ip": "ip=", "plan": "plan="}.get(name)
            known = ", ".join(settings.identifiers) or "none"
            hint = f"write {own}" if own else f"RATEQUOTA['IDENTIFIERS'] has: {known}"
            raise InvalidCaller(f"there is no identifier {name!r}; {hint}")
    try:
        texts = {name: "" if value is None else identifier_text(value) for name, value in identifiers.items()}
    except TypeError as error:
        raise InvalidCaller(f"identifiers are texts or numbers: {error}") from None
    return {name: stored_value(text) for name, text in texts.items() if text}
