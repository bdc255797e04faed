"""The limiter: checks, charges and refunds buckets in Redis. With ``client=`` it needs no Django settings.

    limiter = Limiter(client=redis.Redis())
    decision = limiter.check([Bucket("user:42", Rate.parse("100/min"), scope="search")], cost=1)

Every verb takes buckets and returns a ``Decision`` whose statuses have the buckets' order and length. All raise
``StoreError`` when Redis gives no decision, and ``InvalidCost`` and ``InvalidBucket`` for invalid arguments. Each has
an async twin with the prefix ``a``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import tzinfo
from typing import TYPE_CHECKING, Any

from ..exceptions import ConfigurationError
from ..store.base import run_script
from ..utils.sansio import adrive, drive
from ..utils.shielding import shielded
from .decision import Decision
from .decision_steps import NO_TIMES, LimiterSteps, Steps
from .keys import birth_key, revision_key
from .scripts import PUBLISH
from .types import Bucket

if TYPE_CHECKING:
    from ..store.factory import Client


def _no_defaults() -> dict[str, Any]:
    raise ConfigurationError("Limiter() without client= reads Django's settings: import it from django_ratequota")


#: Returns the arguments of ``LimiterSteps`` by the Django settings; ``runtime`` sets it.
defaults: Callable[[], dict[str, Any]] = _no_defaults


class Limiter(LimiterSteps):
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

        ``client`` is redis-py's, of one server, a Sentinel's master or a Cluster; the limiter copies its address and
        credentials and makes connections of its own, without retries. ``clock`` returns µs since the Unix epoch, for
        tests and simulations only: else the server's clock counts. ``prefix`` begins every key (default ``rq``).
        ``time_zone`` aligns calendar windows (default UTC; a ``ZoneInfo``, a ``datetime.timezone`` or pytz's).
        ``timeout`` is in seconds, for all commands of one decision (default 0.1). ``deny_cache_seconds`` is how long
        this process may repeat a refusal without asking Redis again; default 0, or the setting's without ``client``.
        Raises ``InvalidBucket`` and ``ConfigurationError``.
        """
        if client is None:
            options = defaults()
        else:
            from ..store.factory import store_from_client  # it imports redis-py, which takes 0.1 s

            options = {"store": store_from_client(client, 0.1 if timeout is None else timeout), "prefix": "rq"}
        if prefix:
            options["prefix"] = prefix
        if time_zone:
            options["time_zone"] = time_zone
        if deny_cache_seconds is not None:
            options["deny_cache_seconds"] = deny_cache_seconds
        super().__init__(clock=clock, **options)

    def check(self, buckets: Iterable[Bucket], cost: int = 1) -> Decision:
        """Admit the request and charge every bucket ``cost`` units (1 where its rate counts requests), or refuse it.

        A refusal changes nothing.
        """
        return self._run(self._begin("check", buckets, cost))

    def peek(self, buckets: Iterable[Bucket], cost: int = 1) -> Decision:
        """What ``check`` would decide now; changes nothing."""
        return self._run(self.steps("peek", buckets, cost))

    def charge(self, buckets: Iterable[Bucket], cost: int = 1) -> Decision:
        """Charge every bucket that counts units; never refuses, and may leave it in debt."""
        return self._run(self.steps("charge", buckets, cost))

    def refund(self, buckets: Iterable[Bucket], cost: int = 1, *, charged: tuple[int, ...] = ()) -> Decision:
        """Give the newest units back to every bucket that counts units, never more than were used.

        Of what a decision charged, ``Decision.refund`` gives back only what is still counted: it passes ``charged``.
        """
        return self._run(self.steps("refund", buckets, cost, times=charged or NO_TIMES))

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
        return await shielded(self._arun(self.steps("refund", buckets, cost, times=charged or NO_TIMES)))

    async def aacquire(self, bucket: Bucket, timeout: float, cost: int = 1) -> Decision:  # noqa: ASYNC109 - a bound on the slot
        """``acquire``, awaited: the call to Redis, not the slot."""
        return await self._arun(self._acquire_steps(bucket, timeout, cost))

    async def areset(self, buckets: Iterable[Bucket]) -> int:
        """``reset``, awaited."""
        return await adrive(self._reset_steps(buckets), self.store.aexecute)

    def publish(self, *, lost: bool = False) -> int:
        """Give the policies a new revision and return it: each process reloads before it next asks for a decision.

        ``lost`` tells all processes that the store has lost counts.
        """
        try:
            if self._memory is not None:
                return self._memory.publish()
            keys = [revision_key(self.prefix), birth_key(self.prefix)]
            return int(drive(run_script(PUBLISH, keys, ("1" if lost else "0",)), self.store.execute))
        finally:
            self._deny_cache.clear()

    def stored_revision(self) -> int:
        """The revision that the store holds; 0 when it holds none. Learns the store's clock on the way."""
        if self._memory is not None:
            return self._memory.revision
        return drive(self.revision_steps(), self.store.execute)

    def _run(self, steps: Steps | Decision) -> Decision:
        return steps if isinstance(steps, Decision) else drive(steps, self.store.call().do)

    async def _arun(self, steps: Steps | Decision) -> Decision:
        return steps if isinstance(steps, Decision) else await adrive(steps, self.store.call().ado)
