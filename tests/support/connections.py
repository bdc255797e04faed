"""Connections of threads."""

from __future__ import annotations

from django.db import connection


def close_connection() -> None:
    """Close this thread's connection. Django keeps that to an SQLite database in memory open, so it would linger."""
    raw = connection.connection
    connection.close()
    if raw is not None and connection.vendor == "sqlite":
        raw.close()
