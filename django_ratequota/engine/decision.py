"""Decisions: what a check finds, and the charges, refunds and settlements that may follow it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..utils.locks import ForkSafeLock
from ..utils.shielding import shielded
from .charges import Charges, Refund, Settler, charges_of, take
from .types import Bucket, BucketStatus, check_cost, fast_init

_SECOND = 10**6
#: Held while a decision's units are noted, so that two threads do not settle the same difference.
_settling = ForkSafeLock()
#: Retry-After of a request that was denied because the store failed: stores come back within seconds, or much later.
_STORE_RETRY_US = 1 * _SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The outcome of one check: allowed or not, and how each bucket stands."""

    allowed: bool
    #: Same order and length as the buckets checked.
    statuses: tuple[BucketStatus, ...] = ()
    #: The store's clock at the decision, µs since the Unix epoch; 0 when the store was not reached.
    at_us: int = 0
    #: Names of the policies whose rates are ``blocked``; these have no bucket.
    blocked_by: tuple[str, ...] = ()
    #: Names of the policies that deny because the store gave no decision.
    denied_by: tuple[str, ...] = ()
    #: Why the store gave no decision (``timeout``, ``readonly`` ...); "" when it gave one.
    error: str = ""
    #: The revision of the policies; 0 without policies from the database.
    revision: int = 0
    #: Finds the refusal in the admin; 10 letters and digits on a refusal that was recorded, else "".
    refusal_id: str = ""
    settler: Settler | None = field(default=None, repr=False, compare=False)
    #: Units charged to each bucket that had room; 0 when refused, and for a peek.
    cost: int = 0
    # What was charged and not given back; ``charges_of`` makes it on first use, as few decisions settle.
    _charges: Charges | None = field(default=None, repr=False, compare=False)
    # The counters of its own check, where the request's earlier checks add statuses; None = all.
    _own: frozenset[object] | None = field(default=None, repr=False, compare=False)
    # The response headers, once rendered; a copy with other fields does not take them over.
    _headers: dict[str, str] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def degraded(self) -> bool:
        """Whether the policies' ``on_error`` decided, because the store did not."""
        return bool(self.error)

    @property
    def refusing(self) -> tuple[BucketStatus, ...]:
        """The enforced buckets that had no room; empty when allowed."""
        return () if self.allowed else tuple(status for status in self.statuses if status.refused)

    @property
    def violated(self) -> tuple[str, ...]:
        """Names of the policies that refused, as clients may see them."""
        return (*self.blocked_by, *self.denied_by, *(status.bucket.title for status in self.refusing))

    @property
    def retry_after_us(self) -> int | None:
        """µs until the same request would be admitted; None when waiting cannot help.

        0 when it was admitted, except from ``acquire``: there it is the wait for the booked slot.
        """
        if self.allowed:
            return max((status.retry_after_us or 0 for status in self.statuses if status.allowed), default=0)
        if self.denied_by and not self.blocked_by:
            return _STORE_RETRY_US
        waits = [status.retry_after_us for status in self.refusing]
        if self.blocked_by or not waits or None in waits:
            return None
        return max(wait for wait in waits if wait is not None)

    @property
    def retry_after(self) -> float | None:
        """``retry_after_us`` in seconds."""
        wait = self.retry_after_us
        return None if wait is None else wait / _SECOND

    @property
    def binding(self) -> BucketStatus | None:
        """The enforced bucket that matters most: refused with the longest wait, else the smallest remaining share."""
        if self.refusing:
            return max(self.refusing, key=lambda s: float("inf") if s.retry_after_us is None else s.retry_after_us)
        enforced = [status for status in self.statuses if status.bucket.mode == "enforce"]
        return min(enforced, key=lambda s: s.remaining / s.limit, default=None)

    @property
    def limit(self) -> int | None:
        """The most units that the tightest bucket (``binding``) holds; None where nothing limits."""
        return None if (tightest := self.binding) is None else tightest.limit

    @property
    def remaining(self) -> int | None:
        """Whole units still free in the tightest bucket; None where nothing limits."""
        return None if (tightest := self.binding) is None else tightest.remaining

    @property
    def reset_after(self) -> float | None:
        """Seconds until the tightest bucket is back to full; None where nothing limits."""
        return None if (tightest := self.binding) is None else tightest.reset_after

    @property
    def _charged(self) -> tuple[Bucket, ...]:
        """The buckets that were charged units: none when refused, and no log-mode bucket without room."""
        statuses = self.statuses if self.allowed else ()
        buckets = tuple(s.bucket for s in statuses if s.allowed and s.bucket.rate.counts == "units")
        own = self._own
        return buckets if own is None else tuple(bucket for bucket in buckets if bucket.counter in own)

    def charge(self, cost: int) -> Decision:
        """Charge the buckets that were charged ``cost`` units more; never refuses, and may go into debt.

        Rates that count requests, and log-mode buckets without room, stay uncharged. A refused decision charges
        nothing and returns itself.
        """
        if not self.settler or not self._charged:
            return self
        with _settling:
            charges_of(self).units += check_cost(cost)
        return self._note(self.settler.charge(self._charged, cost=cost))

    def refund(self, cost: int) -> Decision:
        """Give ``cost`` units back to the buckets that were charged.

        Never gives back more than this decision charged, nor what has drained or expired since. Rates that count
        requests keep the request. A decision that charged nothing returns itself.
        """
        if not self.settler or not self._charged:
            return self
        settler = self.settler
        return self._after([settler.refund(of, cost=units, charged=at) for of, units, at in self._take(cost)])

    def settle(self, actual: int) -> Decision:
        """Charge or refund the difference to the ``actual`` units of the request; never refuses.

        The same ``actual`` again changes nothing, as charges and refunds by hand are taken into account, and returns
        what the last of these did. If the store does not answer, the difference is not charged, neither now nor by a
        later call.
        """
        more, refunds = self._settlement(actual)
        settler = self.settler
        if more and settler:
            return self._note(settler.charge(self._charged, cost=more))
        if refunds and settler:
            return self._after([settler.refund(of, cost=units, charged=at) for of, units, at in refunds])
        return charges_of(self).latest or self

    async def acharge(self, cost: int) -> Decision:
        """``charge``, awaited; it reaches the store although the awaiting task is cancelled."""
        if not self.settler or not self._charged:
            return self
        with _settling:
            charges_of(self).units += check_cost(cost)
        return await shielded(self._acharge(self.settler, cost))

    async def arefund(self, cost: int) -> Decision:
        """``refund``, awaited; it reaches the store although the awaiting task is cancelled."""
        if not self.settler or not self._charged:
            return self
        refunds = self._take(cost)
        return await shielded(self._arefund(self.settler, refunds)) if refunds else self

    async def asettle(self, actual: int) -> Decision:
        """``settle``, awaited; it reaches the store although the awaiting task is cancelled."""
        more, refunds = self._settlement(actual)
        if more and self.settler:
            return await shielded(self._acharge(self.settler, more))
        if refunds and self.settler:
            return await shielded(self._arefund(self.settler, refunds))
        return charges_of(self).latest or self

    async def _acharge(self, settler: Settler, cost: int) -> Decision:
        return self._note(await settler.acharge(self._charged, cost=cost))

    async def _arefund(self, settler: Settler, refunds: list[Refund]) -> Decision:
        return self._after([await settler.arefund(of, cost=units, charged=at) for of, units, at in refunds])

    def _note(self, charged: Decision) -> Decision:
        """Add the charges to this decision's, and share them with the returned one."""
        charges, later = charges_of(self), charges_of(charged)
        for charge in later:
            charge.settled = True
        charges += later
        return self._with(charged, charged.statuses)

    def _settlement(self, actual: int) -> tuple[int, list[Refund]]:
        """Note the actual units of the request; returns the units to charge, and the refunds."""
        actual = check_cost(actual)
        if not self.settler or not self._charged:
            return 0, []
        with _settling:
            charges = charges_of(self)
            more = actual - charges.units
            if more < 0:
                return 0, self._take_units(-more)
            charges.units = actual
            return more, []

    def _take(self, cost: int) -> list[Refund]:
        cost = check_cost(cost)
        with _settling:
            return self._take_units(cost)

    def _take_units(self, cost: int) -> list[Refund]:
        charges = charges_of(self)
        own = [charge for charge in charges if charge.bucket.rate.counts == "units"]
        held: dict[object, int] = {}
        for charge in own:
            held[charge.bucket.counter] = held.get(charge.bucket.counter, 0) + charge.units
        # What an earlier check paid is not given back here, and so stays among the request's units.
        cost = min(cost, max(held.values(), default=0))
        charges.units = max(0, charges.units - cost)
        return take(own, cost)

    def _after(self, refunds: list[Decision]) -> Decision:
        """Return the charged buckets' statuses after the last of these refunds."""
        if not refunds:
            return self
        return self._with(refunds[-1], [status for refund in refunds for status in refund.statuses])

    def _with(self, settled: Decision, statuses: Iterable[BucketStatus]) -> Decision:
        """Return the settler's decision over all buckets that were charged, with these statuses of some of them."""
        now = {status.bucket.counter: status for status in statuses}
        found = tuple(now.get(status.bucket.counter, status) for status in self.statuses if status.allowed)
        charges = charges_of(self)
        latest = replace(settled, statuses=found if now else (), _charges=charges, _own=self._own)
        charges.latest = latest
        return latest


#: A constructor that takes every field by position.
make_decision = fast_init(Decision)
