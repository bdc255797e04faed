"""Logs refusals with 503 as warnings, like refusals with 429.

Django logs each response from 500 on as an error of ``django.request``, and by default mails each to ADMINS. A policy
that denies while Redis is down would send one mail per request; the failure itself is logged once, by the breaker.
"""

from __future__ import annotations

import logging

from ..engine.decision import Decision


class RefusalsAreWarnings(logging.Filter):
    """Turns the record of a refused request from an error into a warning; all other records stay as they are."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged, by its new level too."""
        if record.levelno != logging.ERROR or record.exc_info or getattr(record, "status_code", None) != 503:
            return True
        decision = getattr(getattr(record, "request", None), "ratequota", None)
        if not isinstance(decision, Decision) or not decision.denied_by:
            return True
        record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
        return logging.getLogger(record.name).isEnabledFor(logging.WARNING)


_filter = RefusalsAreWarnings()


def connect() -> None:
    """Filter ``django.request``, by which Django's handlers log responses; called once at start."""
    logging.getLogger("django.request").addFilter(_filter)
