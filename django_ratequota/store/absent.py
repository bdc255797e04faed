"""A store without a server, where limits are counted in this process or not at all."""

from __future__ import annotations

from typing import Any, Never

from ..exceptions import StoreError
from .base import Call, Store
from .breaker import Breaker
from .commands import Command


class AbsentStore(Store):
    """Refuses every command, with ``absent`` as the message; its limiter sends none for decisions."""

    def __init__(self, reason: str, absent: str) -> None:
        """``reason`` is the label of its ``StoreError``s; ``absent``, their message, tells why there is no server."""
        self.timeout = 0.0
        self.absent = absent
        self._reason = reason

    @property
    def breakers(self) -> tuple[Breaker, ...]:
        """None: there is no server."""
        return ()

    @property
    def exposed(self) -> bool:
        """False: there is no server."""
        return False

    def carry_out(self, command: Command, call: Call) -> Never:
        """Raise ``StoreError``."""
        raise StoreError(self._reason, self.absent)

    async def acarry_out(self, command: Command, call: Call) -> Never:
        """Raise ``StoreError``."""
        raise StoreError(self._reason, self.absent)

    def info(self, call: Call | None = None) -> dict[str, Any]:
        """Raise ``StoreError``."""
        raise StoreError(self._reason, self.absent)

    def close(self) -> None:
        """Do nothing."""
