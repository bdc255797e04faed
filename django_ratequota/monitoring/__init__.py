"""What each process records about its decisions, and what reads it back."""

from __future__ import annotations

from typing import Any

from ..conf import settings

#: Whether the database gets rows. Tests switch it off, because a thread would write past their transactions.
writes_rows = True


def is_kept(limiter: Any) -> bool:
    """Whether counts are kept in the database: those of Redis are, if the setting says so."""
    return bool(settings.checkpoint_seconds) and not limiter.store.absent and writes_rows
