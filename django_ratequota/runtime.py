"""This process's limiter, by the settings in force. Tests replace it here."""

from __future__ import annotations

import os

from .conf import OncePerSettings
from .engine.limiter import Limiter
from .exceptions import ConfigurationError, StoreError

_made = OncePerSettings(Limiter)
# A child has connections, a breaker and a histogram of its own.
os.register_at_fork(after_in_child=_made.forget)


def default_limiter() -> Limiter:
    """This process's limiter by the settings; raises ``StoreError`` where these name no Redis."""
    try:
        return _made()
    except ConfigurationError as error:
        raise StoreError("configuration", str(error)) from error
