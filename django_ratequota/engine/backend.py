"""What keeps a limiter's counters: Redis (``protocol``), or this process (``memory``)."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, Protocol

from ..store.commands import Command
from .decision import Decision, LimitRequest
from .types import Bucket

#: The steps to a decision (see ``utils.sansio``).
Steps = Generator[Command, Any, Decision]


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
