"""A master and its replicas under Redis Sentinel: the sentinels name the master.

They are asked for the first command, and again after the master failed. That takes part of the decision's time; where
it is not enough, the breaker's next probe finds the master.
"""

from __future__ import annotations

from typing import Any

from ..exceptions import StoreError
from .base import Send, Steps, Store
from .breaker import Breaker
from .commands import Command
from .server import Server


class SentinelStore(Store):
    """The master of one service; when it fails, the sentinels are asked again."""

    breaker: Breaker

    def __init__(
        self, sentinels: list[Server], service: str, kind: type, kwargs: dict[str, Any], timeout: float
    ) -> None:
        """``kind`` and ``kwargs`` are redis-py's connection class and its options, without the master's address."""
        self.timeout = timeout
        self.sentinels = sentinels
        self._service = service
        self._kind, self._kwargs = kind, kwargs
        self._master: Server | None = None
        #: Whether the master has not failed since the sentinels named it.
        self._confirmed = False
        # One breaker for the service: while it is open, only the probe asks the sentinels.
        self.breaker = Breaker(f"{service} (Sentinel)")
        self.exposed = Server(kind, kwargs).trusting and any(sentinel.remote for sentinel in sentinels)

    def steps(self, command: Command, always: bool) -> Steps:
        """Send to the master, finding it first when it is not confirmed."""
        if self.breaker.open and not always:
            self.breaker.take_probe(self._master.activity.surplus_at if self._master else 0.0)
        try:
            master = self._master
            if master is None or not self._confirmed:
                master = yield from self._find_master()
            reply = yield Send(master, command)
        except StoreError as error:
            # The master was demoted, is dead or hangs.
            if not error.answered:
                self._confirmed = False
            self.breaker.count(error)
            raise
        self.breaker.succeeded()
        return reply

    def survey_steps(self, command: Command, only: str = "") -> Steps:
        """Ask the master."""
        master = yield from self._find_master()
        return {master.name: (yield Send(master, command))}

    def close(self) -> None:
        """Close all idle connections of this process; the next command reconnects."""
        for server in (*self.sentinels, self._master):
            if server is not None:
                server.close()

    def _find_master(self) -> Steps:
        sentinels = list(self.sentinels)
        problem = "none knows it"
        for place, sentinel in enumerate(sentinels):
            command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
            try:
                # Because a sentinel may be dead, time is left for the others and for the master.
                address = yield Send(sentinel, command, share=1 / (len(sentinels) - place + 1))
            except StoreError as error:
                problem = str(error)
                continue
            if address:
                # The one that replied is asked first next time, before any dead one.
                self.sentinels = [sentinel, *(other for other in sentinels if other is not sentinel)]
                return self._use_master(address[0].decode(), int(address[1]))
        raise StoreError("connection", f"no sentinel names the master of {self._service!r}: {problem}")

    def _use_master(self, host: str, port: int) -> Server:
        master = self._master
        if master is None or master.name != f"{host}:{port}":
            before, master = master, Server(self._kind, {**self._kwargs, "host": host, "port": port})
            self._master = master
            if before is not None:
                before.close()
        self._confirmed = True
        return master
