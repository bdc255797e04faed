"""What a server says of itself in its reply to INFO."""

from __future__ import annotations


def server_info(reply: bytes) -> dict[str, str]:
    """The reply as a dict."""
    return dict(line.split(":", 1) for line in reply.decode().splitlines() if ":" in line)


def server_version(info: dict[str, str]) -> tuple[str, str]:
    """("valkey" or "redis", version); Valkey also calls itself Redis 7.2.4."""
    if info.get("valkey_version"):
        return "valkey", info["valkey_version"]
    return "redis", info.get("redis_version", "0")
