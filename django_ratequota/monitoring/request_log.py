"""Logs refusals with 503 as warnings, like refusals with 429.

Django logs each response from 500 on as an error of ``django.request``, and by default mails each to ADMINS. A policy
that denies while Redis is down would send one mail per request; the failure itself is logged once, by the breaker.
"""

from __future__ import annotations

import logging

from ..engine.decision import Decision


def make_refusal_a_warning(record: logging.LogRecord) -> bool:
    """Turn the record of a refused request from an error into a warning; returns whether its new level is logged."""
    if record.levelno != logging.ERROR or record.exc_info or getattr(record, "status_code", None) != 503:
        return True
    decision = getattr(getattr(record, "request", None), "ratequota", None)
    if not isinstance(decision, Decision) or not decision.denied_by:
        return True
    record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
    return logging.getLogger(record.name).isEnabledFor(logging.WARNING)


def connect() -> None:
    """Filter ``django.request``, by which Django's handlers log responses. A second call changes nothing."""
    logging.getLogger("django.request").addFilter(make_refusal_a_warning)
