"""The limiter: checks, charges and refunds buckets in Redis. With ``client=`` it needs no Django settings.

    limiter = Limiter(client=redis.Redis())
    decision = limiter.check([Bucket("user:42", Rate.parse("100/min"), scope="search")], cost=1)

Every verb takes buckets and returns a ``Decision`` whose statuses have the buckets' order and length. All raise
``StoreError`` when Redis gives no decision, and ``InvalidCost`` and ``InvalidBucket`` for invalid arguments. Each has
an async twin with the prefix ``a``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from datetime import UTC, tzinfo
from typing import TYPE_CHECKING, Any

from ..exceptions import ConfigurationError, InvalidBucket, NewerRevision, StoreError, StoreLeftAlone
from ..store.base import Call, Store
from ..store.commands import Command
from ..utils.histogram import Histogram
from ..utils.sansio import adrive, drive
from ..utils.shielding import shielded
from .calendar_windows import check_zone
from .crossslot import EachSubject, LookForChanges
from .decision import Decision, LimitRequest, Link, Mode, Steps
from .deny_cache import DenyCache
from .keys import check_prefix
from .memory import Memory, Unlimited
from .protocol import MAX_US, ScriptBackend
from .rates import MAX_UNITS, show
from .slots import HeldSlot, Lease, Slots
from .types import Bucket, Copies, check_cost

if TYPE_CHECKING:
    from ..store.factory import Client


def _checked(clock: Callable[[], int]) -> Callable[[], int]:
    """Return a clock that raises ``InvalidBucket`` where ``clock`` returns no time that the script takes."""

    def read() -> int:
        now_us = clock()
        if isinstance(now_us, int) and 0 < now_us <= MAX_US:
            return now_us
        text = "the clock must return whole µs since the Unix epoch, from 1 to 2^53, not"
        raise InvalidBucket(f"{text} {show(now_us)}")

    return read


def _no_defaults() -> dict[str, Any]:
    raise ConfigurationError("Limiter() without client= reads Django's settings: import it from django_ratequota")


#: Returns the arguments of ``Limiter.open`` by the Django settings; ``runtime`` sets it.
defaults: Callable[[], dict[str, Any]] = _no_defaults


class _Timed:
    """A link of a limiter's chain: how long decisions take, failed ones included."""

    def __init__(self, below: Link, latency: Histogram) -> None:
        self._below, self._latency = below, latency

    def ask(self, request: LimitRequest) -> Steps:
        began_at = self._latency.clock()
        try:
            decision = yield from self._below.ask(request)
        except StoreError as error:
            if not isinstance(error, StoreLeftAlone):
                self._latency.record(began_at)
            raise
        self._latency.record(began_at)
        return decision


class Limiter:
    """Checks, charges and resets buckets, any number of them in one atomic round trip."""

    #: Whether its server and prefix come from the Django settings.
    by_settings = False

    def __init__(
        self,
        *,
        client: Client | None = None,
        clock: Callable[[], int] | None = None,
        prefix: str | None = None,
        time_zone: tzinfo | None = None,
        timeout: float | None = None,
        deny_cache_seconds: float | None = None,
    ) -> None:
        """Without ``client``, server, prefix, time zone and timeout come from the Django setting RATEQUOTA.

        ``client`` is redis-py's, of one server, a Sentinel's master or a Cluster; the limiter copies its address and
        credentials and makes its own connections, without retries. ``clock`` returns µs since the Unix epoch, for
        tests and simulations only: else the server's clock counts. ``prefix`` begins every key (default ``rq``).
        ``time_zone`` aligns calendar windows (default UTC; a ``ZoneInfo`` or a ``datetime.timezone``).
        ``timeout`` is in seconds, for all commands of one decision (default 0.1). ``deny_cache_seconds`` is how long
        this process may repeat a refusal without asking Redis again; default 0, or the setting's without ``client``.
        Raises ``InvalidBucket`` and ``ConfigurationError``.
        """
        if client is None:
            options, self.by_settings = defaults(), True
        else:
            from ..store.factory import store_from_client  # it imports redis-py, which takes 0.1 s

            options = {"store": store_from_client(client, 0.1 if timeout is None else timeout), "prefix": "rq"}
        own = {"prefix": prefix or None, "time_zone": time_zone, "deny_cache_seconds": deny_cache_seconds}
        self.open(clock=clock, **options | {name: value for name, value in own.items() if value is not None})

    def open(
        self,
        store: Store,
        *,
        prefix: str,
        time_zone: tzinfo | None = None,
        clock: Callable[[], int] | None = None,
        deny_cache_seconds: float = 0.0,
        backend: Callable[[Store, str, tzinfo, Callable[[], int] | None], ScriptBackend | Memory] = ScriptBackend,
    ) -> None:
        """Take the store and what is known of it; ``__init__`` ends in this. Raises ``InvalidBucket``.

        ``backend`` returns what keeps the counters, by store, prefix, zone and clock.
        """
        self.store = store
        #: How long decisions took, failed ones included.
        self.latency = Histogram()
        self.prefix = check_prefix(prefix)
        self.time_zone = check_zone(time_zone or UTC)
        #: The injected clock (µs); None = the server's.
        self.clock = clock = clock and _checked(clock)
        #: What keeps its counters.
        self.backend = backend(store, self.prefix, self.time_zone, clock)
        #: Whether it admits everything, because of ENABLED = False.
        self.unlimited = isinstance(self.backend, Unlimited)
        # What a request passes on its way to the store, each link asking the next one.
        servers = self.backend if store.clustered and isinstance(self.backend, ScriptBackend) else None
        timed = _Timed(EachSubject(servers, self.freed) if servers else self.backend, self.latency)
        self._deny_cache = DenyCache(timed, deny_cache_seconds, clock)
        chain: Link = self._deny_cache if self._deny_cache.enabled else timed
        self._chain = LookForChanges(chain, servers, self._deny_cache.clear) if servers else chain

    def check(self, buckets: Iterable[Bucket], cost: int = 1) -> Decision:
        """Admit the request and charge every bucket ``cost`` units (1 where its rate counts requests), or refuse it.

        A refusal changes nothing. A slot of a ``concurrent`` rate is held for a minute at most, or to the end of
        ``with limiter.check(...) as decision:``.
        """
        return self.decide(LimitRequest("check", tuple(buckets), cost, self))

    def peek(self, buckets: Iterable[Bucket], cost: int = 1) -> Decision:
        """What ``check`` would decide now; changes nothing."""
        return self.decide(self._request("peek", buckets, cost))

    def charge(self, buckets: Iterable[Bucket], cost: int = 1) -> Decision:
        """Charge every bucket that counts units; never refuses, and may leave it in debt."""
        return self.decide(self._request("charge", buckets, cost))

    def refund(self, buckets: Iterable[Bucket], cost: int = 1) -> Decision:
        """Give the newest units back to every bucket that counts units, never more than were used.

        Of what a decision charged, ``Decision.refund`` gives back only what is still counted.
        """
        return self.decide(self._request("refund", buckets, cost))

    def acquire(self, bucket: Bucket, timeout: float, cost: int = 1) -> Decision:
        """Book the next free slot of a ``leaky_bucket`` used as a queue, first come, first served.

        When allowed, sleep ``decision.retry_after`` seconds, then go ahead; ``turn`` does both. Refused at once, with
        nothing booked, when that wait would exceed ``timeout`` (seconds). ``decision.refund(cost)`` gives the slot
        back, unless another one has been booked behind it. The queue is a counter of its own, which the other verbs
        do not see and ``reset`` forgets. It goes on when the rate changes, whatever the new limit, burst and period.
        """
        return self.decide(self._booking(bucket, timeout, cost))

    def reset(self, buckets: Iterable[Bucket]) -> int:
        """Forget what was counted; returns how many counters had counted anything.

        A leaky_bucket and its queue are two.
        """
        return drive(self._reset_steps(buckets), self.store.execute)

    def slots(self, bucket: Bucket) -> list[HeldSlot]:
        """Return the slots that requests hold of a ``concurrent`` bucket now, the oldest first."""
        held = drive(self.backend.slots(bucket), self.store.execute)
        return sorted(held, key=lambda slot: slot.since_us)

    async def acheck(self, buckets: Iterable[Bucket], cost: int = 1) -> Decision:
        """``check``, awaited."""
        return await self.adecide(self._request("check", buckets, cost))

    async def apeek(self, buckets: Iterable[Bucket], cost: int = 1) -> Decision:
        """``peek``, awaited."""
        return await self.adecide(self._request("peek", buckets, cost))

    async def acharge(self, buckets: Iterable[Bucket], cost: int = 1) -> Decision:
        """``charge``, awaited; it reaches Redis although the awaiting task is cancelled."""
        return await shielded(self.adecide(self._request("charge", buckets, cost)))

    async def arefund(self, buckets: Iterable[Bucket], cost: int = 1) -> Decision:
        """``refund``, awaited; it reaches Redis although the awaiting task is cancelled."""
        return await shielded(self.adecide(self._request("refund", buckets, cost)))

    async def aacquire(self, bucket: Bucket, timeout: float, cost: int = 1) -> Decision:  # noqa: ASYNC109 - a bound on the slot
        """``acquire``, awaited: the call to Redis, not the slot."""
        return await self.adecide(self._booking(bucket, timeout, cost))

    async def areset(self, buckets: Iterable[Bucket]) -> int:
        """``reset``, awaited."""
        return await adrive(self._reset_steps(buckets), self.store.aexecute)

    def publish(self) -> int:
        """Give the policies a new revision and return it: each process reloads before it next asks for a decision."""
        try:
            return drive(self.backend.publish(), self.store.execute)
        finally:
            self._deny_cache.clear()

    def stored_revision(self) -> int:
        """The revision that the store holds; 0 when it holds none. Learns the store's clock on the way."""
        return drive(self.revision_steps(), self.store.execute)

    def decide(self, request: LimitRequest) -> Decision:
        """Carry out a request; raises ``NewerRevision`` too, when it has a revision."""
        return drive(self.ask(request), Call(self.store).do)

    async def adecide(self, request: LimitRequest) -> Decision:
        """``decide``, awaited."""
        return await adrive(self.ask(request), Call(self.store).ado)

    @property
    def now_us(self) -> int:
        """The store's clock as this process last saw it, or the injected one."""
        return self.backend.now_us

    def revision_steps(self) -> Generator[Command, Any, int]:
        """Return the steps of ``stored_revision``."""
        try:
            yield from self.backend.ask(LimitRequest(mode="peek", buckets=(), revision=0))
        except NewerRevision as newer:
            return newer.revision
        return 0

    def renew_slots(self, leases: Iterable[Lease]) -> int:
        """Prolong the leases of slots, or take them again if there is room; returns how many of these are held."""
        # On a Cluster the commands are many, so each has a deadline of its own.
        return sum(map(int, drive(self.backend.renew(leases), lambda command: Call(self.store).do(command))))

    def release_slots(self, leases: Iterable[Lease]) -> int:
        """Release slots; returns how many of these were held. Harmless twice."""
        return sum(map(int, drive(self.backend.release(leases), lambda command: Call(self.store).do(command))))

    async def arelease_slots(self, leases: Iterable[Lease]) -> int:
        """``release_slots``, awaited."""
        released = await adrive(self.backend.release(leases), lambda command: Call(self.store).ado(command))
        return sum(map(int, released))

    def freed(self, buckets: Iterable[Bucket]) -> None:
        """Forget the refusals by these buckets, as ``backend.raise_counters`` has refunded units."""
        self._deny_cache.freed(buckets)

    def ask(self, request: LimitRequest) -> Steps:
        """Return the steps of a verb, for callers that drive them among steps of their own.

        Raises ``NewerRevision`` into the caller when policies newer than the request's have been published. Sends
        nothing when the deny cache holds the refusal.
        """
        cost = request.cost
        if type(cost) is not int or not 0 <= cost <= MAX_UNITS:
            request = request._replace(cost=check_cost(cost))
        if request.mode == "check":
            slots = request.slots
            # Copies are made of policies: a check of theirs brings its slots where one is concurrent.
            if slots is None and request.slot is None and type(request.buckets) is not Copies:
                for bucket in request.buckets:
                    if bucket.rate.concurrent:
                        slots = Slots()
                        break
            if slots is not None:
                return slots.take(self, request._replace(slots=slots), self._chain.ask)
        return self._chain.ask(request)

    def _request(self, mode: Mode, buckets: Iterable[Bucket], cost: int) -> LimitRequest:
        return LimitRequest(mode, tuple(buckets), cost, self)

    def _booking(self, bucket: Bucket, timeout: float, cost: int) -> LimitRequest:
        if bucket.rate.algorithm != "leaky_bucket":
            text = f"acquire needs a leaky_bucket, such as '12/min burst 1 leaky_bucket', not '{bucket.rate}'"
            raise InvalidBucket(text)
        if not 0 <= timeout <= MAX_US / 10**6:
            raise InvalidBucket(f"timeout must be seconds, 0 or more, not {timeout!r}")
        return self._request("acquire", (replace(bucket, queued=True),), cost)._replace(wait_us=int(timeout * 10**6))

    def _reset_steps(self, buckets: Iterable[Bucket]) -> Generator[Command, Any, int]:
        buckets = tuple(buckets)
        leaky = [replace(bucket, queued=True) for bucket in buckets if bucket.rate.algorithm == "leaky_bucket"]
        queues = {bucket.counter: bucket for bucket in leaky}  # one for all its rates
        try:
            deleted = yield from self.backend.reset([bucket for bucket in buckets if not bucket.queued])
            return deleted + (yield from self.backend.reset(queues.values()))
        finally:
            self._deny_cache.freed(buckets)
