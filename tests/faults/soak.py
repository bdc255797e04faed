"""A long mixed load with random faults: never above the limit, and nothing leaks.

    python -m tests.faults.soak 600

Rounds of a few seconds; each has new subjects, threads and tasks that ask for them, and faults of its own. One
store is a server behind a breakable network, which writes down each admission before it answers; the other is a
Cluster whose slots move and whose nodes stop for a moment. None of these forgets an acknowledged admission, so
the bound is the limit itself. Figures are printed every round; the first ones are the warm-up.
"""

from __future__ import annotations

import random
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import redis.cluster

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.engine.keys import bucket_key
from django_ratequota.engine.rates import ALGORITHMS
from django_ratequota.exceptions import StoreError

from . import poll
from .asking import Load
from .cluster import Cluster
from .servers import Node
from .wire import Wire

LIMIT = 400
TIMEOUT = 0.2
THREADS, TASKS, SUBJECTS = 2, 2, 4
#: How many may run at once, of how many that try to.
SLOTS, RUNNERS = 3, 6
ROUND_SECONDS = 4.0


def _patiently(ask: Callable[[], Decision]) -> Decision:
    """Ask again after a timeout: the server syncs its disk at each write. A reply may be lost then, too."""
    end = time.monotonic() + 30
    while True:
        try:
            return ask()
        except StoreError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)  # the breaker answers at once for a second: this loop would take the core meanwhile


class Runners:
    """Threads that run while they hold a slot; counts how many do at once."""

    def __init__(self, limiter: Limiter, mark: str) -> None:
        self._limiter, self._buckets = limiter, [Bucket(f"user:{mark}", Rate.parse(f"{SLOTS} concurrent"))]
        self._lock, self._end = threading.Lock(), threading.Event()
        self.running = self.most = self.ran = 0

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Run while the block does."""
        threads = [threading.Thread(target=self._work) for _ in range(RUNNERS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._end.set()
            for thread in threads:
                thread.join()

    def _work(self) -> None:
        while not self._end.is_set():
            with suppress(StoreError), self._limiter.check(self._buckets) as decision:
                if decision.allowed:
                    self._run()
            self._end.wait(0.01)

    def _run(self) -> None:
        with self._lock:
            self.ran, self.running = self.ran + 1, self.running + 1
            self.most = max(self.most, self.running)
        self._end.wait(0.005)  # what others could do meanwhile
        with self._lock:
            self.running -= 1


class Soak:
    """Two stores and their faults."""

    def __init__(self, stack: ExitStack, seed: int) -> None:
        self.random = random.Random(seed)
        self.node = stack.enter_context(Node("appendonly yes", "appendfsync always"))
        self.proxy = stack.enter_context(Wire(self.node))
        self.cluster = stack.enter_context(Cluster(node_timeout_ms=5000))
        with self.proxy.client() as client:
            self.single = Limiter(client=client, prefix="soak", timeout=TIMEOUT)
        with redis.cluster.RedisCluster.from_url(self.cluster.url) as clustered:
            self.clustered = Limiter(client=clustered, prefix="soak", timeout=TIMEOUT)
        for limiter in (self.single, self.clustered):
            stack.callback(limiter.store.close)

    def run(self, number: int) -> Counter[str]:
        """Run one round; returns the outcomes of its requests."""
        singles, clusters = self._loads(self.single, f"{number}s"), self._loads(self.clustered, f"{number}c")
        runners = [Runners(limiter, f"{number}") for limiter in (self.single, self.clustered)]
        with ExitStack() as stack:
            for load in (*singles, *clusters, *runners):
                stack.enter_context(load.going_on())
            end = time.monotonic() + ROUND_SECONDS
            while time.monotonic() < end:
                self.random.choice(self._faults(clusters))()
        self._mend()
        for load in (*singles, *clusters):
            self._settle(load)
        for each in runners:
            assert each.most <= SLOTS, f"{each.most} of {SLOTS} ran at once"
        ran = Counter(ran=sum(each.ran for each in runners))
        return ran + Counter(
            one.error or ("admitted" if one.allowed else "refused")
            for load in (*singles, *clusters)
            for one in load.asked
        )

    def _loads(self, limiter: Limiter, mark: str) -> list[Load]:
        """Callers of a store, each with two buckets, and threads and tasks that check them."""
        found = []
        for number in range(SUBJECTS):
            rates = [Rate.parse(f"{LIMIT}/3650day {name}") for name in self.random.sample(ALGORITHMS, 2)]
            # The second has room to spare: what the first refuses is never charged there.
            buckets = [Bucket(f"user:{mark}{number}", rates[0]), Bucket(f"plan:{mark}{number}", rates[1])]
            found.append(Load(limiter, buckets, threads=THREADS, tasks=TASKS, cancels=0.02))
        return found

    def _settle(self, load: Load) -> None:
        """All that is left is admitted now; in total exactly the limit, except for lost replies."""
        admitted, limiter, buckets = load.admitted, load.limiter, load.buckets
        while admitted <= LIMIT and _patiently(partial(limiter.check, buckets)).allowed:
            admitted += 1
        remaining = [status.remaining for status in _patiently(partial(limiter.peek, buckets)).statuses]
        assert admitted <= LIMIT, f"{admitted} of {LIMIT} admitted"
        assert 0 in remaining, f"refused with {remaining} left"

    def _faults(self, loads: list[Load]) -> list[Callable[[], object]]:
        return [
            self._wait,
            self._wait,
            lambda: self._while(lambda: setattr(self.proxy, "delay", 0.05), lambda: setattr(self.proxy, "delay", 0)),
            lambda: self._while(self.proxy.freeze, self.proxy.thaw),
            lambda: self._while(self.node.freeze, self.node.thaw),
            self.proxy.hang_up,
            lambda: setattr(self.proxy, "cut_after_execution", 3),
            lambda: setattr(self.proxy, "cut_before_request_is_passed_on", 3),
            lambda: self.node.command("SCRIPT", "FLUSH"),
            lambda: self._while(lambda: self._ask_replicas(1), lambda: self._ask_replicas(0)),
            self._restart,
            lambda: self._move(self.random.choice(loads).buckets[0]),
            self._stop_a_master,
        ]

    def _wait(self) -> None:
        time.sleep(self.random.random() * 0.3)  # load runs meanwhile: a fault lasts for a while

    def _while(self, begin: Callable[[], object], end: Callable[[], object]) -> None:
        begin()
        try:
            self._wait()
        finally:
            end()

    def _ask_replicas(self, number: int) -> None:
        self.node.command("CONFIG", "SET", "min-replicas-to-write", number)

    def _restart(self) -> None:
        self.node.kill()
        self._wait()
        self.node.start()

    def _move(self, bucket: Bucket) -> None:
        key = bucket_key("soak", bucket)
        source = self.cluster.owner(key)
        target = self.random.choice([node for node in self.cluster.primaries() if node is not source])
        self.cluster.move_slot(self.cluster.slot(key), source, target)

    def _stop_a_master(self) -> None:
        master = self.random.choice(self.cluster.primaries())
        self._while(master.freeze, master.thaw)

    def _mend(self) -> None:
        self.proxy.cut_after_execution = self.proxy.cut_before_request_is_passed_on = 0
        # A hundred callers have keys on every master.
        callers = [Bucket(f"user:{number}", Rate.parse("1/s")) for number in range(100)]
        for limiter in (self.single, self.clustered):
            poll(partial(decide_all, limiter, callers), 30, "decisions come again")


def decide_all(limiter: Limiter, buckets: list[Bucket]) -> bool:
    try:
        for bucket in buckets:
            limiter.peek([bucket])
    except StoreError:
        return False
    return True


def figures(soak: Soak) -> dict[str, float]:
    """The numbers that a leak would increase."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "clients": int(soak.node.info("clients")["connected_clients"]),
        "MiB": round(pages * resource.getpagesize() / 2**20, 1),
    }


def main(seconds: float, seed: int | None = None) -> None:
    """Run rounds until the time is up; raises AssertionError."""
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    print(f"seed {seed}")
    with ExitStack() as stack:
        soak = Soak(stack, seed)
        end, number, total = time.monotonic() + seconds, 0, Counter[str]()
        warm: dict[str, float] = {}
        while time.monotonic() < end or number < 3:
            number += 1
            total += soak.run(number)
            now = figures(soak)
            if number <= 5 or not warm:
                warm = {name: max(value, warm.get(name, 0)) for name, value in now.items()}
            print(f"round {number}: {now} {dict(total)}", flush=True)
        assert total["admitted"], total
        assert total["ran"], total
        for name, slack in {"files": 60, "threads": 8, "clients": 40, "MiB": 40}.items():
            assert now[name] <= warm[name] + slack, f"{name} grew from {warm[name]} to {now[name]}"
        print(f"{number} rounds: nothing above its limit; {warm} after the warm-up, {now} at the end")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 600.0)
