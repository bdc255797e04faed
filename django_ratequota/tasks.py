"""``ratequota rollup`` as a background task, for Django 6.0 and later."""

from __future__ import annotations

from dataclasses import asdict

from django.tasks import task

from .monitoring.rollup import KEEP_DAYS, roll_up


@task
def rollup(keep_days: int = KEEP_DAYS) -> dict[str, int]:
    """Write counts to the database; enqueue about once an hour. Returns the numbers of rows written and deleted."""
    return asdict(roll_up(keep_days))
