"""The requests to a limiter, its decisions, and the charges, refunds and settlements that may follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import truediv
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from ..exceptions import StoreError
from ..store.commands import Command
from ..utils import forks
from ..utils.sansio import adrive, drive
from ..utils.shielding import shielded
from .rates import BURST_ALGORITHMS
from .types import EACH, LEFT, Bucket, BucketStatus, Reply, alike, check_cost

Mode = Literal["check", "peek", "charge", "refund", "acquire"]

#: Restores counts of durable buckets, in their windows around an instant (µs).
Restore = Callable[[Sequence[Bucket], int], Generator[Any, Any, None]]
#: Modes that charge the cost.
CHARGING = frozenset({"check", "charge", "acquire"})
#: Modes that charge or refund units by hand.
BY_HAND = frozenset({"charge", "refund"})

_SECOND = 10**6
#: Held while a decision's units are noted, so that two threads do not settle the same difference.
_settling = forks.lock()
#: Retry-After of a request that was denied because the store failed: stores come back within seconds, or much later.
_STORE_RETRY_US = 1 * _SECOND


class Charged(NamedTuple):
    """Which units a refund takes, where that is known: those of one charge."""

    #: When they were charged, by the clock of the counters (µs).
    at_us: int
    #: How long after that each bucket would have been full again (µs); same order and length as the buckets.
    levels_us: tuple[int, ...]
    #: Units charged to each bucket, except those refunded since.
    units: int


class LimitRequest(NamedTuple):
    """What a limiter is asked: a verb, the buckets, and how many units. All but the first six fields by keywords."""

    mode: Mode
    buckets: Sequence[Bucket]
    #: Units; rates that count requests take 1, and none of those that are charged or refunded by hand.
    cost: int = 1
    #: Charges and refunds after the decision; None = nothing does.
    settler: Settler | None = None
    #: Units of each bucket, where they differ; same order and length as ``buckets``; empty = ``cost`` by its rate.
    costs: tuple[int, ...] = ()
    #: The revision of the policies that the buckets are made from; None = they are not from the database.
    revision: int | None = None
    #: The longest wait that ``acquire`` may book (µs).
    wait_us: int = 0
    #: The units that a refund takes, ``cost`` of each bucket; None = the newest.
    charged: Charged | None = None
    #: Restores durable counts that the store does not have; None = these are 0.
    restore: Restore | None = None
    #: What a check takes slots of concurrent buckets for; None = for its decision, if it takes any.
    slots: SlotTaker | None = None
    #: The slot that it takes of each, set by ``slots``: its id, and how long its lease is (µs).
    slot: tuple[int, int] | None = None
    #: The charges of checks that end with this charge or refund.
    holds: tuple[Any, ...] = ()

    def units(self) -> tuple[int, ...]:
        """Return the units of each bucket, in the buckets' order."""
        if self.costs:
            return self.costs
        buckets, cost, by_hand = self.buckets, self.cost, self.mode in BY_HAND
        if self.charged or (cost == 1 and not by_hand):
            return (cost,) * len(buckets)
        request = 0 if by_hand else 1
        return tuple([cost if bucket.rate.counts == "units" else request for bucket in alike(buckets)])

    def part(self, places: Sequence[int]) -> LimitRequest:
        """Return the request about the buckets in these places alone, in this order."""

        buckets = tuple([self.buckets[at] for at in places])
        costs = tuple([self.costs[at] for at in places]) if self.costs else ()
        charged = self.charged
        if charged:
            charged = charged._replace(levels_us=tuple([charged.levels_us[at] for at in places]))
        return self._replace(buckets=buckets, costs=costs, charged=charged)


class Settler(Protocol):
    """Charges and refunds after a decision: the limiter that made it."""

    def decide(self, request: LimitRequest) -> Decision: ...
    async def adecide(self, request: LimitRequest) -> Decision: ...


class SlotTaker(Protocol):
    """Takes slots of concurrent buckets for a request, and releases them: ``slots.Slots``."""

    def take(self, keeper: Any, request: LimitRequest, ask: Callable[[LimitRequest], Steps]) -> Steps: ...
    def release(self) -> None: ...
    async def arelease(self) -> None: ...


@dataclass(slots=True)
class Charge:
    """Units that were charged to one bucket at once, minus the refunded ones."""

    bucket: Bucket
    #: Units not refunded yet.
    units: int
    #: When it was charged (µs), by the clock of the counters.
    at_us: int
    #: µs from then until the bucket would have been full again, and these units have drained.
    level_us: int
    #: Charged by ``Decision.charge`` after the check: for work that was done, so no later refusal refunds it.
    settled: bool = False
    #: The check's charges in the ledger, which may be open; None = they are in none.
    hold: Any = None

    def take(self, units: int) -> None:
        """Subtract refunded units; in a queue the rest drains that much earlier, in a bucket at the same pace."""
        rate, before = self.bucket.rate, self.units
        self.units -= units
        if self.bucket.queued:
            self.level_us -= units * rate.interval_us
        elif rate.algorithm in BURST_ALGORITHMS:
            self.level_us = self.level_us * self.units // before


class Charges(list[Charge]):
    """What one decision charged and did not give back, the newest last."""

    def __init__(self, charges: Iterable[Charge] = (), *, units: int = 0) -> None:
        """``units`` are the request's: those of its checks, plus and minus those charged and refunded by hand."""
        super().__init__(charges)
        self.units = units
        #: The decision of the last charge or refund by hand; None = none yet.
        self.latest: Decision | None = None


@dataclass(slots=True)
class Decision:
    """The outcome of one check: allowed or not, and how each bucket stands. Read it only, as its statuses."""

    allowed: bool
    #: Same order and length as the buckets checked.
    statuses: tuple[BucketStatus, ...] = ()
    #: The store's clock at the decision, µs since the Unix epoch; 0 when the store was not reached.
    at_us: int = 0
    #: The revision of the policies; 0 without policies from the database.
    revision: int = 0
    settler: Settler | None = field(default=None, repr=False, compare=False)
    #: Units charged to each bucket that had room; 0 when refused, and for a peek.
    cost: int = 0
    # The units for each bucket, charged where it had room; same order as the statuses, empty = nothing was charged.
    _units: tuple[int, ...] = field(default=(), repr=False, compare=False)
    # What was charged and not given back; ``charges_of`` makes it on first use, as few decisions settle.
    _charges: Charges | None = field(default=None, repr=False, compare=False)
    #: Names of the policies whose rates are ``blocked``; these have no bucket.
    blocked_by: tuple[str, ...] = ()
    #: Names of the policies that deny because the store gave no decision.
    denied_by: tuple[str, ...] = ()
    #: Why the store gave no decision (``timeout``, ``readonly`` ...); "" when it gave one.
    error: str = ""
    #: Finds the refusal in the admin; 10 letters and digits on a refusal that was recorded, else "".
    refusal_id: str = ""
    #: The request's slots of concurrent buckets; None = it has taken none.
    slots: SlotTaker | None = field(default=None, repr=False, compare=False)
    # The counters of its own check, where the request's earlier checks add statuses; None = all.
    _own: frozenset[object] | None = field(default=None, repr=False, compare=False)
    # The response headers, once rendered; a copy with other fields does not take them over.
    _headers: dict[str, str] | None = field(default=None, init=False, repr=False, compare=False)
    # Of what the statuses are made when they are first read; None = they were given.
    _reply: Reply | None = field(default=None, init=False, repr=False, compare=False)

    if not TYPE_CHECKING:  # to which it would mean that a decision has attributes of any name

        def __getattr__(self, name: str) -> Any:
            if name != "statuses" or self._reply is None:
                return object.__getattribute__(self, name)  # which raises Python's own error
            self.statuses = made = self._reply.statuses()
            return made

    def __enter__(self) -> Decision:
        """Return the decision.

        At the end of the ``with`` block its slots of concurrent rates are released, and its charges are final.
        """
        self._keep_open(True)
        return self

    def __exit__(self, *_: object) -> None:
        self._keep_open(False)
        if self.slots is not None:
            self.slots.release()

    async def __aenter__(self) -> Decision:
        """``__enter__``, awaited."""
        self._keep_open(True)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._keep_open(False)
        if self.slots is not None:
            await self.slots.arelease()

    def _keep_open(self, is_open: bool) -> None:
        for hold in holds_of(self._charges or ()):
            hold.is_open = is_open

    @property
    def degraded(self) -> bool:
        """Whether the policies' ``on_error`` decided, because the store did not."""
        return bool(self.error)

    @property
    def refusing(self) -> tuple[BucketStatus, ...]:
        """The enforced buckets that had no room; empty when allowed."""
        return () if self.allowed else tuple(status for status in without_room(self) if status.refused)

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
        at = binding_place(self)
        return None if at is None else self.statuses[at]

    @property
    def _tightest(self) -> BucketStatus | None:
        """``binding``; of an admitted request the tightest of those that count units, if any does."""
        reply = reply_of(self)
        buckets = alike(reply.buckets)
        units = [at for at, one in enumerate(buckets) if one.mode == "enforce" and one.rate.counts == "units"]
        at = Rivals.of(buckets, units).tightest(reply) if self.allowed else None
        return self.binding if at is None else self.statuses[at]

    @property
    def limit(self) -> int | None:
        """The most units that the bucket of ``remaining`` holds; None where nothing limits."""
        return None if (tightest := self._tightest) is None else tightest.limit

    @property
    def remaining(self) -> int | None:
        """Whole units still free in the tightest bucket; None where nothing limits.

        Rates that count requests matter only to a refusal, and where no rate counts units.
        """
        return None if (tightest := self._tightest) is None else tightest.remaining

    @property
    def reset_after(self) -> float | None:
        """Seconds until the bucket of ``remaining`` is back to full; None where nothing limits."""
        return None if (tightest := self._tightest) is None else tightest.reset_after

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
        return self._settle(self._noted(check_cost(cost)))

    def refund(self, cost: int) -> Decision:
        """Give ``cost`` units back to the buckets that were charged.

        Never gives back more than this decision charged, nor what has drained or expired since. Rates that count
        requests keep the request. A decision that charged nothing returns itself.
        """
        return self._settle(self._noted(-check_cost(cost)))

    def settle(self, actual: int) -> Decision:
        """Charge or refund the difference to the ``actual`` units of the request; never refuses.

        The same ``actual`` again changes nothing, as charges and refunds by hand are taken into account, and returns
        what the last of these did. If the store does not answer, the difference is not charged, neither now nor by a
        later call.
        """
        requests = self._noted(check_cost(actual), in_all=True)
        return self._settle(requests) if requests else charges_of(self).latest or self

    async def acharge(self, cost: int) -> Decision:
        """``charge``, awaited; it reaches the store although the awaiting task is cancelled."""
        return await self._asettle(self._noted(check_cost(cost)))

    async def arefund(self, cost: int) -> Decision:
        """``refund``, awaited; it reaches the store although the awaiting task is cancelled."""
        return await self._asettle(self._noted(-check_cost(cost)))

    async def asettle(self, actual: int) -> Decision:
        """``settle``, awaited; it reaches the store although the awaiting task is cancelled."""
        requests = self._noted(check_cost(actual), in_all=True)
        return await self._asettle(requests) if requests else charges_of(self).latest or self

    def _noted(self, units: int, *, in_all: bool = False) -> list[LimitRequest]:
        """Note that the request takes ``units`` more, fewer, or that many in all; returns what carries it out."""
        buckets = self._charged
        if not self.settler or not buckets:
            return []
        with _settling:
            charges = charges_of(self)
            more = units - charges.units if in_all else units
            if more < 0:
                return self._take(-more)
            charges.units += more
        if not more:
            self._keep_open(False)
            return []
        return [LimitRequest(mode="charge", buckets=buckets, cost=more, holds=holds_of(charges))]

    def _take(self, cost: int) -> list[LimitRequest]:
        charges = charges_of(self)
        own = [charge for charge in charges if charge.bucket.rate.counts == "units"]
        held = Counter[object]()
        for charge in own:
            held[charge.bucket.counter] += charge.units
        # What an earlier check paid is not given back here, and so stays among the request's units.
        cost = min(cost, max(held.values(), default=0))
        charges.units = max(0, charges.units - cost)
        return take(own, cost)

    def _settle(self, requests: list[LimitRequest]) -> Decision:
        """Carry the requests out; returns the charged buckets' statuses after the last of them."""
        settler = self.settler
        return drive(self._each(requests), settler.decide) if settler and requests else self

    async def _asettle(self, requests: list[LimitRequest]) -> Decision:
        settler = self.settler
        return await shielded(adrive(self._each(requests), settler.adecide)) if settler and requests else self

    def _each(self, requests: list[LimitRequest]) -> Generator[LimitRequest, Decision, Decision]:
        """Try each of the requests, as each may be for another server; then raise the first error."""
        settled, failures = [], []
        for request in requests:
            try:
                settled.append((yield request))
            except StoreError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        # What was charged is added to this decision's charges, which the returned one shares.
        charges = charges_of(self)
        for decision in settled:
            for charge in charges_of(decision):
                charge.settled = True
                charges.append(charge)
        now = {status.bucket.counter: status for decision in settled for status in decision.statuses}
        found = tuple(now.get(status.bucket.counter, status) for status in self.statuses if status.allowed)
        statuses = found if now else ()
        latest = replace(settled[-1], statuses=statuses, settler=self.settler, _charges=charges, _own=self._own)
        charges.latest = latest
        return latest


def decided(
    reply: Reply, request: LimitRequest, at_us: int, *, allowed: bool, cost: int, units: tuple[int, ...]
) -> Decision:
    """Return the decision about ``request``, with statuses that are made when they are first read."""
    decision = Decision(allowed, (), at_us, request.revision or 0, request.settler, cost, units)
    decision._reply = reply
    del decision.statuses
    return decision


def reply_of(decision: Decision) -> Reply:
    """Return what the decision has found, as numbers."""
    return decision._reply or Reply.of(decision.statuses)


def without_room(decision: Decision) -> tuple[BucketStatus, ...]:
    """Return the buckets that had no room, log-only ones included: mostly none."""
    reply = decision._reply
    if reply is not None and reply.numbers[::EACH].count(1) == len(reply.windows_us):
        return ()
    return tuple(status for status in decision.statuses if not status.allowed)


def binding_place(decision: Decision) -> int | None:
    """Return the place of ``Decision.binding`` among the statuses."""
    if not decision.allowed:
        refusing = {at: status.retry_after_us for at, status in enumerate(decision.statuses) if status.refused}
        if refusing:
            return max(refusing, key=lambda at: inf if (wait := refusing[at]) is None else wait)
    reply = reply_of(decision)
    buckets = alike(reply.buckets)
    return Rivals.of(buckets, [at for at, one in enumerate(buckets) if one.mode == "enforce"]).tightest(reply)


class Rivals(NamedTuple):
    """The buckets of which the one with the smallest share left is to be found."""

    places: list[int]
    capacities: list[int]

    @classmethod
    def of(cls, buckets: Sequence[Bucket], places: list[int]) -> Rivals:
        """Return those in these places that may be the tightest one."""
        # Slots come back when requests end, so a client learns of them only where no other limit applies.
        places = [at for at in places if not buckets[at].rate.concurrent] or places
        return cls(places, [buckets[at].rate.capacity for at in places])

    def tightest(self, reply: Reply) -> int | None:
        """Return the place of the bucket with the smallest share left, the first of equals; None if there is none."""
        places, left = self.places, reply.numbers[LEFT::EACH]
        shares = list(map(truediv, [max(0, left[at]) for at in places], self.capacities))
        return places[shares.index(min(shares))] if shares else None


#: The steps to a decision (see ``utils.sansio``).
Steps = Generator[Command, Any, Decision]


class Link(Protocol):
    """A part of the way from a limiter to its store: it carries out a request, or asks the next link."""

    def ask(self, request: LimitRequest) -> Steps: ...


def charges_of(decision: Decision) -> Charges:
    """Return what the decision charged, the newest last; always the same list. A slot is no charge."""
    if decision._charges is None:
        charges = (
            Charge(status.bucket, units, decision.at_us, status.reset_after_us)
            for status, units in zip(decision.statuses, decision._units, strict=False)
            if units and status.allowed and not status.bucket.rate.concurrent
        )
        decision._charges = Charges(charges, units=decision.cost)
    return decision._charges


def holds_of(charges: Iterable[Charge]) -> tuple[Any, ...]:
    """Return the holds of the charges, each once."""
    return tuple({id(charge.hold): charge.hold for charge in charges if charge.hold is not None}.values())


def take(charges: Sequence[Charge], units: int) -> list[LimitRequest]:
    """Take ``units`` from each bucket's charges, the newest first; one refund for what was charged together."""
    left: dict[object, int] = {}
    together: dict[tuple[int, int, int, int], list[tuple[Bucket, int]]] = {}
    holds = holds_of(charges)
    for charge in reversed(charges):
        wanted = left.get(charge.bucket.counter, units)
        taken = min(wanted, charge.units)
        if taken:
            terms = charge.at_us, taken, wanted, charge.units
            together.setdefault(terms, []).append((charge.bucket, charge.level_us))
            charge.take(taken)
            left[charge.bucket.counter] = wanted - taken
    requests = []
    for (at_us, taken, _, charged), of in together.items():
        buckets, levels_us = zip(*of, strict=True)
        whole = Charged(at_us, levels_us, charged)
        requests.append(LimitRequest("refund", buckets, taken, charged=whole, holds=holds))
    return requests


def take_all(charges: Sequence[Charge]) -> list[LimitRequest]:
    """Take all units that are left; a bucket may have been charged more than once."""
    return take(charges, sum(charge.units for charge in charges))
