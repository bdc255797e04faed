"""The circuit breaker: what opens it, who may probe, what closes it, and what is logged and sent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from django_ratequota import Limiter
from django_ratequota.exceptions import OutOfTime, StoreError, StoreLeftAlone
from django_ratequota.signals import store_state_changed
from django_ratequota.store.base import Call, DeadlinePassed, Pause
from django_ratequota.store.breaker import PROBE_SECONDS, Breaker


class Seconds:
    """A clock in seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def breaker(seconds: Seconds) -> Breaker:
    return Breaker("redis.example:6379", seconds)


@pytest.fixture
def events() -> Iterator[list[dict[str, Any]]]:
    """What receivers of ``store_state_changed`` were sent."""
    sent: list[dict[str, Any]] = []

    def receive(**arguments: Any) -> None:
        del arguments["signal"]
        sent.append(arguments)

    store_state_changed.connect(receive)
    yield sent
    store_state_changed.disconnect(receive)


def begin(breaker: Breaker, surplus_at: float = 0.0, *, always: bool = False) -> None:
    """Begin a use of the server, as stores do."""
    if breaker.open and not always:
        breaker.take_probe(surplus_at)


def fail(breaker: Breaker, reason: str = "timeout", times: int = 1, *, always: bool = False) -> None:
    for _ in range(times):
        begin(breaker, always=always)
        breaker.count(StoreError(reason, "no answer"))


def succeed(breaker: Breaker, *, always: bool = False) -> None:
    begin(breaker, always=always)
    breaker.succeeded()


def refuses(breaker: Breaker, surplus_at: float = 0.0) -> bool:
    """Whether the breaker refuses a use of the server; an accepted use ends as if it were cancelled."""
    try:
        begin(breaker, surplus_at)
    except StoreLeftAlone:
        return True
    return False


def lines(caplog: Any) -> list[tuple[str, str]]:
    return [(record.levelname, record.message) for record in caplog.records if record.name == "django_ratequota"]


# --- What opens it. ---


def test_it_opens_after_the_number_of_consecutive_failures(breaker: Breaker) -> None:
    fail(breaker, times=2)
    assert (breaker.open, breaker.failures, breaker.reason, breaker.seconds) == (False, 2, "timeout", 0.0)
    fail(breaker, "readonly")
    assert (breaker.open, breaker.failures, breaker.reason) == (True, 3, "readonly")
    with pytest.raises(StoreLeftAlone, match=r"redis.example:6379 failed \(readonly\)") as caught:
        succeed(breaker)
    assert caught.value.reason == "readonly"


def test_error_replies_of_a_failing_server_open_it(seconds: Seconds) -> None:
    for reason in "timeout connection readonly oom busy loading noperm noauth clusterdown".split():
        breaker = Breaker("redis.example:6379", seconds)
        fail(breaker, reason, 3)
        assert (breaker.open, breaker.reason) == (True, reason)


def test_error_replies_of_a_healthy_server_count_as_success(seconds: Seconds) -> None:
    for reason in "noscript moved ask tryagain crossslot wrongtype response".split():
        breaker = Breaker("redis.example:6379", seconds)
        for _ in range(10):
            fail(breaker, times=2)
            fail(breaker, reason)
            assert (breaker.open, breaker.failures, breaker.reason) == (False, 0, ""), reason
        fail(breaker, times=3)
        fail(breaker, reason, always=True)
        assert (breaker.open, breaker.failures, breaker.reason) == (False, 0, "")


def test_errors_of_this_process_do_not_count(breaker: Breaker) -> None:
    fail(breaker, times=2)
    breaker.count(OutOfTime(0.1))
    assert (breaker.failures, breaker.open) == (2, False)
    fail(breaker)
    assert breaker.open


@pytest.mark.parametrize("replied", [False, True])
def test_how_a_command_ends_is_counted(monkeypatch: pytest.MonkeyPatch, replied: bool) -> None:
    """A cancelled one does not count, nor does a timeout while the server replies to others: one link may be dead."""
    limiter = Limiter(client=redis.Redis(port=1))
    [breaker], server = limiter.store.breakers, limiter.store.server
    assert server is not None

    def send(command: Any, budget: Any, asking: bool) -> None:
        if command == ("PING",):
            raise asyncio.CancelledError
        if replied:
            server.activity.replied(time.monotonic())
        raise DeadlinePassed

    monkeypatch.setattr(server.pool, "send", send)
    for always in (False, True):
        with pytest.raises(asyncio.CancelledError):
            Call(limiter.store, always=always).do(("PING",))
        with pytest.raises(OutOfTime if replied else StoreError):
            Call(limiter.store, always=always).do(("GET",))
    assert breaker.failures == (0 if replied else 2)


# --- While it is open. ---


def test_one_request_a_second_probes(breaker: Breaker, seconds: Seconds) -> None:
    fail(breaker, times=3)
    for _ in range(5):
        seconds.now += PROBE_SECONDS - 0.001
        assert refuses(breaker)
        seconds.now += 0.001
        fail(breaker, "oom")
        assert refuses(breaker)
    assert breaker.reason == "oom"
    assert breaker.seconds == pytest.approx(5 * PROBE_SECONDS)


def test_a_probe_is_a_lease(breaker: Breaker, seconds: Seconds) -> None:
    """A probe that is cancelled or never ends must not block all later probes."""
    fail(breaker, times=3)
    seconds.now += PROBE_SECONDS
    assert not refuses(breaker)  # it ended without saying how
    assert refuses(breaker)
    seconds.now += PROBE_SECONDS
    begin(breaker)  # hangs
    assert refuses(breaker)
    seconds.now += PROBE_SECONDS
    succeed(breaker)
    assert not breaker.open
    breaker.succeeded()  # it ends
    assert not breaker.open


def test_a_decision_without_time_left_takes_no_probe() -> None:
    limiter = Limiter(client=redis.Redis(port=1), timeout=0.01)
    [breaker] = limiter.store.breakers
    fail(breaker, times=3)
    surplus_at = limiter.store.server.activity.surplus_at = time.monotonic()  # type: ignore[union-attr]  # for a probe
    call = Call(limiter.store)
    call.step(Pause(0.01))
    with pytest.raises(OutOfTime):
        call.do(("PING",))
    assert not refuses(breaker, surplus_at)


def test_operators_commands_pass_an_open_breaker_and_count(breaker: Breaker, seconds: Seconds) -> None:
    fail(breaker, times=3)
    seconds.now += PROBE_SECONDS / 2
    fail(breaker, "oom", always=True)
    assert breaker.reason == "oom"
    # Known to fail just now: no probe for a second.
    seconds.now += PROBE_SECONDS / 2
    assert refuses(breaker)
    succeed(breaker, always=True)
    assert not breaker.open


# --- Logs and signals. ---


def test_each_transition_is_logged_and_sent_once(
    breaker: Breaker, seconds: Seconds, events: list[dict[str, Any]], caplog: Any
) -> None:
    caplog.set_level(logging.DEBUG)
    fail(breaker, times=2)
    assert (events, lines(caplog)) == ([], [])
    fail(breaker, "oom")
    opened = {"sender": Breaker, "state": "open", "server": breaker.server, "reason": "oom", "seconds": 0.0}
    gives_none = "Redis at redis.example:6379 is unavailable (oom), applying each policy's on_error: no answer"
    assert events == [opened]
    assert lines(caplog) == [("ERROR", gives_none)]
    # Neither a failing probe nor who is turned away is news.
    for _ in range(3):
        seconds.now += 0.5
        assert refuses(breaker)
        seconds.now += 0.5
        fail(breaker, "connection")
    assert (len(events), len(lines(caplog))) == (1, 1)
    seconds.now += 1
    succeed(breaker)
    succeed(breaker)
    assert events[1:] == [{**opened, "state": "closed", "reason": "connection", "seconds": 4.0}]
    again = "Redis at redis.example:6379 is available again, after 4.0 s"
    assert lines(caplog)[1:] == [("WARNING", again)]
    # It takes as many failures as at first to open it again.
    fail(breaker, times=2)
    assert (breaker.open, breaker.seconds, len(events)) == (False, 0.0, 2)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failing_receiver_has_no_effect(
    breaker: Breaker, seconds: Seconds, events: list[dict[str, Any]], is_async: bool
) -> None:
    def complain(**_: Any) -> None:
        raise RuntimeError("no pager")

    async def acomplain(**_: Any) -> None:
        raise RuntimeError("no pager")

    async def on_a_loop() -> None:
        change()

    def change() -> None:
        fail(breaker, times=3)
        seconds.now += PROBE_SECONDS
        succeed(breaker)

    receiver = acomplain if is_async else complain
    store_state_changed.connect(receiver)
    try:
        asyncio.run(on_a_loop()) if is_async else change()
    finally:
        store_state_changed.disconnect(receiver)
    assert not breaker.open
    assert [one["state"] for one in events] == ["open", "closed"]


# --- What the server does meanwhile. ---


def test_an_answer_while_it_is_open_lets_one_request_through_at_once(breaker: Breaker, seconds: Seconds) -> None:
    """A connection established too late for its decision lets a probe through, so a distant server is used again."""
    fail(breaker, times=3)
    seconds.now += 0.1
    assert refuses(breaker)
    answered = seconds.now
    assert not refuses(breaker, answered), "the probe"
    seconds.now += 0.1
    assert refuses(breaker, answered), "one answer, one probe"
    seconds.now += PROBE_SECONDS
    assert not refuses(breaker, answered)
