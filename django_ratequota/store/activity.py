"""When a server last replied, and which idle connections to it may still be used."""

from __future__ import annotations

import time


class ServerActivity:
    """What this process knows of one server, in monotonic seconds; 0 = never."""

    __slots__ = ("connect_began_at", "connected_at", "replied_at", "sent_at", "stale_since", "surplus_at")

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

    @property
    def last_sign_at(self) -> float:
        """When the last reply was read, or the last connection established."""
        return max(self.replied_at, self.connected_at)

    def active_since(self, instant: float, *, logins: bool) -> bool:
        """Whether the server replied to a command sent after ``instant``; with ``logins``, or to a login.

        The time at which a reply is read proves nothing: this process may have been late to read it.
        """
        return self.sent_at > instant or (logins and self.connect_began_at > instant)

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
