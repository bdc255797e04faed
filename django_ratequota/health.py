"""What each worker reports about itself: ``health()``, and ``report()`` for those that serve no requests."""

from .monitoring.health import Health, health, report

__all__ = ["Health", "health", "report"]
