"""A master and its replicas under Redis Sentinel: the sentinels say who the master is.

They are asked when nothing is known, and again after whatever made the master fail. That costs a decision part of
its time; what a failure left open, the next probe of the breaker finds out.
"""

from __future__ import annotations

from typing import Any

from ..exceptions import StoreError
from .base import FAILURES, SeveralServers, Steps
from .breaker import Breaker
from .commands import Command
from .server import Send, Server


class SentinelStore(SeveralServers):
    """The master of one service, found anew when it fails."""

    def __init__(
        self,
        sentinels: list[Server],
        service: str,
        kind: type,
        kwargs: dict[str, Any],
        timeout: float,
        failures: int = FAILURES,
    ) -> None:
        """``kind`` and ``kwargs`` say how to connect to the master, its address aside."""
        self.timeout = timeout
        self._sentinels = sentinels
        self._service = service
        self._kind, self._kwargs = kind, kwargs
        self._master: Server | None = None
        #: Whether the master is still who the sentinels said.
        self._sure = False
        # One for all of it: while the service fails, nobody asks the sentinels but the probe.
        self._breaker = Breaker(f"{service} (Sentinel)", failures, surplus_at=self._surplus_at)

    @property
    def exposed(self) -> bool:
        """Whether the master is reached by a network without a password or a client certificate."""
        return Server(self._kind, self._kwargs).trusting and any(sentinel.remote for sentinel in self._sentinels)

    def steps(self, command: Command, always: bool) -> Steps:
        """Send to the master, asking for it first when it is not known."""
        with self._breaker.guard(always):
            master = self._master
            if master is None or not self._sure:
                master = yield from self._find()
            try:
                return (yield Send(master, command))
            except StoreError as error:
                # Whether it was demoted, died or hangs: the sentinels know best.
                if not error.answered:
                    self._sure = False
                raise

    def _surplus_at(self) -> float:
        return self._master.activity.surplus_at if self._master else 0.0

    def close(self) -> None:
        """Drop every idle connection of this process's threads; the next command connects anew."""
        for server in (*self._sentinels, self._master):
            if server is not None:
                server.close()

    def _survey_steps(self, command: Command) -> Steps:
        master = yield from self._find()
        return {master.name: (yield Send(master, command))}

    def _find(self) -> Steps:
        asked = list(self._sentinels)
        trouble = "none knows it"
        for place, sentinel in enumerate(asked):
            command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
            try:
                # A dead sentinel must leave time for the others, and for the master.
                address = yield Send(sentinel, command, 1 / (len(asked) - place + 1))
            except StoreError as error:
                trouble = str(error)
                continue
            if address:
                # The one that answers goes first: the next search need not wait for the dead.
                self._sentinels = [sentinel, *(other for other in asked if other is not sentinel)]
                return self._settle_on(_text(address[0]), int(address[1]))
        raise StoreError("connection", f"no sentinel names the master of {self._service!r}: {trouble}")

    def _settle_on(self, host: str, port: int) -> Server:
        master = self._master
        if master is None or master.name != f"{host}:{port}":
            before, master = master, Server(self._kind, {**self._kwargs, "host": host, "port": port})
            self._master = master
            if before is not None:
                before.retire()
        self._sure = True
        return master


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
