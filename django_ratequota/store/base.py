"""Redis as a place to send commands: each returns its reply or raises ``StoreError``, within the decision's deadline.

Logic that talks to Redis yields command tuples (see ``utils.sansio``). A ``Call`` carries out those of one
decision, under one deadline and behind the circuit breaker. The store chooses the server: the only one, in
``server``, or the owner of a Cluster's slot, in ``cluster``.

Importing this module does not import redis-py.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Never, Protocol

from ..exceptions import OutOfTime, StoreError, StoreLeftAlone
from ..utils.sansio import adrive, drive
from .breaker import Breaker
from .commands import Command

#: A timeout counts as the server's failure only if it had this share of the decision's time: other commands, or
#: another server, may have used the rest.
_FAIR_SHARE = 0.4
#: From this part of ``maxmemory`` on, operators are warned: a full server refuses to count.
NEARLY_FULL = 0.8
#: Slices per decision.
_SLICES = 8
#: Seconds of the shortest slice.
_SHORTEST = 0.001
#: Slices of uneven length leave this many seconds over.
NOTHING = 1e-9
#: A slice that took this many times its length was late: this process was busy.
_LATE = 1.5
#: A decision may wait in the queue for a connection this many times its seconds, while the server replies to others.
_MAX_QUEUED = 10
#: The server counts as active for this share of the seconds after a reply; this process may read the next one late.
_RECENT = 0.5


class DeadlinePassed(TimeoutError):
    """The time for connecting or for the decision is used up."""


def is_alarm(error: BaseException | None) -> bool:
    """Whether the handler of a signal raised this timeout: neither the system nor this package did."""
    return isinstance(error, TimeoutError) and error.errno is None and not isinstance(error, DeadlinePassed)


class ServerActivity:
    """What this process knows of one server, in monotonic seconds; 0 = never."""

    def __init__(self) -> None:
        #: When the last reply to a command was read, and when that command had been sent.
        self.replied_at = self.sent_at = 0.0
        #: When a connection was last established, and when that connect had begun. A server that hangs, or a proxy
        #: before it, may still accept a login.
        self.connected_at = self.connect_began_at = 0.0
        #: When a connection was last established that no caller waited for any more.
        self.surplus_at = 0.0
        #: Connections that have been idle since then or longer are not reused: one of that age was dead.
        self.stale_since = 0.0

    def replied(self, sent_at: float) -> float:
        """Note a reply to a command that was sent at ``sent_at``; returns the time now."""
        if sent_at > self.sent_at:  # ``max`` would cost every decision a call
            self.sent_at = sent_at
        self.replied_at = now = time.monotonic()
        return now

    def connected(self, began_at: float, *, surplus: bool) -> None:
        """Note a new connection whose connect began at ``began_at``; ``surplus`` = no caller waits for it."""
        self.connect_began_at = max(self.connect_began_at, began_at)
        self.connected_at = time.monotonic()
        if surplus:
            self.surplus_at = self.connected_at

    def distrust(self, idle_since: float) -> None:
        """Reuse no connection that has been idle since ``idle_since`` or longer."""
        self.stale_since = max(self.stale_since, idle_since)


class Awaited(Protocol):
    """What a thread polls and a task awaits."""

    @property
    def queued_for(self) -> ServerActivity | None:
        """The server's activity if it is a connection that is awaited, else None."""

    def poll(self, milliseconds: float) -> object:
        """Wait at most that long; returns something true if it has come."""

    async def apoll(self, milliseconds: float) -> object:
        """``poll``, awaited."""


class Budget:
    """Seconds that a decision may still wait for the server.

    Time in which this process could not read a reply is not the server's: a thread waited for the interpreter, or a
    callback stalled the event loop. So a wait is divided into slices. A slice that the operating system timed as
    silent counts whole. A wait that ended early counts as one slice at most, however late this process noticed.
    """

    #: When the present command began, what was left then, and when it had a connection; None before.
    begun_at = 0.0
    left_at_begin: float
    left_at_send: float | None = None
    #: Since when the connection of the present command had been idle; 0 = it has none.
    idle_since = 0.0
    #: Seconds counted in the queue since the last connection; seconds not counted, as slices were late; seconds not
    #: counted in the queue, as the server replied to others.
    _in_queue = _excused = _queued = 0.0

    def __init__(self, seconds: float) -> None:
        self.left = self.total = seconds
        self.slice = max(seconds / _SLICES, _SHORTEST)

    def connected(self) -> None:
        """Give back the time in the queue: the command begins only now.

        Connecting takes several round trips. A command that had only the rest of the time timed out, its connection
        was dropped, and so did the next one. Even so a decision takes twice its time at most, the queue behind other
        callers aside.
        """
        back = max(min(self._in_queue, self.total - self._excused), 0.0)
        self.left += back
        self._excused += back
        self._in_queue = 0.0

    def wait(self, awaited: Awaited) -> None:
        """Wait for one slice at most; raises ``DeadlinePassed`` once the time is used up."""
        if self.left < NOTHING:
            raise DeadlinePassed("no reply in time")
        seconds, begun = min(self.slice, max(self.left, _SHORTEST)), time.monotonic()
        came = awaited.poll(seconds * 1000)
        took = time.monotonic() - begun
        if awaited.queued_for is not None:
            self._count(min(took, seconds), begun, late=took > _LATE * seconds, queued_for=awaited.queued_for)
        else:
            self.left -= took if came and took < seconds else seconds

    async def await_for(self, awaited: Awaited) -> None:
        """``wait``, awaited. A late slice counts half: the loop was busy, and may not have seen what is there."""
        if self.left < NOTHING:
            raise DeadlinePassed("no reply in time")
        seconds, begun = min(self.slice, max(self.left, _SHORTEST)), time.monotonic()
        await awaited.apoll(seconds * 1000)
        took = time.monotonic() - begun
        self._count(min(took, seconds), begun, late=took > _LATE * seconds, queued_for=awaited.queued_for)

    def _count(self, seconds: float, since: float, *, late: bool, queued_for: ServerActivity | None) -> None:
        """Count a slice of ``seconds`` that began at ``since``; half of it where it ended ``late``.

        ``queued_for`` is set in the queue for a connection. There half of it counts as well when the server accepted
        a login meanwhile. While the server replies to other commands, the caller waits for these, not for the
        server: then nothing counts, nor does the time before in the queue, for up to ten times the total.
        """
        if queued_for is not None:
            recently = since - self.total * _RECENT
            if queued_for.replied_at >= recently and self._queued < _MAX_QUEUED * self.total:
                self._queued += seconds + self._in_queue
                self.left += self._in_queue
                self._in_queue = 0.0
                return
            late = late or max(queued_for.replied_at, queued_for.connected_at) >= since
        counted = seconds * (0.5 if late else 1.0)
        self.left -= counted
        self._excused += seconds - counted
        if queued_for is not None:
            self._in_queue += counted


class Send(NamedTuple):
    """A step of a store: send one command to one server."""

    #: A ``server.Server``, which is not imported here, as it imports redis-py.
    server: Any
    command: Command
    #: Counts how it ends, and refuses it while open.
    breaker: Breaker | None = None
    #: The share of the decision's remaining time that it may take.
    share: float = 1.0
    asking: bool = False


class Pause(NamedTuple):
    """A step of a store: wait before the next one."""

    seconds: float


Steps = Generator[Send | Pause, Any, Any]


class Store(ABC):
    """Where commands go: to one server, or to a Cluster."""

    #: Seconds that all commands of a decision may wait.
    timeout: float
    #: Whether Redis is reached through a network, without a password or a client certificate.
    exposed: bool
    #: The server of every command; None where ``steps`` finds one for each.
    server: Any = None
    #: The breaker of the store's only server, or service.
    breaker: Breaker | None = None
    #: Whether keys live on several servers, so that only buckets of one subject can be checked in one call.
    clustered = False
    #: Why there is no server, in words; "" = there is one.
    absent = ""

    @property
    def breakers(self) -> tuple[Breaker, ...]:
        """The breaker of each server that decisions depend on."""
        return () if self.breaker is None else (self.breaker,)

    def steps(self, command: Command, always: bool) -> Steps:
        """Return the steps of one command, where ``server`` is None; with ``always`` they pass an open breaker."""
        raise NotImplementedError

    @abstractmethod
    def survey_steps(self, command: Command, only: str = "") -> Steps:
        """Return the steps that send a command to each server with counters, and return their replies by its name.

        ``only`` is the name of the one to ask; "" = all of them.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all idle connections of this process; the next command reconnects."""

    def execute(self, command: Command) -> Any:
        """Send one command for an operator or a check, even while the breaker is open; raises ``StoreError``."""
        return Call(self, always=True).do(command)

    async def aexecute(self, command: Command) -> Any:
        """``execute``, awaited."""
        return await Call(self, always=True).ado(command)

    def execute_on(self, name: str, command: Command) -> Any:
        """Send one command to the server of this name, as in ``info``; raises ``StoreError``."""
        replies = drive(self.survey_steps(command, name), Call(self, always=True).step)
        if name not in replies:
            raise StoreError("moved", f"{name} no longer decides: another server has taken over")
        return replies[name]

    def info(self, call: Call | None = None) -> dict[str, dict[str, str]]:
        """Return the INFO fields of each server with counters, by its name (host:port); raises ``StoreError``.

        They are read as part of ``call``; without one, within a deadline of their own.
        """
        # All of it: before Redis 7, two sections were a syntax error.
        replies = drive(self.survey_steps(("INFO",)), (call or Call(self, always=True)).step)
        return {name: server_info(reply) for name, reply in replies.items()}


class AbsentStore(Store):
    """Refuses every command, because the settings name no server."""

    timeout, exposed = 0.0, False

    def __init__(self, reason: str, message: str, *, intended: bool = True) -> None:
        """``reason`` and ``message`` are those of its ``StoreError``s. Not ``intended`` = the settings are wrong.

        If they are intended, ``message`` is also ``absent``.
        """
        self._reason, self._message = reason, f"this needs Redis, but {message}" if intended else message
        self.absent = message if intended else ""

    def steps(self, command: Command, always: bool = True) -> Never:
        """Raise ``StoreError``."""
        raise StoreLeftAlone(self._reason, self._message)

    def survey_steps(self, command: Command, only: str = "") -> Never:
        """Raise ``StoreError``."""
        self.steps(command)

    def close(self) -> None:
        """Do nothing."""


class Call:
    """The commands of one decision; together they wait for the server for the store's timeout at most.

    It raises ``StoreLeftAlone`` while the breaker is open, unless it is made with ``always``.
    """

    def __init__(self, store: Store, *, always: bool = False) -> None:
        self._store = store
        #: Whether it passes an open breaker.
        self.always = always
        # Time between commands, such as reading policies, does not count.
        self._budget = Budget(store.timeout)

    def do(self, command: Command) -> Any:
        """Send the command and return its reply; raises ``StoreError``."""
        store = self._store
        if store.server is None:
            return drive(store.steps(command, self.always), self.step)
        return self._send(store.server, command, store.breaker)

    async def ado(self, command: Command) -> Any:
        """``do``, awaited."""
        store = self._store
        if store.server is None:
            return await adrive(store.steps(command, self.always), self.astep)
        return await self._asend(store.server, command, store.breaker)

    def step(self, step: Send | Pause) -> Any:
        """Carry out one step of a command, within what is left of the budget."""
        return time.sleep(self._pause(step)) if isinstance(step, Pause) else self._send(*step)

    async def astep(self, step: Send | Pause) -> Any:
        """``step``, awaited."""
        return await (asyncio.sleep(self._pause(step)) if isinstance(step, Pause) else self._asend(*step))

    def _send(
        self, server: Any, command: Command, breaker: Breaker | None, share: float = 1.0, asking: bool = False
    ) -> Any:
        budget = self._begin(server, breaker, share)
        try:
            reply = server.pool.send(command, budget, asking)
        except server.errors as error:
            raise self._failed(server, breaker, budget, error) from error
        finally:
            if budget is not self._budget:
                self._budget.left -= budget.total - budget.left
        if breaker is not None and breaker.failures:
            breaker.succeeded()
        return reply

    async def _asend(
        self, server: Any, command: Command, breaker: Breaker | None, share: float = 1.0, asking: bool = False
    ) -> Any:
        budget = self._begin(server, breaker, share)
        try:
            reply = await server.pool.asend(command, budget, asking)
        except server.errors as error:
            raise self._failed(server, breaker, budget, error) from error
        finally:
            if budget is not self._budget:
                self._budget.left -= budget.total - budget.left
        if breaker is not None and breaker.failures:
            breaker.succeeded()
        return reply

    def _pause(self, step: Pause) -> float:
        if self._budget.left < NOTHING:
            raise OutOfTime(self._store.timeout)
        self._budget.left -= step.seconds
        return step.seconds

    def _begin(self, server: Any, breaker: Breaker | None, share: float) -> Budget:
        """Return the budget of a command; raises ``StoreLeftAlone`` and ``OutOfTime``."""
        budget = self._budget
        if budget.left < NOTHING:
            raise OutOfTime(self._store.timeout)
        if breaker is not None and breaker.open and not self.always:
            breaker.take_probe(server.activity.surplus_at)
        if share < 1.0:
            budget = Budget(budget.left * share)
        budget.begun_at, budget.left_at_begin, budget.left_at_send = time.monotonic(), budget.left, None
        budget.idle_since = 0.0
        return budget

    def _failed(self, server: Any, breaker: Breaker | None, budget: Budget, error: Exception) -> StoreError:
        """Return the ``StoreError`` for the error of a command, counted by the breaker."""
        failure: StoreError = server.failure(error, budget.idle_since)
        if failure.reason == "timeout" and not self._is_fault(server.activity, budget):
            failure = OutOfTime(self._store.timeout)
        if breaker is not None:
            breaker.count(failure)
        return failure

    def _is_fault(self, activity: ServerActivity, budget: Budget) -> bool:
        """Whether a timeout is the server's: it had a fair share of the time, and replied to nothing sent in it.

        The time at which a reply is read proves nothing: this process may have been late to read it. Once a command
        has a connection, its share counts from there, and logins are no replies.
        """
        in_queue = budget.left_at_send is None
        seconds = budget.left_at_begin if budget.left_at_send is None else budget.left_at_send
        replied = activity.sent_at > budget.begun_at or (in_queue and activity.connect_began_at > budget.begun_at)
        return seconds >= self._store.timeout * _FAIR_SHARE and not replied


@contextmanager
def reading() -> Iterator[None]:
    """Raise ``StoreError`` when the block cannot read a value in Redis, because another client wrote it."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, zlib.error) as error:
        raise StoreError("response", f"Redis holds a value of another client: {error!r:.200}") from error


def server_info(reply: bytes) -> dict[str, str]:
    """Return the fields of a reply to INFO."""
    return dict(line.split(":", 1) for line in reply.decode().splitlines() if ":" in line)


def server_version(info: dict[str, str]) -> tuple[str, str]:
    """Return ("valkey" or "redis", version); Valkey also reports itself as Redis 7.2.4."""
    if info.get("valkey_version"):
        return "valkey", info["valkey_version"]
    return "redis", info.get("redis_version", "0")


def memory_ratio(info: dict[str, str]) -> float | None:
    """Return the part of ``maxmemory`` in use; None without a limit, or where the server evicts keys instead."""
    most = int(info.get("maxmemory", 0))
    if not most or info.get("maxmemory_policy", "noeviction") != "noeviction":
        return None
    return int(info.get("used_memory", 0)) / most
