"""The time that a decision may wait for the server: only what the system timed as silent counts whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from django_ratequota.store import base
from django_ratequota.store.base import Budget, ServerActivity
from django_ratequota.store.loop_connections import BudgetTimeout


class Clock:
    """A monotonic clock in seconds that waits advance."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def waits(self, *steps: tuple[float, bool]) -> Callable[[float], bool]:
        """A wait that takes the next of ``steps``: seconds beyond what it was asked for, and whether it was ended.

        Where the steps are used up, nothing ever comes, on time.
        """
        left = list(steps)

        def ready(milliseconds: float) -> bool:
            late, ended = left.pop(0) if left else (0.0, False)
            self.now += milliseconds / 1000 + late
            return ended

        return ready


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(base, "time", clock)
    return clock


def test_a_silent_server_has_its_time_and_a_last_look(clock: Clock) -> None:
    with pytest.raises(TimeoutError):
        Budget(0.8).wait(clock.waits())
    assert clock.now == pytest.approx(1000.801)


def test_a_thread_that_wakes_up_late_still_reads(clock: Clock) -> None:
    spent = Budget(0.8)
    for _ in range(5):
        spent.wait(clock.waits((30.0, True)))
    assert spent.left == pytest.approx(0.3), "one slice each, however late"
    assert clock.now > 1150


def test_late_wake_ups_give_a_silent_server_no_more_time(clock: Clock) -> None:
    with pytest.raises(TimeoutError):
        Budget(0.8).wait(clock.waits(*[(1.0, False)] * 20))
    assert clock.now == pytest.approx(1009.801)


def test_a_reply_there_at_the_last_look_is_read(clock: Clock) -> None:
    Budget(0.8).wait(clock.waits(*[(0.0, False)] * 8, (0.0, True)))


def test_a_reply_that_trickles_in_ends_after_twice_the_time(clock: Clock) -> None:
    trickling = Budget(0.8)

    def read() -> None:
        for _ in range(10_000):
            trickling.wait(clock.waits((-0.0005, True)))

    with pytest.raises(TimeoutError):
        read()
    assert clock.now < 1002


@pytest.mark.parametrize(
    ("late", "answering", "turns"),
    [(0.0, False, 8), (1.0, False, 16), (0.0, True, 16)],
    ids=["idle", "busy", "alive"],
)
def test_waiting_in_line_counts_half_where_the_process_is_busy_or_the_server_alive(
    clock: Clock, late: float, answering: bool, turns: int
) -> None:
    waiting, activity, taken = Budget(0.8), ServerActivity(), []

    def ready(seconds: float) -> None:
        clock.now += seconds + late
        if answering:
            activity.connected_at = clock.now

    def wait() -> None:
        while len(taken) < 100:
            waiting.wait_in_queue(ready, activity)
            taken.append(clock.now)

    with pytest.raises(TimeoutError):
        wait()
    assert len(taken) == turns


def test_waiting_for_others_whom_the_server_answers_is_not_waiting_for_the_server(clock: Clock) -> None:
    """Of 300 requests at once, the last in the queue were decided by on_error, as if Redis were down."""
    waiting, activity = Budget(0.8), ServerActivity()

    def ready(seconds: float) -> None:
        clock.now += seconds
        activity.replied_at = clock.now

    for _ in range(80):
        waiting.wait_in_queue(ready, activity)
        assert waiting.left == 0.8

    def wait() -> None:
        for _ in range(100):
            waiting.wait_in_queue(ready, activity)

    with pytest.raises(TimeoutError):
        wait()
    assert clock.now == pytest.approx(1009.6, abs=0.2), "ten times its seconds, and its own, of which half count"


def test_a_server_that_falls_silent_has_its_time_from_there(clock: Clock) -> None:
    """Half as long again: a busy process may not have read a reply that is there."""
    waiting, activity = Budget(0.8), ServerActivity()

    def silent(seconds: float) -> None:
        clock.now += seconds

    def wait() -> None:
        for _ in range(100):
            waiting.wait_in_queue(silent, activity)

    for _ in range(6):
        waiting.wait_in_queue(silent, activity)
    assert waiting.left == pytest.approx(0.2)
    activity.replied_at = clock.now
    with pytest.raises(TimeoutError):
        wait()
    assert clock.now == pytest.approx(1000.6 + 0.4 + 0.8, abs=0.11)


def test_a_command_that_waited_in_line_has_its_time_from_there(clock: Clock) -> None:
    """With only the rest of the time it timed out, its connection was dropped, and the next command waited again."""

    def silent(seconds: float) -> None:
        clock.now += seconds

    asked, activity = Budget(0.8), ServerActivity()

    def ask() -> None:
        for _ in range(100):
            for _ in range(6):
                asked.wait_in_queue(silent, activity)
            asked.connected()

    with pytest.raises(TimeoutError):
        ask()
    assert clock.now == pytest.approx(1001.6), "twice its time, whatever it waited for"


def test_the_shortest_budget_looks_for_a_millisecond(clock: Clock) -> None:
    with pytest.raises(TimeoutError):
        Budget(0.0001).wait(clock.waits())
    assert clock.now == pytest.approx(1000.002)


# --- Tasks. ---


def test_a_stalled_loop_reads_a_reply_that_arrived_meanwhile() -> None:
    async def run() -> float:
        reply, spent = asyncio.get_running_loop().create_future(), Budget(0.08)
        reading, writing = asyncio.Event(), asyncio.get_running_loop()

        async def read() -> None:
            async with BudgetTimeout(spent):
                reading.set()
                await reply

        task = asyncio.create_task(read())
        await reading.wait()
        time.sleep(0.3)  # noqa: ASYNC251 - the stall
        # Later than every timer that is due: as where a loop runs its timers before it reads its sockets.
        writing.call_later(0, reply.set_result, None)
        await task
        return spent.left

    assert asyncio.run(run()) > 0


def test_a_block_that_ends_in_a_busy_loop_ends_once() -> None:
    """The next wake-up, due in the same turn of the loop, logged an error each time."""
    errors: list[object] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))

        async def wait() -> None:
            async with BudgetTimeout(Budget(0.08)):
                await asyncio.Event().wait()

        def stall() -> None:
            time.sleep(0.02)  # the loop is busy meanwhile
            stalls.append(loop.call_later(0, stall))

        stalls = [loop.call_later(0, stall)]
        with pytest.raises(TimeoutError):
            await wait()
        stalls[-1].cancel()

    asyncio.run(run())
    assert errors == []


def test_a_caller_s_own_cancellation_stays_one() -> None:
    async def run() -> None:
        async def wait() -> None:
            async with BudgetTimeout(Budget(10)):
                await asyncio.Event().wait()

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)  # it begins
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
