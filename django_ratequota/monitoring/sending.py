"""The thread that sends to Redis what this process has recorded, and its report, every STATISTICS_SECONDS.

It writes the outages of Redis to the database as well.
"""

from __future__ import annotations

from ..conf import settings
from ..policies.cache import listeners
from .background import Background
from .collector import collector
from .health import report
from .outages import outages


def _send() -> None:
    outages.flush()
    try:
        collector.flush()
    finally:
        if settings.enabled and not settings.in_memory:
            report()


#: Each request keeps it running.
sending = Background("ratequota-statistics", lambda: settings.statistics_seconds, _send)
# At once after a load: the last report names a revision that no longer applies.
listeners.append(sending.soon)
