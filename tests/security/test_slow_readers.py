"""Clients that ask for a long response and never read it, to keep the slots of a concurrent limit from all others."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults import poll
from tests.faults.test_concurrent_requests import GUNICORN, UVICORN, Slots, changed, limit, slots
from tests.faults.test_http_servers import SECONDS, editor, environment, serving

__all__ = ["editor", "environment", "limit", "slots"]


def ask(port: int, path: str) -> socket.socket:
    """Ask for a page, and read nothing."""
    client = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return client


@pytest.mark.parametrize(("command", "path"), [(GUNICORN, "/flood/"), (UVICORN, "/aflood/")])
def test_streams_that_are_never_read(
    command: str, path: str, limit: Any, slots: Slots, environment: dict[str, str], tmp_path: Path
) -> None:
    """Three readers of 100 bytes held ``3 concurrent`` for everyone, for good."""
    limit(3)
    with serving(command, changed(environment, CONCURRENCY_MAX=2), tmp_path / "log") as port, ExitStack() as stack:
        slow = [stack.enter_context(ask(port, path)) for _ in range(3)]
        poll(lambda: slots.held() == 3, SECONDS, "all slots are held")
        assert b" 429 " in stack.enter_context(ask(port, "/run/")).recv(100)
        slots.wait_until_free()
        assert b" 200 " in stack.enter_context(ask(port, "/run/")).recv(100)
        assert [b" 200 " in client.recv(100) for client in slow] == [True] * 3, "their responses still wait"
    assert "have lost their slots" in (tmp_path / "log").read_text()
