"""What a limiter asks of its counters, and what keeps them: Redis (``protocol``), or this process (``memory``)."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, Literal, NamedTuple, Protocol

from ..store.commands import Command
from .decision import Charged, Decision, Settler
from .types import Bucket

#: The steps to a decision (see ``utils.sansio``).
Steps = Generator[Command, Any, Decision]
Mode = Literal["check", "peek", "charge", "refund", "acquire"]

#: Modes that charge the cost.
CHARGING = frozenset({"check", "charge", "acquire"})
#: Modes that charge or refund units by hand.
BY_HAND = frozenset({"charge", "refund"})


class LimitRequest(NamedTuple):
    """What a limiter is asked: a verb, the buckets, and how many units. Made by keywords."""

    mode: Mode
    buckets: tuple[Bucket, ...]
    #: Units; rates that count requests take 1, and none of those that are charged or refunded by hand.
    cost: int = 1
    #: Units of each bucket, where they differ; same order and length as ``buckets``; empty = ``cost`` by its rate.
    costs: tuple[int, ...] = ()
    #: The longest wait that ``acquire`` may book (µs).
    wait_us: int = 0
    #: The units that a refund takes, ``cost`` of each bucket; None = the newest.
    charged: Charged | None = None
    #: Units known to be used in each bucket's calendar window, for stores that lost counts: a bucket that holds fewer
    #: has used as many. Same order and length as ``buckets``; empty = nothing is known.
    seeds: tuple[int, ...] = ()
    #: The revision of the policies that the buckets are made from; None = they are not from the database.
    revision: int | None = None
    #: Charges and refunds after the decision; None = nothing does.
    settler: Settler | None = None

    def own_costs(self) -> tuple[int, ...]:
        """Return the units of each bucket; empty where all take ``cost``."""
        if self.costs or self.charged or (self.cost == 1 and self.mode not in BY_HAND):
            return self.costs
        if all(bucket.rate.counts == "units" for bucket in self.buckets):
            return ()
        request = 0 if self.mode in BY_HAND else 1
        return tuple(request if bucket.rate.counts == "requests" else self.cost for bucket in self.buckets)


class Backend(Protocol):
    """Keeps the counters of a limiter."""

    @property
    def now_us(self) -> int:
        """Its clock (µs), as this process last saw it."""

    def ask(self, request: LimitRequest, share: float = 1.0) -> Steps:
        """Return the steps of one atomic call; raises ``NewerRevision``, ``InvalidBucket`` and ``StoreError``.

        ``share`` is the part of the decision's time that the call may take on a Cluster.
        """

    def reset(self, buckets: Iterable[Bucket]) -> Generator[Command, Any, int]:
        """Return the steps that forget what was counted, and return how many buckets had counted anything."""

    def publish(self, lost: bool) -> Generator[Command, Any, int]:
        """Return the steps that store a new revision, and return it; ``lost`` = counts were lost before."""
