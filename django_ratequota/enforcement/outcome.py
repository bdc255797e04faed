"""Charging on outcome: an endpoint may count only responses of some statuses, failed logins say.

A request is charged before its view runs, as any other: requests at the same time cannot slip past. Once the
response is known and its status is not among those that count, that endpoint's buckets get the units back. The
first to know the response does it: the decorator, else the middleware.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.http import Http404
from django.http.multipartparser import MultiPartParserError

from ..engine.charges import Charge, Refund, Settler, charges_of, take_all
from ..engine.types import Decision
from ..policies.snapshot import Snapshot
from ..utils.shielding import shielded

#: What is reserved for a request hangs on it (Django's, not DRF's) under this name; most requests have none.
RESERVED = "ratequota_reserved"


class Reservation(NamedTuple):
    """What a request was charged, and which statuses its response must have for that to stay charged."""

    statuses: frozenset[str]
    charges: list[Charge]
    settler: Settler

    def take(self) -> list[Refund]:
        """The calls that give it back."""
        return take_all(self.charges)


def reserve(request: Any, snapshot: Snapshot, decision: Decision) -> None:
    """Remember what an admitted request may get back; ``decision`` holds the buckets that it was just charged in."""
    if decision.settler is None:
        return
    charges: dict[frozenset[str], list[Charge]] = {}
    for charge in charges_of(decision):
        endpoint = snapshot.endpoints.get(charge.bucket.endpoint_id or 0)
        if endpoint is not None and endpoint.charged_statuses:
            charges.setdefault(endpoint.charged_statuses, []).append(charge)
    for statuses, charged in charges.items():
        vars(request).setdefault(RESERVED, []).append(Reservation(statuses, charged, decision.settler))


def settle(request: Any, outcome: object) -> None:
    """Give back what ``outcome``, a response or a view's exception, does not count; asked again, nothing more.

    A store that fails is logged, and keeps the units.
    """
    for one in _due(request, outcome):
        for buckets, units, charged in one.take():
            one.settler.refund(buckets, cost=units, charged=charged)


async def asettle(request: Any, outcome: object) -> None:
    """``settle``, awaited; units go back although the request's task is cancelled, as its outcome is known."""
    due = [(one.settler, refund) for one in _due(request, outcome) for refund in one.take()]
    if due:
        await shielded(_agive_back(due))


async def _agive_back(due: list[tuple[Settler, Refund]]) -> None:
    for settler, (buckets, units, charged) in due:
        await settler.arefund(buckets, cost=units, charged=charged)


def _due(request: Any, outcome: object) -> list[Reservation]:
    reserved: list[Reservation] = vars(getattr(request, "_request", request)).pop(RESERVED, ())
    if not reserved:
        return []
    status = status_of(outcome)
    counted = {str(status), f"{status // 100}xx"}
    return [one for one in reserved if counted.isdisjoint(one.statuses)]


def status_of(outcome: object) -> int:
    """The response's status; of an exception, or of what is no response, the one that Django makes of it."""
    if isinstance(outcome, Http404):
        return 404
    if isinstance(outcome, PermissionDenied):
        return 403
    if isinstance(outcome, BadRequest | SuspiciousOperation | MultiPartParserError):
        return 400
    return 500 if isinstance(outcome, Exception) else int(getattr(outcome, "status_code", 500))
