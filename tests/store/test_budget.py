"""The time that a decision may wait for the server: only what the system timed as silent counts whole."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import repeat

import pytest

from django_ratequota.store import base
from django_ratequota.store.base import Budget, ServerActivity
from django_ratequota.store.link import Link, Ready
from django_ratequota.utils.sansio import adrive, drive


@dataclass
class Reply:
    """What a thread awaits: a server's reply, or its turn in the queue for a connection."""

    poll: Callable[[float], bool]
    queued_for: ServerActivity | None = None

    async def apoll(self, milliseconds: float) -> bool:
        raise AssertionError("no task awaits it")


class Clock:
    """A monotonic clock in seconds that waits advance."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def reply(self, *, after: float | None = None, late: float = 0.0) -> Reply:
        """A reply that comes ``after`` seconds of a slice, or never; looks are ``late`` by so many seconds."""

        def poll(milliseconds: float) -> bool:
            self.now += (milliseconds / 1000 if after is None else after) + late
            return after is not None

        return Reply(poll)

    def turn(self, activity: ServerActivity, meanwhile: str = "", late: float = 0.0) -> Reply:
        """A turn in the queue that never comes; ``meanwhile`` names the activity of the server in each slice."""

        def poll(milliseconds: float) -> bool:
            self.now += milliseconds / 1000 + late
            if meanwhile:
                setattr(activity, meanwhile, self.now)
            return False

        return Reply(poll, activity)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(base, "time", clock)
    return clock


@pytest.fixture
def link() -> Iterator[Link]:
    """A link to a server that says nothing."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        link = Link(ours)
        link.server = theirs
        yield link


def reading(link: Link) -> Generator[Ready, object, bytes]:
    data = b""
    while not data:
        yield link.readable
        data, _ = link.receive()
    return data


def exhaust(budget: Budget, awaited: Reply) -> int:
    """Wait until the time is used up; returns for how many slices."""
    for slices in range(10_000):
        try:
            budget.wait(awaited)
        except TimeoutError:
            return slices
    raise AssertionError("it is never used up")


def test_a_silent_server_has_its_time(clock: Clock) -> None:
    assert exhaust(Budget(0.8), clock.reply()) == 8
    assert clock.now == pytest.approx(1000.8)


def test_a_thread_that_wakes_up_late_still_reads(clock: Clock) -> None:
    spent = Budget(0.8)
    for _ in range(5):
        spent.wait(clock.reply(after=0.1, late=30.0))
    assert spent.left == pytest.approx(0.3), "one slice each, however late"
    assert clock.now > 1150


def test_late_wake_ups_give_a_silent_server_no_more_time(clock: Clock) -> None:
    assert exhaust(Budget(0.8), clock.reply(late=1.0)) == 8


def test_a_reply_that_trickles_in_ends_with_the_time(clock: Clock) -> None:
    assert exhaust(Budget(0.8), clock.reply(after=0.0005)) == 1600


def test_a_reply_is_looked_for_once_more_when_the_time_is_used_up(link: Link) -> None:
    looks = iter([lambda: None, lambda: link.server.send(b"reply")])  # the second slice ends just before the reply
    assert drive(reading(link), lambda ready: next(looks)()) == b"reply"


@pytest.mark.parametrize(
    ("late", "meanwhile", "seconds"),
    [(0.0, "", 0.8), (1.0, "", 1.6), (0.0, "connected_at", 1.6)],
    ids=["idle", "busy", "alive"],
)
def test_waiting_in_line_counts_half_where_the_process_is_busy_or_the_server_alive(
    clock: Clock, late: float, meanwhile: str, seconds: float
) -> None:
    slices = exhaust(Budget(0.8), clock.turn(ServerActivity(), meanwhile, late))
    assert clock.now - slices * late == pytest.approx(1000 + seconds, abs=0.01)


def test_waiting_for_others_whom_the_server_answers_is_not_waiting_for_the_server(clock: Clock) -> None:
    """Of 300 requests at once, the last in the queue were decided by on_error, as if Redis were down."""
    waiting, turn = Budget(0.8), clock.turn(ServerActivity(), "replied_at")
    for _ in range(80):
        waiting.wait(turn)
        assert waiting.left == 0.8
    exhaust(waiting, turn)
    assert clock.now == pytest.approx(1009.6, abs=0.2), "ten times its seconds, and its own, of which half count"


def test_a_server_that_falls_silent_has_its_time_from_there(clock: Clock) -> None:
    """Half as long again: a busy process may not have read a reply that is there."""
    waiting, activity = Budget(0.8), ServerActivity()
    for _ in range(6):
        waiting.wait(clock.turn(activity))
    assert waiting.left == pytest.approx(0.2)
    activity.replied_at = clock.now
    exhaust(waiting, clock.turn(activity))
    assert clock.now == pytest.approx(1000.6 + 0.4 + 0.8, abs=0.11)


def test_a_command_that_waited_in_line_has_its_time_from_there(clock: Clock) -> None:
    """With only the rest of the time it timed out, its connection was dropped, and the next command waited again."""
    asked, turn = Budget(0.8), clock.turn(ServerActivity())

    def ask() -> None:
        for slices in repeat(6, 100):
            for _ in range(slices):
                asked.wait(turn)
            asked.connected()

    with pytest.raises(TimeoutError):
        ask()
    assert clock.now == pytest.approx(1001.6), "twice its time, whatever it waited for"


def test_the_shortest_budget_looks_for_a_millisecond(clock: Clock) -> None:
    assert exhaust(Budget(0.0001), clock.reply()) == 1
    assert clock.now == pytest.approx(1000.001)


# --- Tasks. ---


def test_a_stalled_loop_reads_a_reply_that_arrived_meanwhile(link: Link) -> None:
    async def run() -> float:
        spent = Budget(0.08)
        task = asyncio.create_task(adrive(reading(link), spent.await_for))
        await asyncio.sleep(0)  # it begins
        time.sleep(0.3)  # noqa: ASYNC251 - the stall
        link.server.send(b"reply")
        assert await task == b"reply"
        return spent.left

    assert asyncio.run(run()) > 0


def test_a_task_waits_twice_its_time_at_most_in_a_busy_loop(link: Link) -> None:
    async def run() -> float:
        loop, begun = asyncio.get_running_loop(), time.monotonic()

        def stall() -> None:
            time.sleep(0.02)  # the loop is busy meanwhile
            stalls.append(loop.call_later(0, stall))

        stalls = [loop.call_later(0, stall)]
        with pytest.raises(TimeoutError):
            await adrive(reading(link), Budget(0.08).await_for)
        stalls[-1].cancel()
        return time.monotonic() - begun

    assert 0.08 <= asyncio.run(run()) < 5


def test_a_caller_s_own_cancellation_stays_one(link: Link) -> None:
    async def run() -> None:
        task = asyncio.create_task(adrive(reading(link), Budget(10).await_for))
        await asyncio.sleep(0)  # it begins
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not asyncio.get_running_loop().remove_reader(link.fileno()), "its loop no longer watches the socket"

    asyncio.run(run())


def test_a_loop_that_can_watch_no_socket_polls_it_in_a_thread(link: Link) -> None:
    """As the default loop of Windows."""

    class Proactor(asyncio.SelectorEventLoop):
        def add_reader(self, *_: object) -> None:
            raise NotImplementedError

    link.server.send(b"reply")
    with asyncio.Runner(loop_factory=Proactor) as runner:
        assert runner.run(adrive(reading(link), Budget(10).await_for)) == b"reply"
