"""The steps of the limiter's verbs, for any driver: what is sent to Redis, and the decision made of the reply.

Each generator yields commands and is sent their replies (see ``utils.sansio``). ``limiter`` runs them synchronously
or awaited, ``enforcement`` among steps of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from datetime import UTC, tzinfo
from typing import Any

from ..exceptions import InvalidBucket, NewerRevision, StoreError, StoreLeftAlone
from ..store.base import Store
from ..store.commands import Command
from ..utils.histogram import Histogram
from .calendar_windows import check_zone
from .charges import BY_HAND, Charges, Settler, charge_each, own_costs
from .crossslot import decide_per_subject
from .decision import Decision, make_decision
from .deny_cache import DenyCache, monotonic_us
from .keys import check_prefix
from .memory import Memory, Unlimited
from .protocol import CHARGING, DECIDED, NEWER, NO_REVISION, bucket_keys, prepare, read_reply, statuses_of
from .rates import show
from .types import Bucket, check_cost

logger = logging.getLogger("django_ratequota")

Steps = Generator[Command, Any, Decision]

_MAX_US = 2**53 - 1
_CLUSTER_REVISION_SECONDS = 1.0
#: The part of a decision's time that reading the revision may take on a Cluster.
REVISION_SHARE = 0.5
NO_TIMES = (0,)


class LimiterSteps:
    """What a limiter knows between decisions, and the steps of its verbs."""

    def __init__(
        self,
        store: Store,
        *,
        prefix: str,
        time_zone: tzinfo | None = None,
        clock: Callable[[], int] | None = None,
        deny_cache_seconds: float = 0.0,
        memory: Callable[[str, tzinfo, Callable[[], int] | None], Memory] | None = None,
    ) -> None:
        """Raises ``InvalidBucket``; see ``Limiter``.

        ``memory`` returns the counters of this process that serve instead of the store, by prefix, zone and clock.
        """
        self.store = store
        #: How long decisions took, failed ones included.
        self.latency = Histogram()
        # On a Cluster the revision's key is on one server and most buckets are on others: so it cannot be read with
        # every decision.
        self._revision_max_age = _CLUSTER_REVISION_SECONDS if store.clustered else 0.0
        self.prefix = check_prefix(prefix)
        self.time_zone = check_zone(time_zone or UTC)
        clock = clock and _checked(clock)
        self._clock = clock
        self._deny_cache = DenyCache(deny_cache_seconds, clock)
        # The store's clock minus this process's monotonic one, as last seen (µs).
        self._offset_us = time.time_ns() // 1000 - monotonic_us()
        # When the store last compared the caller's revision with its own (monotonic, µs).
        self._compared_us = -(2**62)
        # On a Cluster: when the revision was last asked for (monotonic, µs), and whether that failed.
        self._asked_us = self._compared_us
        self._revision_unread = False
        #: Since when the store has its data (µs), as last read together with a revision; 0 = unknown. Counts of
        #: windows that began before may be lost.
        self.born_us = 0
        self._memory = memory and memory(self.prefix, self.time_zone, clock)
        #: Whether it admits everything, because of ENABLED = False.
        self.unlimited = isinstance(self._memory, Unlimited)
        if self._memory is not None:
            self._clock = self._memory.clock
            # An attribute, because a condition would cost the decisions of other limiters.
            self._ask = self._memory.steps  # type: ignore[method-assign]

    @property
    def now_us(self) -> int:
        """The store's clock as this process last saw it, or the injected one."""
        return self._clock() if self._clock else monotonic_us() + self._offset_us

    def answer_age(self) -> float:
        """Seconds since the store last compared a caller's revision with the published one."""
        return (monotonic_us() - self._compared_us) / 10**6

    def revision_steps(self, share: float = 1.0) -> Generator[Command, Any, int]:
        """Return the steps of ``stored_revision``; on a Cluster in this share of the decision's time at most."""
        try:
            yield from self._ask("peek", (), 1, revision=0, share=share)
        except NewerRevision as newer:
            return newer.revision
        self.born_us = 0
        return 0

    def steps(
        self,
        mode: str,
        buckets: Iterable[Bucket],
        cost: int,
        *,
        revision: int | None = None,
        times: tuple[int, ...] = NO_TIMES,
        settler: Settler | None = None,
        seeds: tuple[int, ...] = (),
    ) -> Steps:
        """Return the steps of a verb, for callers that drive them among steps of their own.

        ``times`` (µs) is the longest wait that ``acquire`` may book, or ``charged`` of ``Settler.refund``, or else 0;
        after it each bucket's own cost may follow, else each takes ``cost`` by its rate. ``settler`` charges and
        refunds afterwards, this limiter where it is None. ``seeds`` are the units known to be used in each bucket's
        calendar window, for stores that lost counts: a bucket that holds fewer has used as many.

        Raises ``NewerRevision`` into the caller when policies newer than ``revision`` have been published. Sends
        nothing when there are no buckets and the last comparison of revisions is young enough, nor when the deny
        cache holds the refusal.
        """
        if seeds:
            buckets = tuple(buckets)
            each = () if len(times) > 1 else own_costs(mode, buckets, cost) or (cost,) * len(buckets)
            times = (*times, *each, *seeds)
        begun = self._begin(mode, buckets, cost, revision, times, settler)
        return _decided(begun) if isinstance(begun, Decision) else begun

    def _begin(
        self,
        mode: str,
        buckets: Iterable[Bucket],
        cost: int,
        revision: int | None = None,
        times: tuple[int, ...] = NO_TIMES,
        settler: Settler | None = None,
    ) -> Steps | Decision:
        """Return the decision where no command is needed for it, else the steps to it."""
        buckets = tuple(buckets)
        cost = check_cost(cost)
        if (cost != 1 or mode in BY_HAND) and len(times) == 1:
            times = (*times, *own_costs(mode, buckets, cost))
        settles: Settler = settler or self  # type: ignore[assignment]  # by the verbs of ``Limiter``
        if mode == "check" and self._deny_cache.enabled:
            revision_due = self.store.clustered and revision is not None and self._revision_is_due()
            costs = cost if len(times) == 1 else times
            known = None if revision_due else self._deny_cache.get(buckets, costs, revision, settles)
            if known is not None:
                return known
        return self._ask_steps(mode, buckets, cost, revision, times, settles)

    def _ask_steps(
        self,
        mode: str,
        buckets: tuple[Bucket, ...],
        cost: int,
        revision: int | None,
        times: tuple[int, ...],
        settler: Settler,
    ) -> Steps:
        began_at, deny_cache = time.monotonic(), self._deny_cache
        mark = deny_cache.mark() if deny_cache.enabled and buckets else None
        try:
            if not self.store.clustered:
                if not buckets and revision is not None and not self._revision_is_due():
                    return Decision(allowed=True, revision=revision, settler=settler)
                decision = yield from self._ask(mode, buckets, cost, times, revision, settler)
            else:
                if revision is not None and self._revision_is_due():
                    yield from self._check_revision(revision)
                # Raises for invalid buckets before any of them is charged.
                prepare(self.prefix, self.time_zone, buckets)
                call = deny_cache.forgetting_refunds(self._ask)
                decision = yield from decide_per_subject(call, mode, buckets, cost, times)
                decision = replace(decision, revision=revision or 0, settler=settler)
        except NewerRevision:
            deny_cache.clear()
            raise
        except StoreError as error:
            if not isinstance(error, StoreLeftAlone):
                self.latency.record(time.monotonic() - began_at)
            raise
        finally:
            if mode == "refund":  # failed or not: a lost reply does not tell
                deny_cache.freed(buckets)
        self.latency.record(time.monotonic() - began_at)
        if mark is not None:
            deny_cache.learn(mode, decision, buckets, cost if len(times) == 1 else times, revision, mark)
        return decision

    def _ask(
        self,
        mode: str,
        buckets: tuple[Bucket, ...],
        cost: int,
        times: tuple[int, ...] = NO_TIMES,
        revision: int | None = None,
        settler: Settler | None = None,
        share: float = 1.0,
    ) -> Steps:
        """Send the buckets in one atomic call, again while a calendar window is outdated."""
        prepared = prepare(self.prefix, self.time_zone, buckets)
        now_us = self.now_us
        known = NO_REVISION if revision is None else min(revision, _MAX_US)
        for _ in range(3):
            clock_us = self._clock() if self._clock else 0
            header, sent_us = (mode, clock_us, known, cost, *times), now_us
            command, windows_us = prepared.command(header, now_us)
            reply = yield command if share == 1.0 else command.within(share)
            numbers = read_reply(reply, len(buckets))
            outcome, allowed, now_us, stored = numbers[:4]
            if not self._clock:
                self._offset_us = now_us - monotonic_us()
            if revision is not None:
                self._compared_us = monotonic_us()
            if outcome == DECIDED:
                statuses = statuses_of(numbers, buckets, windows_us)
                units = cost if allowed == 1 and mode in CHARGING else 0
                charges = None
                if len(times) > 1 and mode in CHARGING:
                    charges = charge_each(statuses, units, now_us, costs=times[1:]) if allowed == 1 else Charges()
                return make_decision(
                    allowed == 1, statuses, now_us, (), (), "", revision or 0, "", settler, units, charges, None, None
                )
            if outcome == NEWER:
                self.born_us = numbers[4]
                raise NewerRevision(stored, instead_of=revision if stored < known else None)
            if len(times) > 1 + len(buckets):
                seeds = times[1 + len(buckets) :]
                times = (*times[: 1 + len(buckets)], *prepared.seeds(seeds, sent_us, now_us))
        raise StoreError("clock", "the store's clock left three calendar windows in a row")

    def _acquire_steps(self, bucket: Bucket, timeout: float, cost: int) -> Steps:
        if bucket.rate.algorithm != "leaky_bucket":
            raise InvalidBucket(f"acquire needs a leaky_bucket; write the rate as '{bucket.rate} leaky_bucket'")
        if not 0 <= timeout <= _MAX_US / 10**6:
            raise InvalidBucket(f"timeout must be seconds, 0 or more, not {timeout!r}")
        return self.steps("acquire", (bucket,), cost, times=(int(timeout * 10**6),))

    def _reset_steps(self, buckets: Iterable[Bucket]) -> Generator[Command, Any, int]:
        buckets = tuple(buckets)
        keys = bucket_keys(self.prefix, buckets)
        deleted = 0
        try:
            if self._memory is not None:
                return self._memory.reset(buckets)
            # On a Cluster each key may live on a server of its own.
            for together in [[key] for key in keys] if self.store.clustered else [keys]:
                deleted += int((yield ("DEL", *together))) if together else 0
        finally:
            self._deny_cache.freed(buckets)
        return deleted

    def _check_revision(self, revision: int) -> Generator[Command, Any, None]:
        """Compare the revision with the stored one, on a Cluster; raises ``NewerRevision``.

        A failure costs no decision: the server of the revision's key need not be the one that decides.
        """
        self._asked_us = monotonic_us()
        unread, self._revision_unread = self._revision_unread, False
        try:
            # Not a peek, which would publish nothing where there is no revision.
            yield from self._ask("check", (), 0, revision=revision, share=REVISION_SHARE)
        except StoreError as error:
            self._revision_unread = True
            if not unread:
                logger.warning("edits of policies take effect late, as their revision cannot be read: %s", error)

    def _revision_is_due(self) -> bool:
        # On a Cluster nobody asks again while one request does, nor right after that failed.
        last_us = max(self._compared_us, self._asked_us)
        return monotonic_us() - last_us >= self._revision_max_age * 10**6


def _checked(clock: Callable[[], int]) -> Callable[[], int]:
    """Return a clock that raises ``InvalidBucket`` where ``clock`` returns no time that the script takes."""

    def read() -> int:
        now_us = clock()
        if isinstance(now_us, int) and 0 < now_us <= _MAX_US:
            return now_us
        raise InvalidBucket(
            f"the clock must return whole µs since the Unix epoch, from 1 to 2^53, not {show(now_us)}"
        )

    return read


def _decided(decision: Decision) -> Steps:
    """Return the steps to a decision that needs none."""
    return decision
    yield
