"""Rows of the ledger, as if windows had been counted."""

from __future__ import annotations

from datetime import date, datetime
from typing import Any

from django_ratequota.models import PolicyChange, QuotaDay, QuotaWindow


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


def of_day(window: QuotaWindow, day: date, charged: int, refunded: int = 0) -> None:
    """Write the row of what one day added to the window, which has it already."""
    QuotaDay.objects.create(
        counter=window.counter,
        first_day=window.first_day,
        day=day,
        charged=charged,
        refunded=refunded,
        policy_id=window.policy_id or 0,
        rate=window.rate,
    )


def given_back(window: QuotaWindow, units: int, *, at: datetime, **fields: Any) -> PolicyChange:
    """Write the entry of a reset, which the window has already."""
    subject, _braces, name = window.counter[1:].partition("}:")
    state = {"remaining": 0, "window": f"{name}:{window.first_day}"}
    change = PolicyChange.objects.create(
        model="counter",
        object_id=subject,
        action="reset",
        before={"all/month": {"used": units, **state}},
        after={"all/month": {"used": 0, **state}},
        **fields,
    )
    PolicyChange.objects.filter(pk=change.pk).update(at=at)
    return change
