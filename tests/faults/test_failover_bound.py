"""A failover loses admissions that were not replicated yet: that many are admitted again, and no more."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from django_ratequota import Bucket, Limiter
from django_ratequota.engine.rates import ALGORITHMS

from . import poll
from .asking import Way, decides, one_of_each, plainly, slow
from .servers import PATIENCE, REPLICATION, Node, follow, in_step
from .wire import Wire

Make = Callable[..., Limiter]

LIMIT = 300
THREADS = 4


class Failover:
    """A primary, a replica whose link can be stalled, and the one address at which the application finds either."""

    def __init__(self, nodes: Callable[..., Node], proxies: Callable[[Node], Wire]) -> None:
        self.primary, self.replica = nodes(*REPLICATION), nodes(*REPLICATION)
        self.link, self.front = proxies(self.primary), proxies(self.primary)
        follow(self.replica, self.primary, through=self.link)

    def stall(self) -> None:
        """Later writes do not reach the replica, although both ends keep the link open."""
        self.primary.command("CONFIG", "SET", "repl-ping-replica-period", 3600)  # a ping is written as well
        poll(lambda: in_step(self.primary, self.replica), PATIENCE, "the replica is in step")
        self.link.freeze()

    def unreplicated(self) -> int:
        """Bytes that the primary wrote and the replica has not."""
        mine, theirs = self.primary.info("replication"), self.replica.info("replication")
        return int(mine["master_repl_offset"] - theirs["slave_repl_offset"])

    def fail_over(self) -> None:
        """Kill the primary; the replica takes over its role and address."""
        self.primary.kill()
        self.replica.command("REPLICAOF", "NO", "ONE")
        self.front.target = self.replica


@pytest.fixture
def failover(nodes: Callable[..., Node], proxies: Callable[[Node], Wire]) -> Failover:
    return Failover(nodes, proxies)


def admissions(way: Way, limiter: Limiter, buckets: list[Bucket], times: int) -> int:
    """How many of these checks, on threads, were admitted; each must be decided."""

    def work(number: int) -> int:
        with way() as ask:
            return sum(ask(limiter, buckets).allowed for _ in range(number))

    shares = [times // THREADS + (number < times % THREADS) for number in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as threads:
        return sum(threads.map(work, shares))


@pytest.mark.parametrize(("replicated", "lost"), [(120, 80), (0, LIMIT), (200, 0)])
def test_a_failover_with_a_stalled_link(
    failover: Failover, limiters: Make, way: Way, replicated: int, lost: int
) -> None:
    """The overshoot is what was not replicated: never more than the limit, and nothing if all was."""
    limiter = limiters(failover.front)
    buckets = [slow(algorithm, LIMIT, user) for user, algorithm in enumerate(ALGORITHMS)]
    before: dict[Bucket, int] = {}
    for bucket in buckets:
        before[bucket] = admissions(way, limiter, [bucket], replicated)
    failover.stall()
    for bucket in buckets:
        before[bucket] += admissions(way, limiter, [bucket], lost)
    behind = failover.unreplicated()
    assert (behind > 0) == (lost > 0)
    failover.fail_over()
    poll(lambda: decides(limiter, buckets[0]), PATIENCE, "the new primary decides")
    for bucket in buckets:
        after = admissions(way, limiter, [bucket], LIMIT + 10)
        overshoot = before[bucket] + after - LIMIT
        print(
            f"\n{bucket.rate.algorithm}: {before[bucket]} acknowledged, {lost} of them unreplicated ({behind} bytes "
            f"in all), {after} admitted by the new primary: {overshoot} above the limit of {LIMIT}"
        )
        assert before[bucket] == replicated + lost
        assert overshoot == lost
        assert overshoot <= LIMIT


def test_a_primary_that_returns_as_a_replica_restores_no_counters(failover: Failover, limiters: Make) -> None:
    """Two primaries have counted; the newer one's counters stand, and the older one's are gone."""
    limiter, buckets = limiters(failover.front), one_of_each(LIMIT)
    assert admissions(plainly, limiter, buckets, 50) == 50
    failover.stall()
    assert admissions(plainly, limiter, buckets, 50) == 50
    failover.replica.command("REPLICAOF", "NO", "ONE")
    failover.front.target = failover.replica
    failover.front.hang_up()
    poll(lambda: decides(limiter, buckets[0]), PATIENCE, "the new primary decides")
    assert admissions(plainly, limiter, buckets, 10) == 10
    follow(failover.primary, failover.replica)
    failover.replica.kill()
    failover.primary.command("REPLICAOF", "NO", "ONE")
    failover.front.target = failover.primary
    poll(lambda: decides(limiter, buckets[0]), PATIENCE, "the old primary decides again")
    assert [status.remaining for status in limiter.peek(buckets).statuses] == [LIMIT - 60] * len(buckets)
