"""Rows of the ledger, as if windows had been counted."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django_ratequota.models import QuotaWindow


def counted(*, subject: str, starts_at: datetime, ends_at: datetime, used: int, limit: int, **fields: Any) -> Any:
    """Write the row of a window in which this much was charged; of a month, unless ``period`` says otherwise."""
    period = fields.pop("period", "month")
    rate = fields.pop("rate", f"{limit}/{period}" + (" fixed_window" if period != "month" else ""))
    fields.setdefault("counter", f"{{{subject}}}:{fields.get('endpoint_id') or 0}:{rate}")
    fields.setdefault("written_at", starts_at)
    return QuotaWindow.objects.create(
        subject=subject,
        first_day=starts_at.date(),
        starts_at=starts_at,
        ends_at=ends_at,
        charged=used,
        refunded=0,
        limit=limit,
        period=period,
        rate=rate,
        **fields,
    )
