"""Redis as the limiter sees it: commands go in, replies or one ``StoreError`` come out, within one time a decision.

Logic that talks to Redis yields command tuples (see ``twin``). ``Store.call()`` carries out those of one decision,
under one deadline and the circuit breaker. Which server a command goes to is the store's business: the one server
here; the master that a Sentinel names, or the owner of a Cluster's slot, in the modules of these names.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..exceptions import OutOfTime, StoreError
from ..utils.sansio import adrive, drive
from .breaker import Breaker
from .budget import Budget
from .commands import Command, Script, ScriptCall
from .server import Pause, Send, Server, server_info

#: Consecutive failures after which a server is left alone.
FAILURES = 3
#: The part of a decision's time that a server must have had for its silence to count against it; its own earlier
#: answers, or another server, may have used the rest up.
_FAIR_SHARE = 0.4

#: Commands, besides scripts, whose first argument is a key.
_KEYED = frozenset({"DEL", "HGETALL", "HMGET", "LRANGE", "MGET", "SET", "ZRANGE"})

Steps = Generator[Send | Pause, Any, Any]


class Store:
    """One Redis server."""

    #: Whether keys live on several servers, so that only those of one subject can be judged together.
    clustered = False

    def __init__(self, server: Server, timeout: float, failures: int = FAILURES) -> None:
        """``timeout`` is in seconds and bounds all commands of a decision; the breaker opens after ``failures``."""
        self.timeout = timeout
        self._server = server
        self._breaker = Breaker(server.name, failures, surplus_at=lambda: server.activity.surplus_at)

    @property
    def breakers(self) -> tuple[Breaker, ...]:
        """The state of each server that decisions depend on."""
        return (self._breaker,)

    @property
    def exposed(self) -> bool:
        """Whether Redis is reached by a network without a password or a client certificate."""
        return self._server.trusting and self._server.remote

    def carry_out(self, command: Command, call: Call) -> Any:
        """Send one command of the call; raises ``StoreError``."""
        with self._breaker.guard(call.always):
            return call.step(Send(self._server, command))

    async def acarry_out(self, command: Command, call: Call) -> Any:
        """``carry_out``, awaited."""
        with self._breaker.guard(call.always):
            return await call.astep(Send(self._server, command))

    def info(self, call: Call | None = None) -> dict[str, dict[str, str]]:
        """What each server that decides says of itself (INFO), by name (host:port); raises ``StoreError``.

        As part of ``call``, else within a time of its own.
        """
        # All of it: before Redis 7, two sections were a syntax error.
        replies = drive(self._survey_steps(("INFO",)), (call or Call(self, always=True)).step)
        return {name: server_info(reply) for name, reply in replies.items()}

    def _survey_steps(self, command: Command) -> Steps:
        return {self._server.name: (yield Send(self._server, command))}

    def call(self) -> Call:
        """Carries out the commands of one decision; raises ``StoreLeftAlone`` while the breaker is open."""
        return Call(self, always=False)

    def execute(self, command: Command) -> Any:
        """Send one command that an operator or a check asked for, breaker open or not; raises ``StoreError``."""
        return Call(self, always=True).do(command)

    async def aexecute(self, command: Command) -> Any:
        """``execute``, awaited."""
        return await Call(self, always=True).ado(command)

    def close(self) -> None:
        """Drop every idle connection of this process's threads; the next command connects anew."""
        self._server.close()


class SeveralServers(Store, ABC):
    """A store that finds out where a command goes."""

    @abstractmethod
    def steps(self, command: Command, always: bool) -> Steps:
        """What to send where, and in which order, for one command; ``always`` passes an open breaker."""

    def carry_out(self, command: Command, call: Call) -> Any:
        """Send one command of the call; raises ``StoreError``."""
        return drive(self.steps(command, call.always), call.step)

    async def acarry_out(self, command: Command, call: Call) -> Any:
        """``carry_out``, awaited."""
        return await adrive(self.steps(command, call.always), call.astep)


class Call:
    """The commands of one decision, which wait for the server together for the store's timeout at most."""

    __slots__ = ("_budget", "_store", "always")

    def __init__(self, store: Store, *, always: bool) -> None:
        self._store = store
        #: Whether it passes an open breaker.
        self.always = always
        # What happens between commands (reading policies, say) is not Redis' doing, and does not count.
        self._budget = Budget(store.timeout)

    def do(self, command: Command) -> Any:
        """Send the command and return its reply; raises ``StoreError``."""
        return self._store.carry_out(command, self)

    async def ado(self, command: Command) -> Any:
        """``do``, awaited."""
        return await self._store.acarry_out(command, self)

    def step(self, step: Send | Pause) -> Any:
        """One step of a command, in what is left of the budget."""
        if isinstance(step, Pause):
            return time.sleep(self._pause(step))
        begun, budget = time.monotonic(), self._part(step)
        seconds, budget.left_at_send = budget.left, None
        try:
            return step.server.send(step.command, budget, step.asking)
        except StoreError as error:
            if error.reason == "timeout" and not self._tells(step.server, begun, seconds, budget):
                raise OutOfTime(self._store.timeout) from error
            raise
        finally:
            self._used(budget)

    async def astep(self, step: Send | Pause) -> Any:
        """``step``, awaited."""
        if isinstance(step, Pause):
            return await asyncio.sleep(self._pause(step))
        begun, budget = time.monotonic(), self._part(step)
        seconds, budget.left_at_send = budget.left, None
        try:
            return await step.server.asend(step.command, budget, step.asking)
        except StoreError as error:
            if error.reason == "timeout" and not self._tells(step.server, begun, seconds, budget):
                raise OutOfTime(self._store.timeout) from error
            raise
        finally:
            self._used(budget)

    def _tells(self, server: Server, begun: float, seconds: float, budget: Budget) -> bool:
        """Whether a timeout tells of the server: it had a fair share of the time, and answered nobody meanwhile.

        The share of a command that had a connection counts from there, and then no login is an answer.
        """
        in_queue = budget.left_at_send is None
        if budget.left_at_send is not None:
            seconds = budget.left_at_send
        fair = seconds >= self._store.timeout * _FAIR_SHARE
        return fair and not server.activity.active_since(begun, logins=in_queue)

    def _pause(self, step: Pause) -> float:
        if self._budget.used_up:
            raise OutOfTime(self._store.timeout)
        self._budget.left -= step.seconds
        return step.seconds

    def _part(self, step: Send) -> Budget:
        if self._budget.used_up:
            raise OutOfTime(self._store.timeout)
        return self._budget if step.share == 1.0 else self._budget.part(step.share)

    def _used(self, budget: Budget) -> None:
        if budget is not self._budget:
            self._budget.left -= budget.spent


def run_script(script: Script, keys: Sequence[str], args: Sequence[object]) -> Generator[Command, Any, Any]:
    """The one step that runs a script."""
    return (yield ScriptCall(script, keys, args))


@contextmanager
def reading() -> Iterator[None]:
    """Raise ``StoreError`` where the block cannot read what Redis holds, because another client wrote it."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, zlib.error) as error:
        raise StoreError("response", f"Redis holds what was never stored there: {error!r:.200}") from error


def routed_key(command: Command) -> str | None:
    """The key that says which server a command belongs to; None when any will do."""
    if command[0] in ("EVALSHA", "EVAL"):
        return command[3] if command[2] else None
    return command[1] if command[0] in _KEYED else None
