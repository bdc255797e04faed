"""The engine: judges buckets in Redis. Needs no database, and no Django settings when given a client.

    limiter = Limiter(client=redis.Redis())
    decision = limiter.check([Bucket("user:42", Rate.parse("100/min"), scope="search")], cost=1)

Every verb takes buckets and returns a ``Decision`` whose statuses have the buckets' order and length. All raise
``StoreError`` when Redis gives no decision, ``InvalidCost`` and ``InvalidBucket`` on arguments that make no sense.
Each has an async twin with the prefix ``a``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from datetime import UTC, tzinfo
from typing import Any

from ..exceptions import InvalidBucket, NewerRevision, StoreError, StoreLeftAlone
from ..store.base import run_script
from ..store.commands import Command
from ..store.factory import Client, store_of, store_of_settings
from ..utils.histogram import Histogram
from ..utils.sansio import adrive, drive
from ..utils.shielding import shielded
from .calendar_windows import check_zone
from .charges import charge_each
from .crossslot import ask_each
from .deny_cache import Denials
from .keys import check_prefix, revision_key
from .protocol import DECIDED, NEWER, NO_REVISION, bucket_keys, prepare, read_reply, statuses_of
from .rates import show
from .scripts import PUBLISH
from .types import Bucket, Decision, Settler, check_cost, make_decision

logger = logging.getLogger("django_ratequota")

Steps = Generator[Command, Any, Decision]

_MAX_US = 2**53 - 1
_CLUSTER_LOOK_SECONDS = 1.0
#: The part of a decision's time that a look at the revision may take on a Cluster.
LOOK_SHARE = 0.5
#: Verbs that charge the cost.
_CHARGING = frozenset({"check", "charge", "acquire"})
_NO_TIMES = (0,)


class Limiter:
    """Checks, charges and resets buckets, any number of them in one atomic round trip."""

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

        ``client`` is redis-py's, of one server, a Sentinel's master or a Cluster, and says where that is; the
        limiter connects there on its own, without retries. ``clock`` returns µs since the Unix epoch, for tests
        and simulations only: else the server's clock counts. ``prefix`` begins every key (default ``rq``),
        ``time_zone`` aligns calendar windows (default UTC; a ``ZoneInfo``, a ``datetime.timezone`` or pytz's), and
        ``timeout`` is in seconds, for all that one decision asks of Redis (default 0.1). ``deny_cache_seconds`` is
        how long this process may repeat a refusal without asking Redis again; default 0, or the setting's without
        ``client``. Raises ``InvalidBucket``, and ``ConfigurationError``.
        """
        look_seconds = 0.0
        if client is None:
            from ..conf import settings

            self.store = store_of_settings(settings)
            prefix = prefix or settings.prefix
            time_zone = time_zone or settings.time_zone
            look_seconds = settings.revision_max_age
            if deny_cache_seconds is None:
                deny_cache_seconds = settings.deny_cache_seconds
        else:
            self.store = store_of(client, 0.1 if timeout is None else timeout)
        #: How long decisions took, those included that the store failed to give.
        self.latency = Histogram()
        # How old the last look at the revision may be. On a Cluster its key is on one server, most buckets are on
        # others: it cannot be looked at with every decision.
        self._look_seconds = look_seconds or (_CLUSTER_LOOK_SECONDS if self.store.clustered else 0.0)
        self.prefix = check_prefix(prefix or "rq")
        self.time_zone = check_zone(time_zone or UTC)
        self._clock = clock
        self._denials = Denials(deny_cache_seconds or 0, clock)
        # The store's clock minus this process's monotonic one, as last seen (µs).
        self._offset_us = time.time_ns() // 1000 - _monotonic_us()
        # When the store last compared the caller's revision with its own (monotonic, µs).
        self._answered_us = -(2**62)
        # On a Cluster: when the last look at the revision began (monotonic, µs), and whether it failed.
        self._looked_us = self._answered_us
        self._blind = False

    @property
    def now_us(self) -> int:
        """The store's clock as this process last saw it, or the injected one."""
        return self._read_clock() if self._clock else _monotonic_us() + self._offset_us

    def answer_age(self) -> float:
        """Seconds since the store last compared a caller's revision with the published one."""
        return (_monotonic_us() - self._answered_us) / 10**6

    def check(self, buckets: Iterable[Bucket], cost: int = 1) -> Decision:
        """Admit the request and charge every bucket ``cost`` units, or refuse it and change nothing."""
        return self._run(self._begin("check", buckets, cost))

    def peek(self, buckets: Iterable[Bucket], cost: int = 1) -> Decision:
        """What ``check`` would decide now; changes nothing."""
        return self._run(self.steps("peek", buckets, cost))

    def charge(self, buckets: Iterable[Bucket], cost: int = 1) -> Decision:
        """Charge every bucket; never refuses, and may leave it in debt."""
        return self._run(self.steps("charge", buckets, cost))

    def refund(self, buckets: Iterable[Bucket], cost: int = 1, *, charged: tuple[int, ...] = ()) -> Decision:
        """Give the newest units back to every bucket, never more than were used.

        Of what a decision charged, ``Decision.refund`` gives back only what is still counted: it passes ``charged``.
        """
        return self._run(self.steps("refund", buckets, cost, times=charged or _NO_TIMES))

    def acquire(self, bucket: Bucket, timeout: float, cost: int = 1) -> Decision:
        """Book the next free slot of a ``leaky_bucket`` used as a queue, first come, first served.

        When allowed, sleep ``decision.retry_after`` seconds, then go ahead. Refused at once, with nothing booked,
        when that wait would exceed ``timeout`` (seconds). ``decision.refund(cost)`` gives the slot back, unless
        another one has been booked behind it.
        """
        return self._run(self._acquire_steps(bucket, timeout, cost))

    def reset(self, buckets: Iterable[Bucket]) -> int:
        """Forget what was counted; returns how many of the buckets had counted anything."""
        return drive(self._reset_steps(buckets), self.store.execute)

    async def acheck(self, buckets: Iterable[Bucket], cost: int = 1) -> Decision:
        """``check``, awaited."""
        return await self._arun(self._begin("check", buckets, cost))

    async def apeek(self, buckets: Iterable[Bucket], cost: int = 1) -> Decision:
        """``peek``, awaited."""
        return await self._arun(self.steps("peek", buckets, cost))

    async def acharge(self, buckets: Iterable[Bucket], cost: int = 1) -> Decision:
        """``charge``, awaited; it reaches Redis although the awaiting task is cancelled."""
        return await shielded(self._arun(self.steps("charge", buckets, cost)))

    async def arefund(self, buckets: Iterable[Bucket], cost: int = 1, *, charged: tuple[int, ...] = ()) -> Decision:
        """``refund``, awaited; it reaches Redis although the awaiting task is cancelled."""
        return await shielded(self._arun(self.steps("refund", buckets, cost, times=charged or _NO_TIMES)))

    async def aacquire(self, bucket: Bucket, timeout: float, cost: int = 1) -> Decision:  # noqa: ASYNC109 - a bound on the slot
        """``acquire``, awaited: the call to Redis, not the slot."""
        return await self._arun(self._acquire_steps(bucket, timeout, cost))

    async def areset(self, buckets: Iterable[Bucket]) -> int:
        """``reset``, awaited."""
        return await adrive(self._reset_steps(buckets), self.store.aexecute)

    def publish(self) -> int:
        """Give the policies a new revision and return it: each process reloads before it next asks for a decision."""
        try:
            return int(drive(run_script(PUBLISH, [revision_key(self.prefix)], ()), self.store.execute))
        finally:
            self._denials.clear()

    def stored_revision(self) -> int:
        """The revision that the store holds; 0 when it holds none. Learns the store's clock on the way."""
        return drive(self.revision_steps(), self.store.execute)

    def revision_steps(self, share: float = 1.0) -> Generator[Command, Any, int]:
        """The steps of ``stored_revision``, in at most this part of the decision's time on a Cluster."""
        try:
            yield from self._ask("peek", (), 1, revision=0, share=share)
        except NewerRevision as newer:
            return newer.revision
        return 0

    def steps(
        self,
        mode: str,
        buckets: Iterable[Bucket],
        cost: int,
        *,
        revision: int | None = None,
        times: tuple[int, ...] = _NO_TIMES,
        settler: Settler | None = None,
    ) -> Steps:
        """The steps of a verb, for callers that drive them among steps of their own.

        ``times`` (µs) is the longest wait to book, or what ``Settler.refund`` takes as ``charged``; for a check it
        may be 0 and each bucket's own cost, of which ``cost`` is the highest. ``settler`` charges and refunds
        afterwards, this limiter where it is None.
        Raises ``NewerRevision`` into the caller when policies newer than ``revision`` have been published. Asks
        nothing when there are no buckets and the last look at the revision is young enough, and when it knows that
        these buckets refuse.
        """
        begun = self._begin(mode, buckets, cost, revision, times, settler)
        return _over(begun) if isinstance(begun, Decision) else begun

    def _begin(
        self,
        mode: str,
        buckets: Iterable[Bucket],
        cost: int,
        revision: int | None = None,
        times: tuple[int, ...] = _NO_TIMES,
        settler: Settler | None = None,
    ) -> Steps | Decision:
        """The decision where it is known without asking, else the steps to it."""
        buckets = tuple(buckets)
        cost = check_cost(cost)
        settler = settler or self
        if mode == "check" and self._denials.kept:
            look_first = self.store.clustered and revision is not None and self._look_is_due()
            costs = cost if len(times) == 1 else times
            known = None if look_first else self._denials.refusal(buckets, costs, revision, settler)
            if known is not None:
                return known
        return self._ask_steps(mode, buckets, cost, revision, times, settler)

    def _ask_steps(
        self,
        mode: str,
        buckets: tuple[Bucket, ...],
        cost: int,
        revision: int | None,
        times: tuple[int, ...],
        settler: Settler,
    ) -> Steps:
        begun, denials = time.monotonic(), self._denials
        asking = denials.asking() if denials.kept and buckets else None
        try:
            if not self.store.clustered:
                if not buckets and revision is not None and not self._look_is_due():
                    return Decision(allowed=True, revision=revision, settler=settler)
                decision = yield from self._ask(mode, buckets, cost, times, revision, settler)
            else:
                if revision is not None and self._look_is_due():
                    yield from self._look(revision)
                # What makes no sense is refused before anything is charged.
                prepare(self.prefix, self.time_zone, buckets)
                decision = yield from ask_each(denials.noticing(self._ask), mode, buckets, cost, times)
                decision = replace(decision, revision=revision or 0, settler=settler)
        except NewerRevision:
            denials.clear()
            raise
        except StoreError as error:
            if not isinstance(error, StoreLeftAlone):
                self.latency.record(time.monotonic() - begun)
            raise
        finally:
            if mode == "refund":  # done or not: an answer that failed to come does not tell
                denials.freed(buckets)
        self.latency.record(time.monotonic() - begun)
        if asking is not None:
            denials.learn(mode, decision, buckets, cost if len(times) == 1 else times, revision, asking)
        return decision

    def _ask(
        self,
        mode: str,
        buckets: tuple[Bucket, ...],
        cost: int,
        times: tuple[int, ...] = _NO_TIMES,
        revision: int | None = None,
        settler: Settler | None = None,
        share: float = 1.0,
    ) -> Steps:
        """One atomic call."""
        prepared = prepare(self.prefix, self.time_zone, buckets)
        now_us = self.now_us
        known = NO_REVISION if revision is None else min(revision, _MAX_US)
        for _ in range(3):
            clock_us = self._read_clock() if self._clock else 0
            asked = (mode, clock_us, known, cost, *times)
            command, windows_us = prepared.command(asked, now_us)
            reply = yield command if share == 1.0 else command.within(share)
            numbers = read_reply(reply, len(buckets))
            outcome, allowed, now_us, stored = numbers[:4]
            if not self._clock:
                self._offset_us = now_us - _monotonic_us()
            if revision is not None:
                self._answered_us = _monotonic_us()
            if outcome == DECIDED:
                statuses = statuses_of(numbers, buckets, windows_us)
                units = cost if allowed == 1 and mode in _CHARGING else 0
                charges = None
                if len(times) > 1 and mode == "check":
                    charges = charge_each(statuses, units, now_us, costs=times[1:])
                return make_decision(
                    allowed == 1, statuses, now_us, (), (), "", revision or 0, "", settler, units, charges, None, None
                )
            if outcome == NEWER:
                raise NewerRevision(stored, instead_of=revision if stored < known else None)
        raise StoreError("clock", "the store's clock left three calendar windows in a row")

    def _acquire_steps(self, bucket: Bucket, timeout: float, cost: int) -> Steps:
        if bucket.rate.algorithm != "leaky_bucket":
            raise InvalidBucket(f"acquire queues by leaky_bucket; write the rate as '{bucket.rate} leaky_bucket'")
        if not 0 <= timeout <= _MAX_US / 10**6:
            raise InvalidBucket(f"timeout must be seconds, 0 or more, not {timeout!r}")
        return self.steps("acquire", (bucket,), cost, times=(int(timeout * 10**6),))

    def _reset_steps(self, buckets: Iterable[Bucket]) -> Generator[Command, Any, int]:
        buckets = tuple(buckets)
        keys = bucket_keys(self.prefix, buckets)
        deleted = 0
        try:
            # On a Cluster each key may live on a server of its own.
            for together in [[key] for key in keys] if self.store.clustered else [keys]:
                deleted += int((yield ("DEL", *together))) if together else 0
        finally:
            self._denials.freed(buckets)
        return deleted

    def _look(self, revision: int) -> Generator[Command, Any, None]:
        """Compare the revision with the stored one, on a Cluster; raises ``NewerRevision``.

        A look that fails costs no decision: the server of the revision's key need not be the one that decides.
        """
        self._looked_us = _monotonic_us()
        blind, self._blind = self._blind, False
        try:
            yield from self._ask("peek", (), 0, revision=revision, share=LOOK_SHARE)
        except StoreError as error:
            self._blind = True
            if not blind:
                logger.warning("edits of policies are seen late, as their revision cannot be read: %s", error)

    def _look_is_due(self) -> bool:
        # One look at a time on a Cluster, and no other right after one that failed.
        looked_us = max(self._answered_us, self._looked_us)
        return _monotonic_us() - looked_us >= self._look_seconds * 10**6

    def _read_clock(self) -> int:
        now_us = self._clock() if self._clock else 0
        if not isinstance(now_us, int) or not 0 < now_us <= _MAX_US:
            raise InvalidBucket(
                f"the clock must return whole µs since the Unix epoch, from 1 to 2^53, not {show(now_us)}"
            )
        return now_us

    def _run(self, steps: Steps | Decision) -> Decision:
        return steps if isinstance(steps, Decision) else drive(steps, self.store.call().do)

    async def _arun(self, steps: Steps | Decision) -> Decision:
        return steps if isinstance(steps, Decision) else await adrive(steps, self.store.call().ado)


def _over(decision: Decision) -> Steps:
    """The steps to a decision that is known."""
    return decision
    yield


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1000
