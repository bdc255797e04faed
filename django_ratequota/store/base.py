"""Redis as a place to send commands: each returns its reply or raises ``StoreError``, within the decision's deadline.

Logic that talks to Redis yields command tuples (see ``utils.sansio``). ``Store.call()`` carries out those of one
decision, under one deadline and behind the circuit breaker. The store chooses the server: the only one here; the
master that a Sentinel names, or the owner of a Cluster's slot, in ``sentinel`` and ``cluster``.
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

#: Consecutive failures that open a server's breaker.
FAILURES = 3
#: A timeout counts as the server's failure only if it had this share of the decision's time: other commands, or
#: another server, may have used the rest.
_FAIR_SHARE = 0.4

#: Commands, besides scripts, whose first argument is a key.
_KEYED = frozenset({"DEL", "HGETALL", "HMGET", "LRANGE", "MGET", "SET", "ZRANGE"})

Steps = Generator[Send | Pause, Any, Any]


class Store:
    """One Redis server."""

    #: Whether keys live on several servers, so that only buckets of one subject can be checked in one call.
    clustered = False
    #: Why there is no server, in words; "" = there is one.
    absent = ""

    def __init__(self, server: Server, timeout: float, failures: int = FAILURES) -> None:
        """``timeout`` (seconds) bounds all commands of a decision; the breaker opens after ``failures``."""
        self.timeout = timeout
        self._server = server
        self._breaker = Breaker(server.name, failures, surplus_at=lambda: server.activity.surplus_at)

    @property
    def breakers(self) -> tuple[Breaker, ...]:
        """The breaker of each server that decisions depend on."""
        return (self._breaker,)

    @property
    def exposed(self) -> bool:
        """Whether Redis is reached through a network, without a password or a client certificate."""
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
        """Return the INFO fields of each server that decides, by its name (host:port); raises ``StoreError``.

        They are read as part of ``call``; without one, within a deadline of their own.
        """
        # All of it: before Redis 7, two sections were a syntax error.
        replies = drive(self._survey_steps(("INFO",)), (call or Call(self, always=True)).step)
        return {name: server_info(reply) for name, reply in replies.items()}

    def _survey_steps(self, command: Command) -> Steps:
        return {self._server.name: (yield Send(self._server, command))}

    def call(self) -> Call:
        """Return a call for the commands of one decision; it raises ``StoreLeftAlone`` while the breaker is open."""
        return Call(self, always=False)

    def execute(self, command: Command) -> Any:
        """Send one command for an operator or a check, even while the breaker is open; raises ``StoreError``."""
        return Call(self, always=True).do(command)

    async def aexecute(self, command: Command) -> Any:
        """``execute``, awaited."""
        return await Call(self, always=True).ado(command)

    def close(self) -> None:
        """Close all idle connections of this process's threads; the next command reconnects."""
        self._server.close()


class RoutingStore(Store, ABC):
    """A store that finds the server of each command."""

    @abstractmethod
    def steps(self, command: Command, always: bool) -> Steps:
        """Return the steps of one command; with ``always`` they pass an open breaker."""

    def carry_out(self, command: Command, call: Call) -> Any:
        """Send one command of the call; raises ``StoreError``."""
        return drive(self.steps(command, call.always), call.step)

    async def acarry_out(self, command: Command, call: Call) -> Any:
        """``carry_out``, awaited."""
        return await adrive(self.steps(command, call.always), call.astep)


class Call:
    """The commands of one decision; together they wait for the server for the store's timeout at most."""

    __slots__ = ("_budget", "_store", "always")

    def __init__(self, store: Store, *, always: bool) -> None:
        self._store = store
        #: Whether it passes an open breaker.
        self.always = always
        # Time between commands, such as reading policies, does not count.
        self._budget = Budget(store.timeout)

    def do(self, command: Command) -> Any:
        """Send the command and return its reply; raises ``StoreError``."""
        return self._store.carry_out(command, self)

    async def ado(self, command: Command) -> Any:
        """``do``, awaited."""
        return await self._store.acarry_out(command, self)

    def step(self, step: Send | Pause) -> Any:
        """Carry out one step of a command, within what is left of the budget."""
        if isinstance(step, Pause):
            return time.sleep(self._pause(step))
        begun, budget = time.monotonic(), self._budget_of(step)
        seconds, budget.left_at_send = budget.left, None
        try:
            return step.server.send(step.command, budget, step.asking)
        except StoreError as error:
            if error.reason == "timeout" and not self._is_failure(step.server, begun, seconds, budget):
                raise OutOfTime(self._store.timeout) from error
            raise
        finally:
            self._spend(budget)

    async def astep(self, step: Send | Pause) -> Any:
        """``step``, awaited."""
        if isinstance(step, Pause):
            return await asyncio.sleep(self._pause(step))
        begun, budget = time.monotonic(), self._budget_of(step)
        seconds, budget.left_at_send = budget.left, None
        try:
            return await step.server.asend(step.command, budget, step.asking)
        except StoreError as error:
            if error.reason == "timeout" and not self._is_failure(step.server, begun, seconds, budget):
                raise OutOfTime(self._store.timeout) from error
            raise
        finally:
            self._spend(budget)

    def _is_failure(self, server: Server, begun: float, seconds: float, budget: Budget) -> bool:
        """Whether a timeout is the server's failure: it had a fair share of the time, and made no reply in it.

        Once a command has a connection, its share counts from there, and logins are no replies.
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

    def _budget_of(self, step: Send) -> Budget:
        if self._budget.used_up:
            raise OutOfTime(self._store.timeout)
        return self._budget if step.share == 1.0 else self._budget.part(step.share)

    def _spend(self, budget: Budget) -> None:
        if budget is not self._budget:
            self._budget.left -= budget.spent


def run_script(script: Script, keys: Sequence[str], args: Sequence[object]) -> Generator[Command, Any, Any]:
    """Return the step that runs a script."""
    return (yield ScriptCall(script, keys, args))


@contextmanager
def reading() -> Iterator[None]:
    """Raise ``StoreError`` when the block cannot read a value in Redis, because another client wrote it."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, zlib.error) as error:
        raise StoreError("response", f"Redis holds a value of another client: {error!r:.200}") from error


def routed_key(command: Command) -> str | None:
    """Return the key that decides which server a command goes to; None = any."""
    if command[0] in ("EVALSHA", "EVAL"):
        return command[3] if command[2] else None
    return command[1] if command[0] in _KEYED else None
