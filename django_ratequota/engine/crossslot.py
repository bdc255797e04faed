"""Checks on a Cluster: one atomic call per subject, as each subject may live on another server.

The subjects of this caller alone come first, shared ones (everyone, plan) last. When one of them refuses, or its
store fails, the units that the calls before it charged are given back. Each refund is tried, whatever became of the
others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import Any

from ..exceptions import NewerRevision, StoreError, StoreLeftAlone
from ..store.commands import Command
from ..utils.log import logger
from .decision import Charges, Decision, LimitRequest, Link, Steps, charges_of, take_all
from .protocol import ScriptBackend
from .slots import Lease
from .types import Bucket, BucketStatus

_REVISION_SECONDS = 1.0


class LookForChanges:
    """A link of a limiter's chain: reads the revision once a second.

    It cannot be read with every decision, as its key is on one server and most buckets are on others.
    """

    def __init__(self, below: Link, backend: ScriptBackend, forget: Callable[[], None]) -> None:
        """``forget`` drops what was decided by superseded policies."""
        self._below, self._backend, self._forget = below, backend, forget
        # When it was last asked for (monotonic, seconds), and whether that failed.
        self._asked_at = -_REVISION_SECONDS
        self._revision_unread = False

    def ask(self, request: LimitRequest) -> Steps:
        # Nobody asks again while one request does, nor right after that failed.
        if request.revision is not None and time.monotonic() - self._asked_at >= _REVISION_SECONDS:
            yield from self._compare(request.revision)
        return (yield from self._below.ask(request))

    def _compare(self, revision: int | None) -> Generator[Command, Any, None]:
        """Compare the revision with the stored one; raises ``NewerRevision``.

        A failure costs no decision: the server of the revision's key need not be the one that decides.
        """
        self._asked_at = time.monotonic()
        unread, self._revision_unread = self._revision_unread, False
        try:
            # Not a peek, which would publish nothing where there is no revision.
            request = LimitRequest(mode="check", buckets=(), cost=0, revision=revision)
            yield from self._backend.ask(request)
        except NewerRevision:
            self._forget()
            raise
        except StoreError as error:
            self._revision_unread = True
            if not unread:
                logger.warning("policy changes take effect late, as their revision cannot be read: %s", error)


class EachSubject:
    """A link of a limiter's chain: one call for each subject."""

    def __init__(self, backend: ScriptBackend, freed: Callable[[Iterable[Bucket]], None]) -> None:
        """``freed`` receives the buckets to which a refused check has given units back."""
        self._backend, self._freed = backend, freed

    def ask(self, request: LimitRequest) -> Steps:
        """Return the steps of a verb over buckets of any subjects; raises ``StoreError``.

        The statuses have the buckets' order. A refusal leaves out buckets whose server failed after it.
        """
        self._backend.verify(request.buckets)  # before any of them is charged
        decisions: list[Decision] = []
        failure: StoreError | None = None
        subjects = sorted(dict.fromkeys(bucket.subject for bucket in request.buckets), key=_is_shared)
        for subject in subjects:
            places = [at for at, bucket in enumerate(request.buckets) if bucket.subject == subject]
            own = request.part(places)._replace(revision=None)  # which is compared apart
            # After a refusal, the other subjects are read, not charged.
            refused = not all(decision.allowed for decision in decisions)
            try:
                decision = yield from self._backend.ask(own._replace(mode="peek") if refused else own)
            except StoreError as error:
                if refused:
                    continue  # a server that is down does not undo a refusal
                if request.mode == "check":
                    yield from self._give_back(decisions, request.slot)
                elif request.mode == "refund":
                    failure = error
                    continue
                if decisions and isinstance(error, StoreLeftAlone):
                    raise StoreError(error.reason, str(error)) from error  # to other servers, something was sent
                raise
            if request.mode == "check" and not refused and not decision.allowed:
                decisions = yield from self._give_back(decisions, request.slot)
            decisions.append(decision)
        if failure:
            raise failure
        statuses = {status.bucket.counter: status for decision in decisions for status in decision.statuses}
        allowed = all(decision.allowed for decision in decisions)
        # Each subject's server has a clock of its own.
        units = max((decision.cost for decision in decisions), default=0) if allowed else 0
        at_us = max((decision.at_us for decision in decisions), default=0)
        found = tuple(statuses[bucket.counter] for bucket in request.buckets if bucket.counter in statuses)
        whole = Decision(allowed, found, at_us, request.revision or 0, request.settler, cost=units)
        if allowed:
            charges = (charge for decision in decisions for charge in charges_of(decision))
            whole._charges = Charges(charges, units=units)
        return whole

    def _give_back(
        self, charged: list[Decision], slot: tuple[int, int] | None
    ) -> Generator[Any, Any, list[Decision]]:
        """Refund the decisions, release their slots, and return them with their buckets' statuses after that."""
        returned = []
        for decision in charged:
            now: dict[object, BucketStatus] = {}
            for refund in take_all(charges_of(decision)):  # one call for each cost
                try:
                    after = yield from self._backend.ask(refund)
                    now |= {status.bucket.counter: status for status in after.statuses}
                except StoreError:
                    continue  # its server fails now: the units stay charged until they drain or expire
                finally:
                    self._freed(refund.buckets)
            taken = [status for status in decision.statuses if status.bucket.rate.concurrent and status.allowed]
            if slot and taken:
                try:
                    leases = [Lease(status.bucket, *slot) for status in taken]
                    yield from self._backend.release(leases)
                    now |= {each.bucket.counter: replace(each, remaining=each.remaining + 1) for each in taken}
                except StoreError:
                    pass  # its lease ends
            statuses = tuple(now.get(status.bucket.counter, status) for status in decision.statuses)
            returned.append(replace(decision, statuses=statuses))
        return returned


def _is_shared(subject: str) -> bool:
    return subject == "everyone" or subject.startswith("plan:")
