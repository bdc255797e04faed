"""What happens to a charge after the decision: settled by hand, or refunded by the response's status.

An endpoint may count only responses of some statuses, such as failed logins. A request is charged before its view
runs, as any other, so that simultaneous requests cannot slip past. When the response has no status that counts, that
endpoint's buckets get the units back: the decorator does it, or else the middleware.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import lru_cache
from typing import Any, NamedTuple

from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.http import Http404
from django.http.multipartparser import MultiPartParserError

from ..engine.decision import Charge, Charges, Decision, LimitRequest, Settler, charges_of, take_all
from ..engine.limiter import Limiter
from ..exceptions import StoreError
from ..ledger import book
from ..ledger.noted import Entry, Settled
from ..ledger.restoring import restore
from ..monitoring.health import note_degraded
from ..monitoring.workers import is_kept
from ..policies.snapshot import Snapshot
from ..utils.shielding import shielded
from .step_runner import Step, arun, run

#: The attribute of Django's request with its reservations; most requests have none.
RESERVED = "ratequota_reserved"


class StoreSettler(NamedTuple):
    """Charges and refunds in the store after the decision; failures are logged and fail no request."""

    limiter: Limiter

    def decide(self, request: LimitRequest) -> Decision:
        return run(self.steps(request))

    async def adecide(self, request: LimitRequest) -> Decision:
        return await arun(self.steps(request))

    def steps(self, request: LimitRequest) -> Generator[Step, Any, Decision]:
        """Yield the steps of either verb, for a check to run among its own."""
        limiter = self.limiter
        kept = is_kept(limiter)
        try:
            decision = yield from limiter.ask(request._replace(restore=restore if kept else None))
        except StoreError as error:
            note_degraded(error.reason, error)
            # The work is done, so it is billed, and a later refund takes it first.
            decision = _unanswered(request, limiter.now_us, error.reason)
        if kept:
            if charged := request.charged:
                now_us = decision.at_us or limiter.now_us
                taken = (bucket for bucket in request.buckets if bucket.durable)
                entries = [Entry(bucket, request.cost, charged.at_us, now_us) for bucket in taken]
            else:
                entries = book.entries_of(decision)
            if entries or request.holds:
                book.note((Settled(entries, request.holds),))
        return decision


#: Returns the settler of a limiter: there is one, until the settings change.
store_settler = lru_cache(maxsize=1)(StoreSettler)


def _unanswered(request: LimitRequest, now_us: int, reason: str) -> Decision:
    """Return the decision of a charge or refund that the store did not answer."""
    charges = Charges()
    if request.mode == "charge":
        units = zip(request.buckets, request.units(), strict=True)
        charges = Charges(Charge(bucket, taken, now_us, level_us=0) for bucket, taken in units if taken)
    return Decision(allowed=True, error=reason, _charges=charges)


class Reservation(NamedTuple):
    """The charges of a request that its response may refund, and the statuses with which they stay."""

    statuses: frozenset[str]
    charges: list[Charge]
    settler: Settler


def reserve(request: Any, snapshot: Snapshot, decision: Decision) -> None:
    """Remember the charges of an admitted request that its response's status may refund."""
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
    """Refund the charges that do not count with ``outcome``, a response or a view's exception; once per request.

    Failures of the store are logged; then the units stay charged.
    """
    for settler, refund in _refunds(request, outcome):
        settler.decide(refund)


async def asettle(request: Any, outcome: object) -> None:
    """``settle``, awaited; units are refunded even if the request's task is cancelled, as the outcome is known."""
    if refunds := _refunds(request, outcome):
        await shielded(_arefund(refunds))


async def _arefund(refunds: list[tuple[Settler, LimitRequest]]) -> None:
    for settler, refund in refunds:
        await settler.adecide(refund)


def _refunds(request: Any, outcome: object) -> list[tuple[Settler, LimitRequest]]:
    reservations: list[Reservation] = vars(getattr(request, "_request", request)).pop(RESERVED, ())
    if not reservations:
        return []
    status = status_of(outcome)
    counted = {str(status), f"{status // 100}xx"}
    if status == 304:  # a 200 that the client has already; the view ran
        counted |= {"200", "2xx"}
    return [
        (reservation.settler, refund)
        for reservation in reservations
        if counted.isdisjoint(reservation.statuses)
        for refund in take_all(reservation.charges)
    ]


def status_of(outcome: object) -> int:
    """Return a response's status; of an exception or anything else, the status with which Django answers it."""
    if isinstance(outcome, Http404):
        return 404
    if isinstance(outcome, PermissionDenied):
        return 403
    if isinstance(outcome, BadRequest | SuspiciousOperation | MultiPartParserError):
        return 400
    return 500 if isinstance(outcome, Exception) else int(getattr(outcome, "status_code", 500))
