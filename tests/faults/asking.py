"""Asking a limiter, plainly or awaiting, and the limits that these tests ask about."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.engine.rates import ALGORITHMS
from django_ratequota.exceptions import StoreError, StoreLeftAlone

Ask = Callable[..., Decision]
Way = Callable[[], AbstractContextManager[Ask]]

#: A limit out of reach.
ENDLESS = Bucket("user:1", Rate.parse("1000000/day"))


@contextmanager
def plainly() -> Iterator[Ask]:
    """``check``, as ``ask(limiter, buckets, cost=1)``."""
    yield lambda limiter, buckets, cost=1: limiter.check(buckets, cost)


@contextmanager
def awaiting() -> Iterator[Ask]:
    """``acheck`` in one event loop, so that its connections last as long as the block."""
    with asyncio.Runner() as runner:
        yield lambda limiter, buckets, cost=1: runner.run(limiter.acheck(buckets, cost))


def failure(ask: Ask, limiter: Limiter, buckets: Sequence[Bucket]) -> str:
    """The reason of the store's error; "" when it decided."""
    try:
        ask(limiter, buckets)
    except StoreError as error:
        return error.reason
    return ""


def outcome(limiter: Limiter, bucket: Bucket = ENDLESS) -> str:
    """What became of a check: "decided", the failure's reason, or "left alone" while the breaker is open."""
    try:
        limiter.check([bucket])
    except StoreError as error:
        return "left alone" if isinstance(error, StoreLeftAlone) else error.reason
    return "decided"


async def aoutcome(limiter: Limiter, bucket: Bucket = ENDLESS) -> str:
    """``outcome``, awaited."""
    try:
        await limiter.acheck([bucket])
    except StoreError as error:
        return "left alone" if isinstance(error, StoreLeftAlone) else error.reason
    return "decided"


#: Begins as many checks at once; returns their outcomes to come.
Begin = Callable[..., list["Future[str]"]]


@contextmanager
def on_threads() -> Iterator[Begin]:
    with ThreadPoolExecutor(200) as pool:
        yield lambda limiter, times, bucket=ENDLESS: [pool.submit(outcome, limiter, bucket) for _ in range(times)]


@contextmanager
def in_tasks() -> Iterator[Begin]:
    """All in one event loop, on a thread of its own, so that its connections are kept."""
    with asyncio.Runner() as runner:
        loop, run = runner.get_loop(), asyncio.run_coroutine_threadsafe
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield lambda limiter, times, bucket=ENDLESS: [run(aoutcome(limiter, bucket), loop) for _ in range(times)]
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(30)


def outcomes(begun: Sequence[Future[str]]) -> list[str]:
    """What became of all these checks."""
    return [one.result(60) for one in begun]


def decides(limiter: Limiter, *buckets: Bucket) -> bool:
    """Whether the store decides about these; changes nothing."""
    return failure(lambda limiter, buckets: limiter.peek(buckets), limiter, buckets) == ""


@dataclass(frozen=True, slots=True)
class Asked:
    """One check and its outcome."""

    #: When it began and ended (monotonic, seconds).
    begun: float
    ended: float
    #: Why there was no decision; "" when there was one.
    error: str
    allowed: bool = False
    #: The server's clock at the decision (µs).
    at_us: int = 0

    @property
    def is_refused(self) -> bool:
        return not self.error and not self.allowed


class Load:
    """Threads and tasks that check until they are stopped."""

    def __init__(
        self, limiter: Limiter, buckets: Sequence[Bucket], *, threads: int = 0, tasks: int = 0, cancels: float = 0.0
    ) -> None:
        """``cancels`` is the share of the tasks' checks that are cancelled at some moment."""
        self.asked: list[Asked] = []
        self._cancels = cancels
        self.limiter, self.buckets, self._threads, self._tasks = limiter, buckets, threads, tasks
        self._enough = threading.Event()

    @property
    def admitted(self) -> int:
        return sum(asked.allowed for asked in self.asked)

    @property
    def errors(self) -> set[str]:
        """Why there were no decisions."""
        return {asked.error for asked in self.asked} - {""}

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Check until the block ends."""
        with ThreadPoolExecutor(self._threads + 1) as pool:
            done = [pool.submit(self._work) for _ in range(self._threads)]
            done.append(pool.submit(lambda: asyncio.run(self._all_tasks())))
            try:
                yield
            finally:
                self._enough.set()
            for one in done:
                one.result(60)

    def _work(self) -> None:
        while not self._enough.is_set():
            begun = time.monotonic()
            try:
                self._note(begun, self.limiter.check(self.buckets))
            except StoreError as error:
                self._note(begun, error)

    async def _all_tasks(self) -> None:
        await asyncio.gather(*(self._task() for _ in range(self._tasks)))

    async def _task(self) -> None:
        while not self._enough.is_set():
            begun, asking = time.monotonic(), asyncio.ensure_future(self.limiter.acheck(self.buckets))
            if random.random() < self._cancels:
                # What ran is counted, and nobody is let in for it.
                asyncio.get_running_loop().call_later(random.random() * 0.002, asking.cancel)
            try:
                self._note(begun, await asking)
            except asyncio.CancelledError:
                pass
            except StoreError as error:
                self._note(begun, error)
                await asyncio.sleep(0.001)  # a store left alone answers without giving others a turn

    def _note(self, begun: float, outcome: Decision | StoreError) -> None:
        if isinstance(outcome, StoreError):
            self.asked.append(Asked(begun, time.monotonic(), outcome.reason))
        else:
            self.asked.append(Asked(begun, time.monotonic(), "", outcome.allowed, outcome.at_us))


def slow(algorithm: str, limit: int, user: int = 1) -> Bucket:
    """A limit that frees no unit while a test lasts."""
    return Bucket(f"user:{user}", Rate.parse(f"{limit}/3650day {algorithm}"))


def one_of_each(limit: int) -> list[Bucket]:
    """Such a limit by each algorithm."""
    return [slow(algorithm, limit) for algorithm in ALGORITHMS]
