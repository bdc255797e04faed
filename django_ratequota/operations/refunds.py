"""Refund or reset what a customer has used in a calendar window, from the code of a project."""

from __future__ import annotations

from datetime import date
from typing import Any, Literal

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.utils.translation import gettext as _

from ..engine.keys import short
from ..engine.types import Bucket
from ..models import Endpoint, QuotaWindow
from ..policies.facts import to_datetime
from ..policies.matching import NO_METHOD
from ..policies.requests.caller import DescribedCaller
from ..runtime import default_limiter
from .counters import Correction, give_back, made_with, recorded_buckets
from .explain import explain_caller

Period = Literal["day", "week", "month"]


def refund(
    customer: Any,
    units: int,
    *,
    endpoint: str | None = None,
    period: Period = "month",
    first_day: date | None = None,
    reason: str = "",
    key: str = "",
) -> tuple[Correction, ...]:
    """Refund units of a calendar limit to a customer, in Redis and in the database.

    ``customer`` is a user, or the subject of the counter such as ``user:42`` or ``organisation:7``.
    ``endpoint`` is the endpoint's name; None = the limit for all endpoints together. The period is the one that
    began on ``first_day``, which may be over; None = the one that runs now. If the customer also has a limit that
    counts requests, it gets nothing back.

    ``reason`` is for the history. A second call with the same ``key`` (up to 64 characters, such as the id of a
    webhook's event) changes nothing and returns the first one's result, whatever its other arguments.

    Returns a ``Correction`` for each counter; there may be several if policies count a customer in different ways.
    Raises ``ValidationError`` if the customer has used fewer units or has no such counter, and ``StoreError`` if
    Redis does not answer. Then nothing has changed.
    """
    if key and (made := made_with(key)):
        return made
    if type(units) is not int or units < 1:
        raise ValidationError(_("The units are a whole number, 1 or more."))
    found, first_day = _counters(_subject_of(customer), endpoint, period, first_day)
    counted = [bucket for bucket in found if bucket.rate.counts == "units"] or found
    return give_back(counted, units, reason, first_day=first_day, key=key)


def reset(
    customer: Any,
    *,
    endpoint: str | None = None,
    period: Period = "month",
    first_day: date | None = None,
    reason: str = "",
    key: str = "",
) -> tuple[Correction, ...]:
    """Refund all that a calendar limit has counted, in units and in requests; see ``refund``."""
    if key and (made := made_with(key)):
        return made
    found, first_day = _counters(_subject_of(customer), endpoint, period, first_day)
    return give_back(found, None, reason, first_day=first_day, key=key)


def _subject_of(customer: Any) -> str:
    """Return the subject as counters have it; raises ``ValidationError``."""
    if isinstance(customer, get_user_model()):
        return f"user:{customer.pk}"
    if not isinstance(customer, str):
        raise TypeError(f"customer is a user or a subject such as 'tenant:acme', not {customer!r:.100}")
    kind, _colon, value = customer.partition(":")
    if not kind or not value:
        raise ValidationError(_("Enter a subject such as user:42 or tenant:acme."))
    return f"{kind}:{short(value)}"


def _counters(
    subject: str, endpoint: str | None, period: Period, first_day: date | None
) -> tuple[list[Bucket], date | None]:
    """Return the subject's counters, and the first day of their window; raises ``ValidationError`` if it has none.

    The day is None if nothing is written of the window that runs now: then the counters are those of the policies.
    """
    place = None if endpoint is None else Endpoint.objects.filter(name=endpoint).first()
    if endpoint is not None and place is None:
        raise ValidationError(_("There is no endpoint %(name)r.") % {"name": endpoint})
    endpoint_id = None if place is None else place.pk
    rows = QuotaWindow.objects.filter(subject=subject, endpoint_id=endpoint_id, period=period)
    if first_day is None:
        now = to_datetime(default_limiter().now_us)
        rows = rows.filter(starts_at__lte=now, ends_at__gt=now)
        # After a change of the day on which months begin, the new month runs beside the old one.
        first_day = max(rows.values_list("first_day", flat=True), default=None)
    buckets = list(recorded_buckets(rows.filter(first_day=first_day)))
    if first_day is None:
        described = DescribedCaller.named(subject)
        resolved = explain_caller(described, scope=endpoint, method=NO_METHOD).resolution
        own = (one for one in resolved.buckets if (one.subject, one.endpoint_id) == (subject, endpoint_id))
        buckets = [bucket for bucket in own if bucket.durable and bucket.rate.calendar == period]
    if not buckets:
        text = _("%(subject)s has no counter per %(period)s here. Check the subject, the endpoint and the first day.")
        raise ValidationError(text % {"subject": subject, "period": period})
    return buckets, first_day
