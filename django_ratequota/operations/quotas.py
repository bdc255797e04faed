"""What callers have used of their quotas, by calendar month: for invoices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Count, Max, Sum
from django.utils.translation import gettext as _

from ..conf import settings
from ..engine.calendar_windows import calendar_window
from ..models import Endpoint, QuotaWindow
from ..policies.facts import to_datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What one subject has used under one rate, in all windows that began in a month."""

    subject: str
    #: None = all endpoints; of a deleted one, its number.
    endpoint: str | None
    rate: str
    #: Number of the windows: 1 for a rate by the month, up to 31 for one by the day.
    windows: int
    #: Units, or requests where the rate counts requests.
    used: int
    #: The limit of the last window.
    limit: int


def month_of(text: str) -> tuple[Any, Any]:
    """Return when the month ``2026-10`` begins and ends in TIME_ZONE; raises ``ValidationError``."""
    try:
        first = datetime.strptime(text, "%Y-%m").replace(day=15, tzinfo=settings.time_zone)
    except ValueError as error:
        raise ValidationError(_("Write the month as in 2026-10, not %(text)r."), params={"text": text}) from error
    start_us, end_us = calendar_window("month", int(first.timestamp()) * 10**6, settings.time_zone)
    return to_datetime(start_us), to_datetime(end_us)


def previous_month(today: date) -> str:
    """Return the month before that of ``today``, as in 2026-10."""
    return f"{today.replace(day=1) - timedelta(days=1):%Y-%m}"


def used_in_month(month: str, subject: str = "") -> Iterator[Used]:
    """Yield what each subject has used, or one only, by subject; raises ``ValidationError``.

    A window belongs to the month in which it began. Windows of another length have rows of their own.
    """
    start, end = month_of(month)
    rows = QuotaWindow.objects.filter(starts_at__gte=start, starts_at__lt=end)
    if subject:
        rows = rows.filter(subject=subject)
    names = dict(Endpoint.objects.values_list("pk", "name"))
    sums = rows.order_by("subject", "counter").values("subject", "counter", "endpoint_id")
    sums = sums.annotate(windows=Count("pk"), sum=Sum("used"), limit=Max("limit"), last_rate=Max("rate"))
    for row in sums.iterator(chunk_size=2000):
        pk = row["endpoint_id"]
        yield Used(
            subject=row["subject"],
            endpoint=None if pk is None else names.get(pk, f"#{pk}"),
            rate=row["last_rate"],
            windows=row["windows"],
            used=row["sum"],
            limit=row["limit"],
        )
