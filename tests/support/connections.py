"""Connections of threads."""

from __future__ import annotations

from django.db import connections


def close_connections() -> None:
    """Close this thread's connections. Django keeps those to an SQLite database in memory open: they would linger."""
    for connection in connections.all(initialized_only=True):
        raw = connection.connection
        connection.close()
        if raw is not None and connection.vendor == "sqlite":
            raw.close()
            connection.connection = None
