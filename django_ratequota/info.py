"""What a server says of itself in its reply to INFO."""

from __future__ import annotations

from typing import Any


def server_info(reply: Any) -> dict[str, Any]:
    """The reply as a dict, whichever way the connection read it."""
    if isinstance(reply, bytes):
        return dict(line.split(":", 1) for line in reply.decode().splitlines() if ":" in line)
    return dict(reply)


def server_version(reply: Any) -> tuple[str, str]:
    """("valkey" or "redis", version); Valkey also calls itself Redis 7.2.4."""
    info = server_info(reply)
    if info.get("valkey_version"):
        return "valkey", str(info["valkey_version"])
    return "redis", str(info.get("redis_version", "0"))
