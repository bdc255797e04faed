"""What textbook limiters admit above a limit, and what our script admits, on simulated clocks.

python -m benchmarks.overshoot    # prints the table of docs/scaling.md; `make pages` writes it, and draws its plots
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import redis

from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.testing.embedded import embedded_server

LIMIT, SECOND, HOUR = 100, 10**6, 3600 * 10**6
#: 2025-11-03 00:00 UTC (µs), where an hour begins; plots count from it.
START = 1_762_128_000_000_000
#: How old a node's copy of the counter gets, and how far two nodes' clocks are apart.
STALE, SKEW = 400_000, 200_000
#: The requests of one client in the order of time: when each comes (µs), and to which node.
Load = list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A load and what becomes of it."""

    #: In the names of files.
    name: str
    title: str
    #: The textbook's limiter, and whether it admits each request of the load.
    textbook: str
    decide: Callable[[Load], Iterator[bool]]
    load: Load
    #: The plot's length and first instant (µs).
    span: int
    start: int = START
    rate: str = "100/hour"
    #: How far each node's clock is ahead (µs).
    clocks: tuple[int, ...] = (0, 0, 0)

    @property
    def allowed(self) -> int:
        """The units that the rate allows within the load: a full bucket, and its refill."""
        rate = Rate.parse(self.rate)
        return rate.capacity + (self.load[-1][0] - self.load[0][0]) * rate.limit // rate.period_us

    def ours(self) -> Iterator[bool]:
        """Yield whether the package's script admits each request: a limiter on each node, by that node's clock."""
        now, bucket = START, Bucket("user:42", Rate.parse(self.rate))
        with redis.Redis.from_url(embedded_server()) as client:
            limiters = [
                Limiter(client=client, clock=lambda ahead=ahead: now + ahead, prefix="rqtest:overshoot", timeout=5)
                for ahead in self.clocks
            ]
            limiters[0].reset([bucket])
            for now, node in self.load:  # noqa: B007 - the clocks read it
                yield limiters[node].check([bucket]).allowed
            for limiter in limiters:
                limiter.store.close()


def fixed_window(load: Load) -> Iterator[bool]:
    """Count by the hour of the clock."""
    counts = Counter[int]()
    for at, _node in load:
        counts[at // HOUR] += 1
        yield counts[at // HOUR] <= LIMIT


def cached_counter(load: Load) -> Iterator[bool]:
    """Add to the shared counter at once, but decide by a copy that each node reads again every ``STALE`` µs."""
    count, copies = 0, dict[int, tuple[int, int]]()
    for at, node in load:
        period = (at - START + STALE * node // 3) // STALE  # the nodes read in turn
        if node not in copies or copies[node][0] < period:
            copies[node] = period, count
        allowed = copies[node][1] < LIMIT
        count += allowed
        yield allowed


def check_then_act(load: Load) -> Iterator[bool]:
    """Read the counter, decide, and add to it; requests of one instant all read before the first adds."""
    count = 0
    for _at, together in groupby(load, key=lambda request: request[0]):
        allowed = [count < LIMIT for _ in together]
        count += sum(allowed)
        yield from allowed


def own_clocks(load: Load) -> Iterator[bool]:
    """Refill a shared token bucket by the clock of the node that decides, and store that time."""
    tokens, last = float(LIMIT), 0
    for at, node in load:
        now = at + SKEW * node
        tokens = min(LIMIT, tokens + max(0, now - last) * LIMIT / (60 * SECOND))
        last, allowed = now, tokens >= 1
        tokens -= allowed
        yield allowed


def cases() -> tuple[Case, ...]:
    """Return what the textbooks warn of, one case each."""
    one_by_one = [(START + 2000 * n, n % 3) for n in range(99)]
    return (
        Case(
            name="edge",
            title="Bursts of 100 on both sides of a full hour, 100 allowed",
            textbook="a fixed window",
            decide=fixed_window,
            load=[(burst + 2000 * n, n % 3) for burst in (START - 200_000, START) for n in range(100)],
            span=800_000,
            start=START - 400_000,
        ),
        Case(
            name="stale",
            title="450 requests in a second to three nodes, 100 allowed",
            textbook="a counter cached for 400 ms",
            decide=cached_counter,
            load=[(START + SECOND * n // 450, n % 3) for n in range(450)],
            span=SECOND,
        ),
        Case(
            name="race",
            title="99 requests one by one, then 50 at once, 100 allowed",
            textbook="check, then act",
            decide=check_then_act,
            load=[*one_by_one, *((START + 300_000, n % 3) for n in range(50))],
            span=400_000,
        ),
        Case(
            name="clocks",
            title="A minute of 20 requests a second to two nodes, clocks 200 ms apart, 200 allowed",
            textbook="a token bucket by the nodes' clocks",
            decide=own_clocks,
            load=[(START + 50_000 * n, n % 2) for n in range(1201)],
            span=60 * SECOND,
            rate="100/min",
            clocks=(0, SKEW),
        ),
    )


def rows() -> Iterator[str]:
    """Yield the table."""
    yield from ("| sent | textbook limiter | admits | ours admits |", "|---|---|---|---|")
    for case in cases():
        counts = [sum(passed) for passed in (case.decide(case.load), case.ours())]
        theirs, ours = (f"{count} ({count / case.allowed:.1f} ×)" for count in counts)
        yield f"| {case.title} | {case.textbook} | {theirs} | {ours} |"


if __name__ == "__main__":
    print("\n".join(rows()))
