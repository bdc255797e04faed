"""Signals that no request fails by, whatever its receivers do."""

from __future__ import annotations

from typing import Any

from .problems import note_problem


def send_robustly(signal: Any, **arguments: Any) -> None:
    """Send a signal of Django's. Errors of receivers are logged.

    On a thread that runs an event loop async receivers cannot be called; that is logged, too.
    """
    try:
        signal.send_robust(**arguments)
    except RuntimeError as error:
        note_problem("signals", f"async receivers of a signal were not called: {error}", error)
